"""Describe executors, and run one job of another process.

    parent: {function, arguments, identity}  --JSON-->  worker: import, map tensors, call  --JSON-->  value, lines

In this process a job is a call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from compressor.errors import CompressorError, ResourceError, UsageError, VerificationError, exit_code
from compressor.host.cache import cache_folder, partial_folder
from compressor.host.machine import cpu_name
from compressor.progress import Reporter, Task
from compressor.version import installed_versions

Arguments = Mapping[str, Any]
"""Arguments of a job by name: plain data (as JSON has it) and tensors, in lists and mappings."""
_ERRORS = {kind.exit_code: kind for kind in (UsageError, VerificationError, ResourceError)}
_Self = TypeVar("_Self", bound="Executor")


class Executor(ABC):
    """Runs independent jobs; to be used in a ``with`` statement if it holds processes or connections."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 (this process has nothing to close)
        """Let go of processes and connections."""

    @abstractmethod
    def run(self, function: str, jobs: Iterable[Arguments], task: Task, reporter: Reporter) -> list[Any]:
        """Call a function once for each job, and return the results in the order of the jobs.

        The function is pure: its results depend on its arguments alone, and on no number of threads.  So they are the
        same bits wherever it runs.

        Args:
            function: ``module:name``; it returns plain data.
            jobs: taken as workers become free.
            task: advances with each job that is done.
            reporter: receives the lines that jobs print in other processes.
        Raises:
            CompressorError: a job failed, or ended its worker time and again.
        """


class InProcess(Executor):
    """Runs one job after another in this process, on all threads."""

    def run(self, function: str, jobs: Iterable[Arguments], task: Task, reporter: Reporter) -> list[Any]:
        """Call the function for each job."""
        work, found = resolved(function), []
        for arguments in jobs:
            found.append(work(**arguments))
            task.advance()
        return found


def resolved(function: str) -> Callable[..., Any]:
    """Return the function of an import name, ``module:name``."""
    module, _, name = function.partition(":")
    work: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return work


@functools.cache
def identity() -> dict[str, str]:
    """Return all that results depend on beside a job: code, versions, processor."""
    from compressor.host.digests import code_digest

    return {**installed_versions(), "code of compressor": code_digest(), "processor": cpu_name()}


@contextmanager
def requests(function: str) -> Iterator[Callable[[Arguments], str]]:
    """Make a folder for the tensors of jobs, and give the function that writes a job as a line of text.

    The folder is gone at the block's end.
    """
    from compressor.executor.store import Store

    with partial_folder(cache_folder() / "jobs", "job") as folder:
        store = Store(folder)
        yield lambda arguments: json.dumps(
            {"function": function, "arguments": store.put(arguments), "identity": identity()}
        )


def answer(request: str) -> str:
    """Run a job in another process; return its value and lines, or its error, as a line of text."""
    from compressor.executor.store import fetched

    asked = json.loads(request)
    mine = identity()
    host = f"{socket.gethostname()}, process {os.getpid()}"
    if unlike := [name for name, value in asked["identity"].items() if mine.get(name) != value]:
        told = "; ".join(f"{name}: {mine.get(name)!s:.40}, not {asked['identity'][name]!s:.40}" for name in unlike)
        what = f"the worker on {host} is refused, for its results may differ ({told}); install there what is here"
        return json.dumps({"error": what, "exit_code": UsageError.exit_code})
    lines = io.StringIO()
    try:
        with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
            value = resolved(asked["function"])(**fetched(asked["arguments"]))
    except Exception as error:  # whatever it is, it ends the job and not the worker
        known = isinstance(error, CompressorError)
        what = str(error) if known else f"{asked['function']} on {host}: {type(error).__name__}: {error}"
        return json.dumps({"error": what, "exit_code": exit_code(error)})
    return json.dumps({"value": value, "lines": [f"{host}: {line}" for line in lines.getvalue().splitlines()]})


def received(text: str, reporter: Reporter) -> Any:
    """Return the value of an answer, and report its lines.

    Raises:
        CompressorError: the job failed; the class is that of its exit code.
    """
    given = json.loads(text)
    if "error" in given:
        raise _ERRORS.get(given["exit_code"], CompressorError)(given["error"])
    for line in given["lines"]:
        reporter.note(line)
    return given["value"]
