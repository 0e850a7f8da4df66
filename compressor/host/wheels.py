"""Fetch libraries for other machines than this one out of wheels: pinned by their digests, kept in the cache.

``python -m compressor.host.wheels aarch64`` prints the folder of tvm_ffi's headers and library, for CMake.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from compressor.errors import ToolchainError
from compressor.host.cache import cache_folder, partial_folder

GUEST_PYTHON = "3.11"
_PLATFORM = "manylinux_2_28_{machine}"

TVM_RUNTIME = {"apache-tvm": ("0.27.0.post1", "4acfdb7653e4e1ba7a707bdf2833db72eb8fda7d04d99141f2a4e1da43171fb7")}
"""Version and SHA-256 of the wheel for aarch64, by name."""
TVM_FFI = {"apache-tvm-ffi": ("0.1.14.post1", "c7a759781d4fbf2b99fa12f2741f250b882b06acc2747bb02831d491d1ac7d3c")}
"""Version and SHA-256 of the wheel with the headers and the library that call TVM's run-time."""
GUEST_PACKAGES = {
    **TVM_FFI,
    "numpy": ("2.4.6", "0ab0a9c4ffb1a6d95ef519fe4247dba8eb6b18ad93999f76b7f657039acabd47"),
    "typing-extensions": ("4.16.0", "481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8"),
}
"""Packages that a bundle's run-time imports: their wheels for aarch64 and Python 3.11."""


def tvm_runtime(machine: str) -> Path:
    """Return the folder of TVM's run-time libraries for ``machine``: the installed ones, or those of another wheel.

    Args:
        machine: as Linux names it, "x86_64" or "aarch64".
    Raises:
        ToolchainError: TVM is not installed, or the wheel for the other machine cannot be had.
    """
    if machine != platform.machine():
        return _other_runtime(machine)
    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.origin:
        raise ToolchainError("tvm: not found; install the apache-tvm wheel that Compressor asks for")
    return Path(spec.origin).parent / "lib"


def tvm_ffi(machine: str) -> Path:
    """Return the package tvm_ffi for another machine: ``include`` with its headers, and ``lib/libtvm_ffi.so``.

    Args:
        machine: as Linux names it; "aarch64" is the one that wheels are pinned for.
    Raises:
        ToolchainError: the wheel cannot be had.
    """
    return _unpacked(TVM_FFI, machine, ("tvm_ffi/include/", "tvm_ffi/lib/libtvm_ffi.so")) / "tvm_ffi"


def _other_runtime(machine: str) -> Path:
    return _unpacked(TVM_RUNTIME, machine, ("tvm/lib/libtvm_runtime",)) / "tvm" / "lib"


def _unpacked(pin: Mapping[str, tuple[str, str]], machine: str, wanted: tuple[str, ...]) -> Path:
    """Return the folder of one wheel's members that begin so; it is fetched when it is first asked for."""
    ((name, (version, _)),) = pin.items()
    if machine != "aarch64":
        raise ToolchainError(f"{name} for {machine} is known on such machines only; compress there")
    if (installed := importlib.metadata.version(name)) != version:
        raise ToolchainError(
            f"{name} {installed} is installed, and the one for {machine} is pinned at {version}; install that one"
        )
    place = cache_folder() / "wheels" / f"{name}-{version}-{machine}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(place.parent, place.name) as partial:
            fetch(pin, machine, partial, lambda member: member.startswith(wanted))
            settle(partial, place)
    return place


def settle(partial: Path, place: Path) -> None:
    """Give a finished folder its name, unless another process was faster."""
    try:
        partial.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def fetch(
    pins: Mapping[str, tuple[str, str]], machine: str, folder: Path, wanted: Callable[[str], bool] = lambda _: True
) -> None:
    """Download wheels for a machine, check their SHA-256, and unpack what is wanted of them into a folder.

    Args:
        pins: version and SHA-256 of each wheel, by name.
        wanted: tells by a member's name whether it is unpacked.
    Raises:
        ToolchainError: pip or the network is missing, or a wheel is not the pinned one.
    """
    lines = [f"{name}=={version} --hash=sha256:{sha256}\n" for name, (version, sha256) in pins.items()]
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch) / "requirements.txt"
        asked.write_text("".join(lines), encoding="utf-8")
        where = ["--platform", _PLATFORM.format(machine=machine), "--python-version", GUEST_PYTHON]
        how = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            *how,
            *where,
            "--dest",
            scratch,
            "--requirement",
            str(asked),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            raise ToolchainError(
                f"{', '.join(pins)} for {machine} cannot be downloaded: {said[-1]:.300}; once they are, they lie in "
                f"{cache_folder()}: check the network and PIP_INDEX_URL, or copy that folder from another machine"
            )
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if wanted(name)])


if __name__ == "__main__":
    try:
        print(tvm_ffi(sys.argv[1]))
    except ToolchainError as error:
        sys.exit(f"error: {error}")
