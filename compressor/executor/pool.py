"""Run jobs in a pool of processes on this machine."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from compressor.errors import CompressorError, UsageError
from compressor.executor.jobs import Arguments, Executor, received, requests
from compressor.host.child import Child
from compressor.progress import Reporter, Task
from compressor.runtime import thread_count

_TRIES = 3
"""Workers that one job may end, as one that is killed for want of memory does, before the run gives up."""
_AHEAD = 2
"""Jobs that are written for each worker before it is free."""


class LocalPool(Executor):
    """Runs jobs in processes of this machine, which share its cores and are started with the first job.

    Args:
        workers: number of processes.
    Raises:
        UsageError: there are fewer cores.
    """

    def __init__(self, workers: int) -> None:
        cores = thread_count(None)
        if not 1 <= workers <= cores:
            raise UsageError(f"executor local:{workers}: this machine has {cores} cores; give 1 to {cores} workers")
        self._workers, self._threads = workers, cores // workers
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._ending = False

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.end()
        self._children, self._idle, self._ending = [], queue.SimpleQueue(), False

    def run(self, function: str, jobs: Iterable[Arguments], task: Task, reporter: Reporter) -> list[Any]:
        """Call the function for each job; a job whose worker is lost runs again in a new one."""
        while len(self._children) < self._workers:
            self._idle.put(self._started())
        found: dict[int, Any] = {}
        pending: dict[Future[str], int] = {}

        def collect(most: int) -> None:
            while len(pending) > most:
                for done in wait(pending, return_when=FIRST_COMPLETED).done:
                    found[pending.pop(done)] = received(done.result(), reporter)
                    task.advance()

        try:
            with requests(function) as written, ThreadPoolExecutor(self._workers) as threads:
                try:
                    for number, arguments in enumerate(jobs):
                        collect(_AHEAD * self._workers - 1)
                        pending[threads.submit(self._ask, written(arguments), number)] = number
                    collect(0)
                except BaseException:
                    self._abandon(pending)
                    raise
        except BaseException:
            self.close()
            raise
        return [found[number] for number in range(len(found))]

    def _ask(self, request: str, number: int) -> str:
        """Send a job to a free worker; if that is lost, to a new one."""
        for tries in range(1, _TRIES + 1):
            child = self._idle.get()
            try:
                found = child.ask(request)
            except CompressorError as error:
                self._children.remove(child)
                if self._ending:
                    raise
                self._idle.put(self._started())
                if tries == _TRIES:
                    what = f"job {number + 1} ended {_TRIES} workers, the last with: {error}"
                    raise CompressorError(f"executor local:{self._workers}: {what}; try with fewer workers") from error
            else:
                self._idle.put(child)
                return json.dumps(found)
        raise AssertionError("every try returns or raises")

    def _started(self) -> Child:
        child = Child("worker", "compressor.executor.worker", [str(self._threads)])
        self._children.append(child)
        return child

    def _abandon(self, pending: Iterable[Future[str]]) -> None:
        """End what is under way: the run has failed or was interrupted."""
        self._ending = True
        for waiting in pending:
            waiting.cancel()
        for child in list(self._children):
            child.kill()
