"""Time the stages of a run, and show them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.host.machine import peak_rss_bytes
from compressor.progress import Reporter


class Clock:
    """Times the stages of a run, and shows them."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.seconds: dict[str, float] = {"start": self.since_start()}

    @contextmanager
    def stage(self, name: str, shown: bool = True) -> Iterator[None]:
        """Time the block; ``shown`` gives it a task of its own."""
        begin = time.perf_counter()
        if shown:
            with self.reporter.task(name, 1) as task:
                yield
                task.advance()
        else:
            yield
        self.seconds[name] = time.perf_counter() - begin

    @staticmethod
    def since_start() -> float:
        """Seconds since this process began, its imports included."""
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / 100

    @staticmethod
    def peak_rss_bytes(metrics: Mapping[str, Any]) -> int:
        """Resident bytes at the worst moment: of this process, or of what is left of it while both models are timed."""
        status = Path("/proc/self/status").read_text().split("VmRSS:")[1]
        children = sum(int(metrics.get(name, 0)) for name in ("peak_rss_bytes", "dense_peak_rss_bytes"))
        return max(peak_rss_bytes(), int(status.split()[0]) * 1024 + children)
