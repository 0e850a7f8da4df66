"""Count what a server does, and tell it as Prometheus reads it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def lines(self, name: str) -> list[str]:
        so_far, found = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            found.append(f'{name}_bucket{{le="{bound}"}} {so_far}')
        return [*found, f"{name}_sum {self.total}", f"{name}_count {so_far}"]


class Metrics:
    """Counters and histograms; any thread may add to them.

    Args:
        gauges: name -> what it means, and what it is now.
    """

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        self._gauges, self._lock = dict(gauges), threading.Lock()
        self._requests = Counter[tuple[str, int]]()
        self._meanings = {
            "compressor_prompt_tokens_total": "Tokens of prompts that were read.",
            "compressor_generated_tokens_total": "Tokens that were generated.",
            "compressor_cancelled_total": "Requests whose client went before their end.",
        }
        self._counters = dict.fromkeys(self._meanings, 0)
        self._histograms = {
            "compressor_request_seconds": ("Seconds from a request's body to the end of its answer.", _SECONDS),
            "compressor_queue_seconds": ("Seconds that a text waited for its place in the batch.", _SECONDS),
            "compressor_first_token_seconds": ("Seconds from a text's request to its first token.", _SECONDS),
            "compressor_token_seconds": ("Seconds a token behind a text's first.", _TOKEN_SECONDS),
        }
        self._values = {name: _Histogram(bounds) for name, (_, bounds) in self._histograms.items()}

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        with self._lock:
            self._requests[path, status] += 1

    def add(self, name: str, count: int) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name] += count

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        histogram = self._values[name]
        with self._lock:
            histogram.counts[bisect_left(histogram.bounds, value)] += 1
            histogram.total += value

    def text(self) -> str:
        """Return all of it, in Prometheus' text format."""
        lines: list[str] = []

        def head(name: str, kind: str, meaning: object) -> None:
            lines.extend([f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"])

        with self._lock:
            head("compressor_requests_total", "counter", "Answers, by endpoint and status.")
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'compressor_requests_total{{endpoint="{path}",status="{status}"}} {count}')
            for name, total in self._counters.items():
                head(name, "counter", self._meanings[name])
                lines.append(f"{name} {total}")
            for name, (meaning, _) in self._histograms.items():
                head(name, "histogram", meaning)
                lines += self._values[name].lines(name)
        for name, (meaning, value) in self._gauges.items():
            head(name, "gauge", meaning)
            lines.append(f"{name} {value()}")
        return "\n".join(lines) + "\n"


def resident_bytes() -> float:
    """Return the bytes of memory that this process holds; NaN where the system does not tell."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return float(line.split()[1]) * 1024
    return float("nan")
