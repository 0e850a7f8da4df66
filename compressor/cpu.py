"""What the processor is and can do."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's model name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def host_flags() -> frozenset[str]:
    """CPU flags of this machine as Linux names them; empty where it is no x86-64 Linux."""
    info = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not info.exists():
        return frozenset()
    line = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
