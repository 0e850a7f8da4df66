"""Choosing a schedule by timing it on this machine, and remembering the choice.

The database is one JSON file, keyed by kernel family, source, shape, format, instruction set, CPU and threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tvm
from compressor_runtime import configure_threads
from numpy.typing import NDArray

from compressor.cache import cache_folder

S = TypeVar("S")
MODES = ("off", "quick", "full")
_QUICK_CANDIDATES = 3
_WORKING_SET_BYTES = 48 << 20
"""Copies of the operands add up to this, so that weights come from memory as they do in a model."""


def cpu_name() -> str:
    """The processor's model name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


class Database:
    """Schedules that won, on disk; an unreadable file counts as empty and is replaced."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "tuning.json"
        self.entries: dict[str, dict[str, Any]] = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def save(self) -> None:
        """Merge with what other processes wrote meanwhile, and replace the file in one step.

        A folder that cannot be written to costs the next run its time, and this one nothing.
        """
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            merged = {**self._read(), **self.entries}
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as beside:
                json.dump(merged, beside, indent=1, sort_keys=True)
            os.replace(beside.name, self.path)


@dataclasses.dataclass
class Tuner:
    """Chooses schedules.

    Attributes:
        mode: ``off`` takes each space's first, ``quick`` times its first three, ``full`` all.
        threads: threads that candidates run on.
        target: TVM target to compile candidates for, or None where this machine cannot execute them.
        machine: what results depend on besides the kernel (instruction set, CPU, threads).
        log: a line for each choice.
    """

    mode: str
    threads: int
    target: tvm.target.Target | None
    machine: str
    database: Database = dataclasses.field(default_factory=Database)
    log: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def choose(
        self,
        kernel: str,
        space: Sequence[S],
        build: Callable[[S], tvm.tirx.PrimFunc],
        operands: Callable[[], Sequence[NDArray[Any]]],
        source: str,
    ) -> S:
        """The fastest schedule of ``space``.

        Args:
            kernel: family, shape and format.
            build: TIR for a schedule.
            operands: arguments to time it with, the output included.
            source: file of the kernel family; a change of it makes old results void.
        """
        candidates = space[:_QUICK_CANDIDATES] if self.mode == "quick" else space
        if self.mode == "off" or self.target is None or len(candidates) == 1:
            return space[0]
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]
        key = f"{kernel}|{self.machine}|{digest}"
        known: Any = self.database.entries.get(key)
        if not _usable(known, len(candidates), len(space)):
            configure_threads(self.threads)
            copies = self._copies(operands)
            times = [_time(build(schedule), self.target, copies) for schedule in candidates]
            best = min(range(len(times)), key=times.__getitem__)
            known = {
                "index": best,
                "tried": len(candidates),
                "schedule": dataclasses.asdict(candidates[best]),  # type: ignore[call-overload]
                "microseconds": [round(t * 1e6, 2) for t in times],
            }
            self.database.entries[key] = known
        self.log.append({"kernel": kernel, **known})
        return space[int(known["index"])]

    @staticmethod
    def _copies(operands: Callable[[], Sequence[NDArray[Any]]]) -> list[list[Any]]:
        first = operands()
        count = max(1, min(16, _WORKING_SET_BYTES // sum(a.nbytes for a in first)))
        return [[tvm.runtime.tensor(a) for a in first] for _ in range(count)]


def _usable(entry: Any, wanted: int, count: int) -> bool:
    """Whether an entry of the file, which may hold anything, names the best of at least ``wanted`` candidates."""
    match entry:
        case {"index": int(index), "tried": int(tried)}:
            return tried >= wanted and 0 <= index < count
    return False


def _time(func: tvm.tirx.PrimFunc, target: tvm.target.Target, copies: list[list[Any]]) -> float:
    """Median seconds of one call over at least ten, and at most about a fifth of a second."""
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    run = tvm.compile(module, target=target)["kernel"]
    run(*copies[0])
    times: list[float] = []
    end = time.perf_counter() + 0.2
    while len(times) < 10 or (time.perf_counter() < end and len(times) < 200):
        begin = time.perf_counter()
        run(*copies[len(times) % len(copies)])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
