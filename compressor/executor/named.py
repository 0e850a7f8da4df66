"""Make the executor that a command names."""

from __future__ import annotations

from compressor.errors import UsageError
from compressor.executor.jobs import Executor, InProcess


def make_executor(name: str | None) -> Executor:
    """Return the executor: ``local:2``, ``ray``, ``ray://host:port``; None runs jobs in this process.

    Raises:
        UsageError: the name is none of these, or nothing answers there.
    """
    if name is None:
        return InProcess()
    kind, _, count = name.partition(":")
    if kind == "local" and count.isascii() and count.isdigit():
        from compressor.executor.pool import LocalPool

        return LocalPool(int(count))
    if name == "ray" or name.startswith("ray://"):
        from compressor.executor.cluster import RayCluster

        return RayCluster("auto" if name == "ray" else name)
    raise UsageError(f"executor {name!r:.80}: give local:N for N processes, ray, or ray://host:port")
