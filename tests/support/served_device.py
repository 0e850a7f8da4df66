"""Start `compress device serve` for tests, on this machine or under an emulator, and kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from compressor.host import emulation
from compressor.host.wheels import tvm_runtime

SERVE = [sys.executable, "-m", "compressor", "device", "serve"]


class Server:
    """A server, in a process group of its own."""

    def __init__(self, command: Sequence[str], key: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **environment}
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("serving"), said
        self.port = int(said.rsplit(":", 1)[1])
        self.address = f"rpc://127.0.0.1:{self.port}/{key}"

    def kill(self) -> None:
        """Kill it and all that it started with SIGKILL, as a power cut would."""
        for child in self.sessions():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def sessions(self) -> list[int]:
        """Return the processes that serve clients."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(number) for number in children.read_text().split()] if children.exists() else []


@contextmanager
def served(
    folder: Path, *options: str, key: str = "box", before: Sequence[str] = (), port: int = 0
) -> Iterator[Server]:
    """Serve this machine."""
    command = [*before, *SERVE, "--port", str(port), "--key", key, "--folder", str(folder), *options]
    server = Server(command, key, {})
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def served_under_qemu(folder: Path, cpu: str, key: str = "board") -> Iterator[Server]:
    """Serve an emulated ARM processor, as a board without Compressor does: with a bundle's run-time alone."""
    python = [*emulation.launcher(cpu), sys.executable]
    library = tvm_runtime("aarch64") / "libtvm_runtime.so"
    options = ["--port", "0", "--key", key, "--folder", str(folder), "--runtime", str(library)]
    own = {"COMPRESS_DEVICE_PYTHON": json.dumps(python)}
    server = Server([*python, "-m", "compressor_runtime.remote", *options], key, own)
    try:
        yield server
    finally:
        server.kill()
