"""Choosing a schedule by timing it on this machine, and remembering the choice; or taking a lock's choice.

The database is one JSON file, keyed by kernel family, source, shape, format, instruction set, CPU and threads.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tvm
from compressor_runtime import configure_threads
from numpy.typing import NDArray

from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.errors import DriftError
from compressor.host.cache import cache_folder, merge_entries, read_entries
from compressor.host.resources import PACKAGE

S = TypeVar("S")
QUICK_CANDIDATES = 3
REASON = "chosen"
"""Beside a schedule's fields in ``Tuner.chosen`` and in locks: why it was chosen, of kernels for GPUs."""
WORKING_SET_BYTES = 48 << 20
"""Copies of the operands add up to this, so that weights come from memory as they do in a model."""


@functools.cache
def kernels_digest() -> str:
    """Digest everything that decides a kernel's code: the kernel families, their parts, and the instruction sets."""
    folder = PACKAGE / "codegen"
    files = [
        folder / "isa.py",
        *(folder / "kernels").rglob("*.py"),
        *(folder / "gpu").rglob("*.py"),
        *(folder / "targets").glob("*.py"),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]


class Database:
    """Schedules that won, on disk; an unreadable file counts as empty and is replaced."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "tuning.json"
        self.entries: dict[str, Any] = read_entries(self.path)

    def keep(self, key: str, entry: Mapping[str, Any]) -> None:
        """Add an entry, here and on disk, beside what other processes wrote meanwhile.

        Raises:
            OSError: it cannot be written; the entry is kept here.
        """
        self.entries[key] = entry
        merge_entries(self.path, {key: entry})


@dataclasses.dataclass
class Tuner:
    """Chooses schedules.

    Attributes:
        mode: ``off`` takes each space's first, ``quick`` times its first three, ``full`` all.
        threads: threads that candidates run on.
        target: TVM target to compile candidates for, or None where this machine cannot execute them.
        machine_key: what results depend on besides the kernel (instruction set, CPU, threads).
        suffix: of kernels' names in ``pinned`` and ``chosen``, where a bundle has them for several instruction sets.
        kernels: digest of the kernels' sources; another one makes old results void.
        pinned: kernel -> fields of its schedule, from a lock: nothing is timed.  None chooses.
        chosen: kernel -> fields of the schedule it got, as ``pinned`` takes them.
        tried: of each kernel that was timed: its name, whether it was timed now or by an earlier run, schedules and
            times of the candidates, the default first, and the index of the one that won.
        notes: what the user should know.
    """

    mode: str
    threads: int
    target: tvm.target.Target | None
    machine_key: str
    database: Database = dataclasses.field(default_factory=Database)
    suffix: str = ""
    kernels: str = dataclasses.field(default_factory=kernels_digest)
    pinned: Mapping[str, Mapping[str, Any]] | None = None
    chosen: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    tried: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def choose(
        self,
        kernel: str,
        space: Sequence[S],
        build: Callable[[S], tvm.tirx.PrimFunc],
        operands: Callable[[], Sequence[NDArray[Any]]],
        estimate: Callable[[S], float] | None = None,
    ) -> S:
        """Return the pinned schedule, or else the fastest of ``space``.

        What was timed is on disk when this returns, so that a run which is killed and started again goes on with the
        same schedules.

        Args:
            kernel: family, shape, format and number of tokens.
            build: TIR for a schedule.
            operands: arguments to time it with, the output included.
            estimate: seconds that a model foresees for a schedule, where nothing can be timed here; None if there is
                no model.
        Raises:
            DriftError: the lock has no schedule for this kernel, or one that is not in ``space``.
        """
        if self.pinned is None:
            schedule = self.fastest(kernel, space, build, operands, estimate)
        else:
            schedule = _find(kernel + self.suffix, space, self.pinned)
        self.chosen[kernel + self.suffix] = fields_of(schedule)
        return schedule

    def reasons(self, kernels: Sequence[str]) -> dict[str, str]:
        """Return, by kernel, why it got its schedule; nothing where schedules are timed on this machine."""
        return {}

    def fastest(self, kernel: str, space: Sequence[S], build: Any, operands: Any, estimate: Any) -> S:
        """Return the fastest of ``space``, as far as the mode has them timed; the arguments are those of a choice."""
        candidates = space[:QUICK_CANDIDATES] if self.mode == "quick" else space
        if self.mode == "off" or self.target is None or len(candidates) == 1:
            return space[0]
        key = f"{kernel}|{self.machine_key}|{self.kernels}"
        known: Any = self.database.entries.get(key)
        is_new = not _usable(known, len(candidates), len(space))
        if is_new:
            times = self.seconds(kernel, candidates, build, operands)
            best = self.best(times)
            known = {
                "index": best,
                "tried": len(candidates),
                "schedule": fields_of(candidates[best]),
                "microseconds": [None if t is None else round(t * 1e6, 2) for t in self.told(times)],
            }
            self._keep(key, known)
        index, kept = int(known["index"]), known.get("microseconds")
        timed = [
            {**fields_of(schedule), "microseconds": time_us}
            for schedule, time_us in zip(space, kept if isinstance(kept, list) else (), strict=False)
        ]
        entry = {"kernel": kernel + self.suffix, "timed_now": is_new, "candidates": timed, "won": index}
        self.tried.append(entry)
        return space[index]

    def seconds(
        self,
        kernel: str,
        candidates: Sequence[S],
        build: Callable[[S], tvm.tirx.PrimFunc],
        operands: Callable[[], Sequence[NDArray[Any]]],
    ) -> list[float | None]:
        """Return the seconds of a call of each candidate on this machine; None of one that did not run."""
        assert self.target is not None
        configure_threads(self.threads)
        copies = self._copies(operands)
        return [time_kernel(build(schedule), self.target, copies) for schedule in candidates]

    def best(self, times: Sequence[float | None]) -> int:
        """Return the index of the fastest that ran."""
        return min((i for i, t in enumerate(times) if t is not None), key=lambda i: times[i] or 0.0)

    def told(self, times: Sequence[float | None]) -> Sequence[float | None]:
        """Return the times that are kept and shown."""
        return times

    def _keep(self, key: str, entry: Mapping[str, Any]) -> None:
        try:
            self.database.keep(key, entry)
        except OSError as error:
            note = (
                f"{self.database.path}: cannot be written ({error.strerror}), so the next run times its kernels again "
                "and may choose other schedules; free some space, or set COMPRESS_CACHE_DIR to a folder that can"
            )
            if note not in self.notes:
                self.notes.append(note)

    @staticmethod
    def _copies(operands: Callable[[], Sequence[NDArray[Any]]]) -> list[list[Any]]:
        first = operands()
        count = max(1, min(16, WORKING_SET_BYTES // sum(a.nbytes for a in first)))
        return [[tvm.runtime.tensor(a) for a in first] for _ in range(count)]


def summary(tried: Sequence[Mapping[str, Any]]) -> list[str]:
    """How schedules were chosen, in words, from :class:`Tuner`'s ``tried``."""
    if not tried:
        return []
    if all(REASON in entry for entry in tried):  # nothing is timed where a bundle for GPUs is made
        counts = Counter(str(entry[REASON]) for entry in tried)
        return [f"schedules: {len(tried)} choices: " + ", ".join(f"{n} {reason}" for reason, n in counts.items())]
    now = [entry for entry in tried if entry["timed_now"]]
    candidates = sum(len(entry["candidates"]) for entry in now)
    others = sum(entry["won"] > 0 for entry in tried)
    return [
        f"schedules: {len(tried)} choices, {len(now)} of them timed in this run, with {candidates} candidates; another "
        f"than the default won {others} times; --json has the times"
    ]


def fields_of(schedule: Any) -> dict[str, Any]:
    """Return a schedule as plain data."""
    return dataclasses.asdict(schedule)


def _find(kernel: str, space: Sequence[S], pinned: Mapping[str, Mapping[str, Any]]) -> S:
    fields = pinned.get(kernel)
    if fields is not None:
        fields = {name: value for name, value in fields.items() if name != REASON}
    for schedule in space:
        if fields_of(schedule) == fields:
            return schedule
    what = "has no schedule" if fields is None else f"has the schedule {dict(fields)}, which is none of those possible,"
    raise DriftError(
        f"the lock {what} for the kernel {kernel}; it is of another model or version: run without --locked to make a "
        "new one"
    )


def _usable(entry: Any, wanted: int, count: int) -> bool:
    """Whether an entry of the file, which may hold anything, names the best of at least ``wanted`` candidates."""
    match entry:
        case {"index": int(index), "tried": int(tried)}:
            return tried >= wanted and 0 <= index < count
    return False


def time_kernel(func: tvm.tirx.PrimFunc, target: tvm.target.Target, copies: list[list[Any]]) -> float:
    """Median seconds of one call over at least ten, and at most about a fifth of a second."""
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    run = tvm.compile(module, target=target, tir_pipeline=PIPELINE)["kernel"]
    run(*copies[0])
    times: list[float] = []
    end = time.perf_counter() + 0.2
    while len(times) < 10 or (time.perf_counter() < end and len(times) < 200):
        begin = time.perf_counter()
        run(*copies[len(times) % len(copies)])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
