"""Run jobs on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from compressor.errors import CompressorError, UsageError
from compressor.executor.jobs import Arguments, Executor, answer, received, requests
from compressor.progress import Reporter, Task

_PATIENCE_S = 5.0
_RETRIES = 2
_AHEAD = 2
"""Jobs that are handed over for each core before it is free."""


class RayCluster(Executor):
    """Runs jobs on the machines of a Ray cluster, each on one core; lost ones are run again by Ray.

    Args:
        address: ``ray://host:port``; ``auto`` takes the cluster that runs on this machine, or ``RAY_ADDRESS``.
    Raises:
        UsageError: Ray is not installed, or nothing answers there.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            what = "executor ray: needs Ray: pip install 'compressor[ray]'"
            raise UsageError(f"{what} ({error})") from error
        self._ray: Any = ray
        if address != "auto":
            _check_answers(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=False)
        except Exception as error:  # of Ray's many kinds
            advice = "start one with `ray start --head`, or give --executor ray://host:port"
            raise UsageError(f"executor ray: no cluster at {address}: {_reason(error)}; {advice}") from error

    def close(self) -> None:
        """Leave the cluster, which goes on."""
        self._ray.shutdown()

    def run(self, function: str, jobs: Iterable[Arguments], task: Task, reporter: Reporter) -> list[Any]:
        """Call the function for each job, on whichever machine is free."""
        ray = self._ray
        remote = ray.remote(answer).options(num_cpus=1, max_retries=_RETRIES)
        ahead = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        found: dict[int, Any] = {}
        pending: dict[Any, int] = {}

        def collect(most: int) -> None:
            while len(pending) > most:
                (done, *_), _ = ray.wait(list(pending), num_returns=1)
                found[pending.pop(done)] = received(self._got(done), reporter)
                task.advance()

        with requests(function) as written:
            try:
                for number, arguments in enumerate(jobs):
                    collect(ahead - 1)
                    pending[remote.remote(written(arguments))] = number
                collect(0)
            finally:
                for left in pending if ray.is_initialized() else ():  # else a call would start a cluster here
                    with contextlib.suppress(Exception):  # a connection that is lost
                        ray.cancel(left, force=True)
        return [found[number] for number in range(len(found))]

    def _got(self, done: Any) -> str:
        try:
            text: str = self._ray.get(done)
        except Exception as error:  # the worker was lost too often, or cannot import compressor
            advice = "install this version of compressor on every machine of the cluster, and see its logs"
            raise CompressorError(f"executor ray: {_reason(error)}; {advice}") from error
        return text


def _reason(error: Exception) -> str:
    """Return the first and the last line of an error, which have Python's message of a remote one between them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(dict.fromkeys([lines[0], lines[-1]]))


def _check_answers(address: str) -> None:
    """Refuse an address that is none, or where nothing listens: Ray itself would try for half a minute."""
    try:
        place = urlsplit(address)
        host, port = place.hostname, place.port
    except ValueError as error:
        raise UsageError(f"executor {address}: {error}; give ray://host:port") from error
    if host is None or port is None:
        raise UsageError(f"executor {address}: has no host and port; give ray://host:port, such as ray://head:10001")
    try:
        socket.create_connection((host, port), _PATIENCE_S).close()
    except OSError as error:
        advice = "start one with `ray start --head`, whose client port is 10001, or check the address"
        raise UsageError(f"executor {address}: nothing answers there: {error}; {advice}") from error
