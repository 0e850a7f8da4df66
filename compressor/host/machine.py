"""What this process may still take of the machine: memory under every limit that applies, and room on disks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import CompressorError

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
_LIMITS = {"Max address space": ("VmSize", "RLIMIT_AS"), "Max data size": ("VmData", "RLIMIT_DATA")}


@dataclass(frozen=True)
class Memory:
    """Bytes that this process and its children may hold in memory, what they hold already included.

    Attributes:
        bytes: the least of all limits.
        limit: what sets it, for messages.
    """

    bytes: int
    limit: str


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Return the memory that is free for this process, by the system, its control groups (v1, v2) and its own limits.

    Args:
        proc, cgroups: where the two file systems are mounted.
    Raises:
        OSError: ``proc`` is not a proc file system.
    """
    status = _kilobytes(proc / "self" / "status")
    held = status["VmRSS"]
    found = [Memory(held + _kilobytes(proc / "meminfo")["MemAvailable"], "the machine's free memory")]
    for folder, limit, usage in _memory_groups(proc / "self" / "cgroup", cgroups):
        found.append(Memory(held + max(0, limit - usage), f"the control group {folder}"))
    for line in (proc / "self" / "limits").read_text(encoding="utf-8").splitlines():
        for label, (counted, name) in _LIMITS.items():
            if line.startswith(label) and (soft := line.removeprefix(label).split()[0]) != "unlimited":
                found.append(Memory(held + max(0, int(soft) - status[counted]), name))
    return min(found, key=lambda memory: memory.bytes)


def free_disk(folder: Path) -> tuple[int, int]:
    """(device, free bytes) of the disk that ``folder``, which need not exist yet, is or would be on."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return place.stat().st_dev, found.f_bavail * found.f_frsize


def _kilobytes(file: Path) -> dict[str, int]:
    """Parse the lines ``Name:  123 kB`` of a file in /proc; return bytes by name."""
    rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _memory_groups(listing: Path, cgroups: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield (folder, limit, bytes in use that cannot be given back) of the process's control groups and parents."""
    if not listing.is_file():
        return
    for line in listing.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the listed path may be the host's: what does not exist here has no limit that we can see.
        for place in (folder, *folder.parents):
            if place != root and root not in place.parents:
                break
            if (place / names[0]).is_file() and (place / names[1]).is_file():
                limit = (place / names[0]).read_text(encoding="utf-8").strip()
                if limit != "max" and int(limit) < _UNLIMITED_BYTES:
                    used = int((place / names[1]).read_text(encoding="utf-8"))
                    yield place, int(limit), max(0, used - _reclaimable(place / "memory.stat", names[2]))


def _reclaimable(stat: Path, names: tuple[str, ...]) -> int:
    """Bytes of cached files, which the kernel drops when memory is short."""
    rows = (line.split() for line in stat.read_text(encoding="utf-8").splitlines()) if stat.is_file() else ()
    return sum(int(row[1]) for row in rows if row[0] in names)


def cpu_name() -> str:
    """Return the processor's model name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def host_flags() -> frozenset[str]:
    """Return this machine's CPU flags as Linux names them; empty where it is not an x86-64 Linux."""
    info = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not info.exists():
        return frozenset()
    line = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def peak_rss_bytes() -> int:
    """VmHWM: unlike ``ru_maxrss`` it does not begin with the size of the parent process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise CompressorError("bench: /proc/self/status has no VmHWM; speed and memory are measured on Linux only")


def cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the size of all last-level caches; where the system does not tell, more than any machine has."""
    found: dict[str, tuple[int, int]] = {}  # by the processors that share it: level, bytes
    for folder in cpus.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size = int((folder / "level").read_text()), (folder / "size").read_text().strip()
            shared = (folder / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        if size.endswith("K") and size[:-1].isdigit():
            found[f"{level}:{shared}"] = (level, int(size[:-1]) << 10)
    last = max((level for level, _ in found.values()), default=0)
    return sum(size for level, size in found.values() if level == last) or 1 << 60
