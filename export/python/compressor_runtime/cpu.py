"""What this machine's CPU can do: its features, its cores, and which of a bundle's libraries it runs."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from compressor_runtime.arguments import whole
from compressor_runtime.errors import BundleError, RequestError
from compressor_runtime.manifest import field, items, libraries

_libc = ctypes.CDLL(None)
_HWCAP, _HWCAP2 = 16, 26  # of getauxval, in Linux
_ARM_FEATURES = {
    "asimd": (_HWCAP, 1),
    "asimdhp": (_HWCAP, 10),
    "asimddp": (_HWCAP, 20),
    "sve": (_HWCAP, 22),
    "sve2": (_HWCAP2, 1),
    "i8mm": (_HWCAP2, 13),
    "bf16": (_HWCAP2, 14),
}
"""Words and bits of arch/arm64/include/uapi/asm/hwcap.h, by their names in /proc/cpuinfo."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def choose_library(root: Path, manifest: dict[str, Any], isa: str | None = None) -> str:
    """Return the file of kernels to load: the first that this CPU runs, among those for ``isa`` if it is given.

    Raises:
        BundleError: this CPU runs none of them.
        RequestError: the bundle has no kernels for ``isa``.
    """
    check_cpu(items(manifest, "cpu_features", str), root)  # what all of them need
    wanted = isinstance(isa, str)
    entries = [entry for entry in libraries(manifest) if isa is None or (wanted and field(entry, "isa", str) == isa)]
    if not entries:
        names = ", ".join(str(entry["isa"]) for entry in libraries(manifest))
        raise RequestError(f"{root}: isa={isa!r:.80}: the bundle has kernels for {names or 'no instruction set'}")
    runs = (entry for entry in entries if not missing_features(items(entry, "cpu_features", str)))
    chosen = next(runs, None)
    if chosen is None:
        chosen = entries[-1]
        check_cpu(items(chosen, "cpu_features", str), root)  # raises: it says what the least demanding one lacks
    return str(field(chosen, "file", str))


def check_cpu(required: Sequence[str], root: Path) -> None:
    """Raise a BundleError when the CPU lacks a feature; named as by Linux or LLVM ("avx512_vnni", "avx512vnni")."""
    missing = missing_features(required)
    if _ARM_FEATURES.keys() & missing and platform.machine() not in ("aarch64", "arm64"):
        raise BundleError(
            f"{root}: the kernels are for ARM processors of 64 bits, and this machine is an {platform.machine()}; copy "
            "the bundle to such a machine, or compress again with the target x86"
        )
    if missing:
        raise BundleError(f"{root}: this CPU lacks {', '.join(missing)}; compress again for this CPU")


def missing_features(required: Sequence[str]) -> list[str]:
    """Return those features that this CPU lacks, or that the system does not let processes use."""
    present = _cpu_flags()
    if present is None:
        return []  # not Linux: the loader will say what it cannot run
    missing = lacking(required, present)
    return missing if missing or "amx_tile" not in required or allow_tiles() else ["amx_tile"]


def lacking(required: Sequence[str], present: Collection[str]) -> list[str]:
    """Return those features that are not among the ``present``, as :func:`present_features` names them."""
    return [name for name in required if _letters(name) not in present]


def present_features() -> list[str]:
    """Return this CPU's features, as Linux tells them, letters and digits only; none where it does not."""
    return sorted(_cpu_flags() or ())


@cache
def _cpu_flags() -> frozenset[str] | None:
    """Return the CPU's features, as Linux tells them; None where it does not."""
    if platform.machine() == "aarch64" and platform.system() == "Linux":
        return _arm_flags()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(map(_letters, line[1].split() if line else ()))


def _arm_flags() -> frozenset[str]:
    """Return an ARM CPU's features as Linux tells each process: /proc/cpuinfo under an emulator is its host's."""
    getauxval = _libc.getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    words = {kind: getauxval(kind) for kind in (_HWCAP, _HWCAP2)}
    return frozenset(name for name, (kind, bit) in _ARM_FEATURES.items() if words[kind] >> bit & 1)


def _letters(feature: str) -> str:
    return re.sub(r"\W|_", "", feature)


def allow_tiles() -> bool:
    """Ask Linux to let this process use AMX's tile registers; return whether it does.

    A process must ask before its first use of one.
    """
    return bool(_libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def thread_count(threads: int | None) -> int:
    """Return how many threads the kernels run on; None takes the physical cores that this process may use.

    Raises:
        RequestError: not a whole number from 1 to the processors: with more threads each waits for the others' turns.
    """
    if threads is None:
        return available_cores()
    return whole("threads", threads, 1, len(os.sched_getaffinity(0)))


def available_cores() -> int:
    """Return how many physical cores this process may use, by its affinity and its control group's quota."""
    cpus = os.sched_getaffinity(0)
    siblings = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus)
    cores = {file.read_text() if file.is_file() else file.parts[-3] for file in siblings}
    quota = Path("/sys/fs/cgroup/cpu.max")
    share = quota.read_text().split() if quota.is_file() else ["max"]
    return len(cores) if share[0] == "max" else max(1, min(len(cores), int(share[0]) // int(share[1])))
