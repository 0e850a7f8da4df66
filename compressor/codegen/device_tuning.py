"""Choosing schedules for GPUs that are not here: by what was measured on some, else by a model.

Measured times come home from batches (:mod:`compressor.codegen.batch`).  The database has an entry for each kernel,
class of GPUs and version of the kernels' sources; those of the user go before those that are shipped.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compressor_runtime.device.driver import serves

from compressor.codegen.tuning import REASON, Database, S, Tuner, fields_of
from compressor.host.cache import read_entries
from compressor.host.resources import PACKAGE

SHIPPED = PACKAGE / "codegen" / "gpu" / "measured.json"
"""The file of times that were measured on an H200."""
MODELLED, DEFAULT, ALONE = "modelled", "the default", "the only one"
_FORM = re.compile(r"[ -](SXM\d*|PCIe|NVL|HBM\w*|\d+ ?GB)\b.*")


@functools.cache
def gpu_kernels_digest() -> str:
    """Digest everything that decides the code of a linear's kernel for GPUs."""
    folder = PACKAGE / "codegen"
    files = [
        folder / "machine_code" / "tir_pipeline.py",
        folder / "gpu" / "intrinsics.py",
        *(folder / "gpu" / "linear").rglob("*.py"),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]


def device_class(name: str, capability: Sequence[int]) -> str:
    """Return the class of GPUs that share measured schedules: ``cuda|sm_90|NVIDIA H100``.

    Args:
        name: as the driver gives it; what it says of memory and form is left out.
        capability: major and minor compute capability.
    """
    return f"cuda|sm_{capability[0]}{capability[1]}|{_FORM.sub('', name).replace('|', ' ').strip()}"


def varying(space: Sequence[Any]) -> list[dict[str, Any]]:
    """Return, of each schedule of a space, the fields that are not the same in all of them."""
    fields = [fields_of(schedule) for schedule in space]
    return [{name: value for name, value in one.items() if any(o[name] != value for o in fields)} for one in fields]


@dataclass(frozen=True)
class Entry:
    """Hold the measured times of one kernel's candidates on one class of GPUs.

    Attributes:
        device: the class, as :func:`device_class` gives it.
        is_current: by the kernels' sources of this version.
        schedules: the varying fields of each candidate.
        seconds: of each candidate; None where it failed.
    """

    device: str
    is_current: bool
    schedules: Sequence[Mapping[str, Any]]
    seconds: Sequence[float | None]

    def relative(self, wanted: Mapping[str, Any]) -> float:
        """Return a candidate's time by the best's; infinity if it is not known."""
        found = self.seconds_of(wanted)
        return math.inf if found is None else found / min(s for s in self.seconds if s is not None)

    def seconds_of(self, wanted: Mapping[str, Any]) -> float | None:
        """Return a candidate's time; None if it is not known."""
        pairs = zip(self.schedules, self.seconds, strict=True)
        return next((seconds for fields, seconds in pairs if fields == wanted and seconds is not None), None)

    @property
    def archs(self) -> tuple[int, int]:
        """The compute capability."""
        number = self.device.split("|")[1].removeprefix("sm_")
        return int(number[:-1]), int(number[-1])


def entry_of(
    schedules: Sequence[Mapping[str, Any]], microseconds: Sequence[float | None], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write an entry of the database as plain data, with what is known of the GPU and the batch beside it."""
    return {"schedules": [dict(fields) for fields in schedules], "microseconds": list(microseconds), **facts}


class Measured:
    """The entries of one database, by kernel; what is not an entry of ours is passed over."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._found: dict[str, dict[str, Entry]] = {}
        for key, given in entries.items():
            kernel, _, rest = key.partition("|")
            device, _, digest = rest.rpartition("|")
            if (entry := _read(device, digest, given)) is None:
                continue
            by_device = self._found.setdefault(kernel, {})
            known = by_device.get(device)
            if known is None or entry.is_current or not known.is_current:
                by_device[device] = entry

    def of(self, kernel: str, archs: Sequence[str]) -> list[Entry]:
        """Return what was measured of a kernel on GPUs that run code for ``archs``."""
        return [entry for entry in self._found.get(kernel, {}).values() if serves(archs, entry.archs)]


def _read(device: str, digest: str, given: Any) -> Entry | None:
    match given:
        case {"schedules": list(schedules), "microseconds": list(times)} if re.match(r"cuda\|sm_\d{2,}\|", device):
            seconds = [t / 1e6 if isinstance(t, int | float) and math.isfinite(t) and t > 0 else None for t in times]
            if len(schedules) == len(times) and any(s is not None for s in seconds):
                return Entry(device, digest == gpu_kernels_digest(), schedules, seconds)
    return None


@dataclass
class DeviceTuner(Tuner):
    """Chooses schedules without running a kernel; ``target`` is None.

    Attributes:
        archs: that the bundle has code for: measurements on other GPUs do not count.
        databases: the user's, and the shipped one; the first that knows a kernel decides.
    """

    archs: Sequence[str] = ()
    databases: Sequence[Measured] = ()
    _reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, mode: str, archs: Sequence[str], pinned: Mapping[str, Mapping[str, Any]] | None) -> DeviceTuner:
        """Read the databases."""
        user = Database()
        databases = () if mode == "off" or pinned is not None else (user.entries, read_entries(SHIPPED))
        return cls(
            mode, 1, None, "cuda", user, pinned=pinned, archs=archs, databases=[Measured(found) for found in databases]
        )

    def choose(self, kernel: str, space: Sequence[S], build: Any, operands: Any, estimate: Any = None) -> S:
        """Return the pinned schedule, or else the fastest as measured or modelled; see :meth:`Tuner.choose`."""
        schedule = super().choose(kernel, space, build, operands, estimate)
        if self.pinned is not None:
            self._reasons[kernel] = str(self.pinned[kernel].get(REASON, DEFAULT))
        self.chosen[kernel][REASON] = self._reasons[kernel]
        return schedule

    def reasons(self, kernels: Sequence[str]) -> dict[str, str]:
        """Return, by kernel, why it got its schedule: where it was measured, or ``modelled``."""
        return {kernel: self._reasons[kernel] for kernel in kernels}

    def fastest(self, kernel: str, space: Sequence[S], build: Any, operands: Any, estimate: Any) -> S:
        """Return the best of ``space``: of several classes of GPUs that were measured, the best for all together."""
        won, reason, times = self._best(kernel, space, estimate)
        self._reasons[kernel] = reason
        fields = [fields_of(schedule) for schedule in space]
        known = [None if seconds is None else round(seconds * 1e6, 2) for seconds in times]
        candidates = [{**one, "microseconds": us} for one, us in zip(fields, known, strict=False)]
        self.tried.append({"kernel": kernel, "timed_now": False, "candidates": candidates, "won": won, REASON: reason})
        return space[won]

    def _best(self, kernel: str, space: Sequence[Any], estimate: Any) -> tuple[int, str, list[float | None]]:
        """Return the best candidate, why it is, and the times of all."""
        candidates = varying(space)
        if len(space) == 1:
            return 0, ALONE, []
        for database in self.databases:
            entries = database.of(kernel, self.archs)
            losses = [sum(math.log(entry.relative(one)) for entry in entries) for one in candidates]
            won = min(range(len(losses)), key=losses.__getitem__)
            if not entries or math.isinf(losses[won]):
                continue
            names = ", ".join(sorted(entry.device.split("|")[2] for entry in entries))
            older = "" if all(entry.is_current for entry in entries) else ", of an earlier version of the kernels"
            times = [entries[0].seconds_of(one) for one in candidates]
            return won, f"measured on {names}{older}", times
        if self.mode == "off" or estimate is None:
            return 0, DEFAULT, []
        foreseen: list[float] = [estimate(schedule) for schedule in space]
        return min(range(len(space)), key=foreseen.__getitem__), MODELLED, list(foreseen)
