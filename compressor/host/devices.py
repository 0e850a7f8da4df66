"""Look devices up whose speed is foreseen from published figures: :file:`devices.yaml`, where their sources are."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import yaml

from compressor.errors import UsageError
from compressor.host.resources import PACKAGE


@dataclass(frozen=True)
class DeviceFigures:
    """Published figures of a device.

    Attributes:
        name: as people call it.
        read_bytes_per_s: of its memory.
        flop_per_s, int8_ops_per_s: of all cores that kernels run on; a multiplication and an addition are two.
    """

    name: str
    read_bytes_per_s: float
    flop_per_s: float
    int8_ops_per_s: float

    @property
    def seconds(self) -> dict[str, float]:
        """Return the least seconds of an operation or a byte, as a roofline takes them; caches are not counted on.

        ``peak_digits_op`` is of an integer by a float that may be two digits of eight bits
        (:mod:`compressor.codegen.kernels.linear.digits`).
        """
        flop, int8, read = 1 / self.flop_per_s, 1 / self.int8_ops_per_s, 1 / self.read_bytes_per_s
        peaks = {"peak_flop": flop, "peak_int8_op": int8, "peak_digits_op": min(flop, 2 * int8)}
        return {**peaks, "peak_read_byte": read, "cached_read_byte": read}


@functools.cache
def known_devices() -> Mapping[str, DeviceFigures]:
    """Return the devices of the table, by the names that ``--device`` takes."""
    table = yaml.safe_load((PACKAGE / "host" / "devices.yaml").read_text(encoding="utf-8"))
    return {key: _figures(entry) for key, entry in table.items()}


def find_device(key: str) -> DeviceFigures:
    """Return a device's figures.

    Raises:
        UsageError: it is not in the table; the nearest are named.
    """
    if (found := known_devices().get(key)) is not None:
        return found
    near = get_close_matches(key, known_devices(), n=3, cutoff=0.0)
    raise UsageError(
        f"device {key[:80]!r}: neither rpc://HOST:PORT/KEY nor one whose figures are known; nearest: {', '.join(near)} "
        "(`compress list devices`)"
    )


def _figures(entry: dict[str, object]) -> DeviceFigures:
    cores: list[dict[str, float]] = entry["cores"]  # type: ignore[assignment]
    flop, int8 = (sum(core["count"] * core["ghz"] * 1e9 * core[unit] for core in cores) for unit in ("flop", "int8"))
    return DeviceFigures(str(entry["name"]), float(str(entry["bandwidth_gb_s"])) * 1e9, flop, int8)
