"""A process that loads one model and answers requests: a line of text in, a line of JSON out, and bytes beside them.

Both ends: :class:`Child` starts the process, and :func:`serve` is what runs in it, which may not know torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

from compressor.errors import CompressorError, UsageError, VerificationError
from compressor.host.threads import given_environment

_ERRORS = {kind.exit_code: kind for kind in (UsageError, VerificationError)}
_FAREWELL_S = 10.0
_Self = TypeVar("_Self", bound="Child")


class Child:
    """``python -m <module> <arguments>``, to be used in a ``with`` statement; it ends when its stdin does.

    Its first line, before any request, says that the model is loaded: ``loaded``.

    Args:
        name: for messages.
        launcher: what stands before the command, such as an emulator.
    Raises:
        CompressorError: the process failed, now or later; its message and exit code are passed on.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], launcher: Sequence[str] = ()) -> None:
        self._name = name
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=given_environment(),
        )
        try:
            self.loaded: dict[str, Any] = self._answer()
        except BaseException:
            self.end(kill=True)
            raise

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(kill=kind is not None)

    def ask(self, request: str, payload: bytes = b"") -> Any:
        """Send a line, and bytes after it; the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child has ended: the missing answer says why
            self._process.stdin.write(f"{request}\n".encode() + payload)
            self._process.stdin.flush()
        return self._answer()

    def receive(self, size_bytes: int) -> bytes:
        """Receive the bytes that follow an answer."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(size_bytes)
        if len(data) < size_bytes:
            self._fail()
        return data

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._fail()
        return json.loads(line)

    def _fail(self) -> None:
        code = self._process.wait()
        self._complaints.seek(0)
        said = self._complaints.read().strip().splitlines()
        if code < 0:
            reason = f"the process was ended by signal {-code} ({signal.strsignal(-code)})"
        else:
            reason = said[-1].removeprefix("error: ") if said else f"the process ended with {code}"
        raise _ERRORS.get(code, CompressorError)(f"{self._name}: {reason}")

    def kill(self) -> None:
        """Kill the process: whatever is asked of it fails."""
        self._process.kill()

    def end(self, kill: bool = False) -> None:
        """Wait for the process to end, which it does once nothing can be asked any more."""
        if kill:
            self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that was never read
                    stream.close()  # the child ends when nothing can be asked any more
        try:
            self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()


def serve(path: Path, work: Callable[[BinaryIO, Callable[..., None]], None]) -> int:
    """Answer the process that started this one, and return the exit code; an error becomes one line of stderr.

    Args:
        path: of the model, for messages.
        work: loads it and answers: (requests, send) -> None, where ``send(answer, payload=b"")`` gives a line of JSON
            and bytes after it.
    """
    atexit.register(gc.freeze)  # as in the command: the process ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer

    def send(answer: Any, payload: bytes | memoryview = b"") -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.write(payload)
        answers.flush()

    try:
        work(sys.stdin.buffer, send)
    except Exception as error:  # the parent shows one line, whatever it was
        place = "" if hasattr(error, "exit_code") else f"{path}: "  # errors of ours say it themselves
        print(f"error: {place}{error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    return 0
