"""Runs of the ``compress`` command in processes that have imported already what each of them would import first.

They are forked from a process that has imported it and done nothing else, and that has a single thread, so the fork is
a whole process.  All that the command does itself, from reading its arguments to its exit, happens in the fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

IMPORTED = (
    "torch._dynamo",  # the exporter does at its first call
    "transformers.models.llama.modeling_llama",
    "compressor.run.job",
    "compressor.codegen.lowering.compile",
    "compressor.cli.commands",
)
_MESSAGE_BYTES = 1 << 17


class WarmRun:
    """A run of the command, with as much of the interface of :class:`subprocess.Popen` as tests take."""

    def __init__(self, connection: socket.socket, request: Mapping[str, Any], standard_input: int | None) -> None:
        self._connection = connection
        self.returncode: int | None = None
        self._files = []
        given = [standard_input]
        if standard_input is None:
            pipes = [os.pipe(), os.pipe()]
            self._files = [os.fdopen(end, encoding="utf-8") for end, _ in pipes]
            given = [os.open(os.devnull, os.O_RDONLY), *(end for _, end in pipes)]
        socket.send_fds(connection, [json.dumps(request).encode()], given)
        if standard_input is None:
            for descriptor in given:
                os.close(descriptor)
        self.pid: int = json.loads(connection.recv(_MESSAGE_BYTES))

    @property
    def stderr(self) -> Any:
        """Return its standard error, to be read line by line."""
        return self._files[1]

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal that ended it; None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Wait for the end, or kill it after so many seconds; return the exit code."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                self.send_signal(signal.SIGKILL)
            self.returncode = json.loads(self._connection.recv(_MESSAGE_BYTES))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; it must be running."""
        assert self.poll() is None, f"it ended before signal {number}, with {self.returncode}"
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end, or kill it after so many seconds; return the rest of what it wrote and said."""
        late = threading.Timer(timeout, os.kill, (self.pid, signal.SIGKILL))
        late.start()
        try:
            with ThreadPoolExecutor(2) as pool:
                out, said = pool.map(lambda file: file.read(), self._files)
        finally:
            late.cancel()
        self.wait()
        for file in self._files:
            file.close()
        return out, said


class WarmCommand:
    """The process that runs are forked from; one run at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        terminal: int | None = None,
        session: bool = False,
        file_bytes: int | None = None,
    ) -> WarmRun:
        """Begin a run.

        Args:
            terminal: becomes the run's terminal, in a session of its own, and takes all output; None makes pipes.
            session: it begins a session of its own.
            file_bytes: the size that no file which it writes exceeds.
        """
        request = {"arguments": list(arguments), "environment": dict(environment), "file_bytes": file_bytes}
        request |= {"terminal": terminal is not None, "session": session}
        return WarmRun(self._connection, request, terminal)


@contextlib.contextmanager
def warm_command(environment: Mapping[str, str]) -> Iterator[WarmCommand]:
    """Start the process that imports; it ends with the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno())]
    with ours, subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"}, pass_fds=[theirs.fileno()]):
        theirs.close()
        try:
            yield WarmCommand(ours)
        finally:
            ours.close()  # its end


def _serve(connection: socket.socket) -> list[str]:
    """Fork a process for each request, and say its number and then its exit code; return the arguments in the fork."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only one of its parent's threads"
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        child = os.fork()
        if not child:
            connection.close()
            return _become(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(child).encode())
        connection.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> list[str]:
    """Give a fork what a new process begins with; return its arguments.

    Signals are heeded, whatever a shell or nohup has told its children to ignore.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if request["session"] or request["terminal"]:
        os.setsid()
    if request["terminal"]:
        fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
        descriptors = descriptors * 3
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in set(descriptors):
        os.close(descriptor)
    if request["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    return list(request["arguments"])


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]  # as where the command starts
    sys.argv = ["compress", *_serve(socket.socket(fileno=int(sys.argv[1])))]
    from compressor.cli.commands import main

    main(prog_name="compress")
