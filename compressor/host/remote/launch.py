"""``python -m compressor.host.remote.launch ADDRESS PYTHON ARGUMENTS``: run ``PYTHON ARGUMENTS`` on a device.

Files and folders that the arguments name are copied there, and its Python takes the place of this one; stdin, stdout
and stderr are passed on, and it ends as the process there does.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import select
import signal
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from compressor_runtime.check import sha256

from compressor.errors import CompressorError
from compressor.host.remote.address import DeviceAddress
from compressor.host.remote.client import Device
from compressor.host.resources import PACKAGE, runtime_files

_PIECE_BYTES = 4 << 20
_WAIT_S = 0.05
_SLOWEST_BYTES_PER_S = 100e3
_PACKAGES = "packages.zip"


def launcher(address: str) -> tuple[str, ...]:
    """Return what stands before a command of this machine's Python to run it on a device."""
    return (sys.executable, "-m", "compressor.host.remote.launch", address)


def run(device: Device, arguments: Sequence[str]) -> int:
    """Run Python with arguments on a device, and return its exit code, negative that of a signal.

    Raises:
        CompressorError: the device is lost, or has no room.
    """
    files, mapped = _files(arguments)
    path: list[str] = []
    contents: dict[str, Path | bytes] = dict(files)
    if "-m" in arguments:
        contents[_PACKAGES] = _packages()
        path = [_PACKAGES]
    digests = {name: _digest(content) for name, content in contents.items()}
    missing = set(device.ask("missing", json.dumps(sorted(set(digests.values()))))["missing"])
    for name, content in contents.items():
        if digests[name] in missing:
            _send(device, digests[name], content)
            missing.remove(digests[name])
    device.ask("start", json.dumps({"files": digests, "arguments": mapped, "path": path}))
    return _talk(device)


def _files(arguments: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Return the files that arguments name, by their places there, and the arguments for there."""
    found: dict[str, Path] = {}
    folders: dict[Path, str] = {}
    mapped = []
    for number, argument in enumerate(arguments):
        path = Path(argument)
        if len(argument) > 4096 or not argument.startswith("/") or not path.exists():
            mapped.append(argument)
            continue
        around = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if around is not None:
            mapped.append(f"{{folder}}/{folders[around]}/{path.relative_to(around).as_posix()}")
            continue
        place = f"{number}/{path.name}"
        if path.is_dir():
            folders[path] = place
            inside = [file for file in sorted(path.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
            found |= {f"{place}/{file.relative_to(path).as_posix()}": file for file in inside}
        else:
            found[place] = path
        mapped.append(f"{{folder}}/{place}")
    return found, mapped


def _packages() -> bytes:
    """Return this project's two packages as a zip file, which Python imports from; the same bytes each time."""
    files = {f"compressor/{file.relative_to(PACKAGE).as_posix()}": file for file in sorted(PACKAGE.rglob("*.py"))}
    files |= {name: file for name, file in runtime_files().items() if name.startswith("compressor_runtime/")}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return data.getvalue()


def _digest(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    return sha256(content)


def _send(device: Device, sha256: str, content: Path | bytes) -> None:
    size, offset = len(content) if isinstance(content, bytes) else content.stat().st_size, 0
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        while True:
            piece = file.read(_PIECE_BYTES)
            header = {"sha256": sha256, "offset": offset, "is_last": offset + len(piece) >= size}
            device.ask("file", json.dumps(header), piece, limit_s=30 + len(piece) / _SLOWEST_BYTES_PER_S)
            offset += len(piece)
            if header["is_last"]:
                return


def _talk(device: Device) -> int:
    """Pass on what the process there and whoever started this one say to each other, until the former ends."""
    is_open = True
    while True:
        if is_open and select.select([0], [], [], 0)[0]:
            data = os.read(0, 1 << 18)
            is_open = bool(data)
            device.call(*(("write", data) if data else ("close",)))
        said: bytes = device.call("read", _WAIT_S)
        tag, data = said[:1], said[1:]
        if tag == b"x":
            return int(data)
        if data:
            stream = sys.stdout.buffer if tag == b"o" else sys.stderr.buffer
            stream.write(data)
            stream.flush()


def main() -> int:
    """Run on the device, and end as the process there did."""
    _, address, _, *arguments = sys.argv
    try:
        device = Device(DeviceAddress.parse(address))
        code = run(device, arguments)
        device.close()
    except CompressorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL's action cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
