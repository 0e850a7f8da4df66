"""Keep files by their digests, and run Python programs over them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from compressor_runtime.check import sha256

PYTHON = "COMPRESS_DEVICE_PYTHON"
"""Variable with the command, as a JSON list, that starts Python on this device; it is this Python, if left out."""


class Files:
    """Files by their SHA-256: weights that several programs read are sent once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Return where a file lies, or would lie."""
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise ValueError(f"{sha256!r:.80}: not a SHA-256")
        return self._folder / sha256

    def missing(self, digests: list[str]) -> list[str]:
        """Return those of the digests whose files are not here."""
        return [sha256 for sha256 in digests if not self.path(sha256).is_file()]

    def take(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Take a piece of a file: ``sha256``, ``offset``, and ``is_last``; the last has the digest checked."""
        path = self.path(header["sha256"])
        partial = path.with_suffix(".partial")
        with partial.open("r+b" if header["offset"] else "wb") as file:
            file.seek(header["offset"])
            file.write(data)
        if header["is_last"]:
            if sha256(partial) != path.name:
                partial.unlink()
                return {"error": f"{path.name[:12]}: arrived damaged", "errno": 0}
            partial.rename(path)
        return {}


class Program:
    """A process of this device's Python, talked to by the client."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._open = {"o": process.stdout, "e": process.stderr}

    @classmethod
    def start(cls, folder: Path, files: Files, request: dict[str, Any]) -> Program:
        """Lay files out in a folder and start Python there.

        Args:
            request: ``files``, digests by relative path; ``arguments``, of Python, in which ``{folder}`` stands for the
                folder; ``path``, entries of PYTHONPATH, relative.
        """
        root = folder.resolve()
        root.mkdir()
        for name, digest in request["files"].items():
            place = root / name
            if not place.resolve().is_relative_to(root):
                raise OSError(0, "a path outside the folder", name)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(files.path(digest), place)
        arguments = [str(argument).replace("{folder}", str(root)) for argument in request["arguments"]]
        path = os.pathsep.join([*(str(root / entry) for entry in request["path"]), os.environ.get("PYTHONPATH", "")])
        command = json.loads(os.environ.get(PYTHON, "null")) or [sys.executable]
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return cls(process)

    def write(self, data: bytes) -> str:
        """Write to the program's stdin; a program that has ended takes nothing."""
        stdin: BinaryIO | None = self._process.stdin  # type: ignore[assignment]
        if stdin is not None and not stdin.closed:
            try:
                stdin.write(data)
                stdin.flush()
            except BrokenPipeError:
                self.close()
        return json.dumps({})

    def close(self) -> str:
        """Close the program's stdin."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        return json.dumps({})

    def read(self, seconds: float) -> bytes:
        """Return what the program has written, waiting for so long: ``o`` or ``e`` and bytes of stdout or stderr.

        ``n`` is nothing so far; ``x`` and a number is the end, negative that of a signal.
        """
        streams = {stream.fileno(): tag for tag, stream in self._open.items() if stream is not None}
        if not streams:
            return b"x%d" % self._process.wait()
        ready = select.select(list(streams), [], [], seconds)[0]
        for number in ready:
            tag = streams[number]
            if data := os.read(number, 1 << 18):
                return tag.encode() + data
            self._open[tag] = None
        return b"n"
