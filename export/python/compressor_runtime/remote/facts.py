"""Say what this device is: its name, its processor's features, and whether an emulator is pretending."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from compressor_runtime.cpu import available_cores, present_features

EMULATED = "COMPRESS_EMULATED_CPU"
"""Variable in which :mod:`compressor.host.emulation` tells its processes the processor that it emulates."""
PROTOCOL = 1
_NAMES = ("/proc/device-tree/model", "/sys/class/dmi/id/product_name")  # of boards; of servers, such as "c7g.large"
_PARTS = {
    0xD03: "Cortex-A53", 0xD05: "Cortex-A55", 0xD08: "Cortex-A72", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse N1",
    0xD40: "Neoverse V1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD4F: "Neoverse V2", 0xD4D: "Cortex-A715",
}  # fmt: skip
"""Numbers of Arm's own processors in MIDR_EL1, as /proc/cpuinfo shows them ("CPU part")."""


def describe(folder: Path) -> dict[str, Any]:
    """Return facts as plain data.

    Args:
        folder: whose free disk is told.
    """
    emulator = _emulator()
    return {
        "protocol": PROTOCOL,
        "machine": platform.machine(),
        "system": platform.system(),
        "name": f"emulated {emulator}" if emulator else device_name(),
        "emulator": emulator,
        "features": present_features(),
        "cores": available_cores(),
        "free_bytes": shutil.disk_usage(folder).free,
        "python": platform.python_version(),
    }


def device_name() -> str:
    """Return what the maker calls this device, else its processor's name."""
    for path in map(Path, _NAMES):
        try:
            name = path.read_text("utf-8", "replace").strip("\0 \n")
        except OSError:
            continue
        if name and not re.search(r"To Be Filled|Default string|Standard PC|KVM|HVM|Virtual", name):
            return _plain(name)
    if (getprop := shutil.which("getprop")) is not None:  # Android
        asked = [getprop, "ro.product.model"]
        if name := subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip():
            return _plain(name)
    return _plain(_processor())


def _processor() -> str:
    text = _cpuinfo()
    if named := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        return named[1]
    parts = [_PARTS.get(int(part, 16), f"part {part}") for part in re.findall(r"^CPU part\s*:\s*(\w+)$", text, re.M)]
    return " + ".join(dict.fromkeys(parts)) or platform.machine()


def _plain(name: str) -> str:
    return re.sub(r"[|\s]+", " ", name).strip()[:80]


def _emulator() -> str:
    if cpu := os.environ.get(EMULATED):
        return f"QEMU, {cpu}"
    # User emulation shows /proc/cpuinfo of the machine below, before QEMU 8.1.
    is_other = platform.machine() == "aarch64" and re.search(r"^vendor_id\s*:", _cpuinfo(), re.MULTILINE)
    return "an emulator" if is_other else ""


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return ""
