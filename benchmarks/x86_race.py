"""Runtimes in turns: the machinery of benchmarks/x86_llm.py and benchmarks/x86_models.py.

Each runtime is a process of its own in its own environment (benchmarks/peers/README.md); all of one number of threads
are loaded together, and in each repetition each is measured in turn, so that a disturbance of the machine falls on all.
When memory runs short, a process ends after its turn and is loaded again for its next one.  The first round of a
process is not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from x86_child import ROOT, Child, ChildError, Runtime, available_bytes, peak_int8

from compressor.host.machine import cpu_name, host_flags

SPARE_BYTES = 4 << 30  # left to the others
SETTLE_S = 0.5  # threads of the runtime before wait for work, spinning


@dataclass(frozen=True)
class Track:
    """Settings that all runtimes of a race share.

    Attributes:
        model: the folder that drivers are given.
        work: folder of the files that they make of it, and of logs.
        peers: folder of their environments.
    """

    model: Path
    work: Path
    peers: Path
    threads: int


class Race(ABC):
    """All runtimes with one number of threads."""

    reference: ClassVar[str]
    """The runtime whose outputs the others' are compared with."""

    def __init__(self, runtimes: list[Runtime], track: Track) -> None:
        self.runtimes, self.track, self.children = runtimes, track, dict[str, Child]()
        self.rows: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, NDArray[np.float64]] = {}
        self.missing: dict[str, str] = {}
        self.bandwidths: list[float] = []
        self.peaks: list[dict[str, float]] = []

    @abstractmethod
    def check(self, child: Child) -> NDArray[np.float64]:
        """Return outputs that show whether the runtime computes the model."""

    @abstractmethod
    def measure(self, child: Child) -> dict[str, float]:
        """Take one turn; names of seconds end in ``_s``."""

    @abstractmethod
    def quality(self, outputs: NDArray[np.float64], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Return the quality of outputs, given the reference's."""

    def run(self, repeats: int) -> None:
        """Run a round to warm up, then those that count."""
        try:
            for repeat in range(-1, repeats):
                for runtime in self.runtimes:
                    if runtime.name in self.missing:
                        continue
                    try:
                        self._turn(runtime, counted=repeat >= 0)
                    except ChildError as error:
                        self.missing[runtime.name] = str(error)
                        self._stop(runtime.name)
                        print(f"{runtime.name}: {error}", file=sys.stderr, flush=True)
                self.peaks.append(peak_int8(self.track.work, self.track.threads))
        finally:
            for name in list(self.children):
                self._stop(name)

    def _turn(self, runtime: Runtime, counted: bool) -> None:
        child = self.children.get(runtime.name) or self._start(runtime)
        time.sleep(SETTLE_S)
        if counted:
            row, found = self.rows[runtime.name], {**self.measure(child), **child.ask("memory")}
            for name, value in found.items():
                row.setdefault(name, []).append(value)
            seconds = ", ".join(f"{name} {value:.4g}" for name, value in found.items() if name.endswith("_s"))
            print(f"{self.track.threads} threads, {runtime.name}: {seconds}", file=sys.stderr, flush=True)
            if runtime is self._meter():
                self.bandwidths.append(child.ask("bandwidth")["bytes_per_s"])
        if available_bytes() < SPARE_BYTES:
            self._stop(runtime.name)

    def _meter(self) -> Runtime | None:
        """Return the runtime whose process measures the read bandwidth: the first of ours."""
        ours = (r for r in self.runtimes if not r.environment and r.name not in self.missing)
        return next(ours, None)

    def _start(self, runtime: Runtime) -> Child:
        track = self.track
        files = Path(runtime.files).absolute()
        if runtime.environment:
            files = track.work / f"{track.model.name}-{runtime.files}"
        log = track.work / f"{runtime.driver}-{runtime.variant}.log"
        arguments = (runtime, track.peers, track.model, files, track.threads, log)
        if not files.exists():
            print(f"{runtime.name}: converting", file=sys.stderr, flush=True)
            preparing = Child(*arguments)  # a process of its own: its memory is not the model's
            try:
                preparing.ask("prepare")
            finally:
                preparing.stop()
        child = self.children[runtime.name] = Child(*arguments)
        loaded = child.ask("load")
        row = self.rows.setdefault(runtime.name, {name: loaded[name] for name in loaded if name != "load_s"})
        row.setdefault("load_s", []).append(loaded["load_s"])
        begin = time.perf_counter()
        if runtime.name not in self.outputs:
            self.outputs[runtime.name] = self.check(child)
        self.measure(child)
        row.setdefault("warm_s", time.perf_counter() - begin)
        return child

    def _stop(self, name: str) -> None:
        child = self.children.pop(name, None)
        if child:
            child.stop()

    def result(self) -> dict[str, Any]:
        """Return the measurements, ready for JSON."""
        reference, rows = self.outputs.get(self.reference), {}
        for name, row in self.rows.items():
            if name not in self.missing:
                rows[name] = {**row, **self.quality(self.outputs[name], reference)}
        peaks = {kind: max(p.get(kind, 0.0) for p in self.peaks) * self.track.threads for kind in self.peaks[0]}
        bandwidth = max(self.bandwidths, default=None)
        return {"bandwidth_bytes_per_s": bandwidth, "peak_int8_ops_per_s": peaks, "runtimes": rows,
                "missing": self.missing}  # fmt: skip


def cosines(outputs: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return cosines of vectors along the last axis."""
    lengths = np.linalg.norm(outputs, axis=-1) * np.linalg.norm(reference, axis=-1)
    return np.asarray((outputs * reference).sum(-1) / lengths)


def arguments(description: str, threads: str, separator: str, smoke: str) -> argparse.ArgumentParser:
    """Make a parser of the options that all races have; ``separator`` is that of the parts that ``--only`` takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=BUNDLE", help="a bundle of ours")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder of the peers' environments")
    parser.add_argument("--threads", default=threads, help="numbers of them, by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help=f"parts of runtimes' names, joined by {separator!r}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help=f"{smoke}; results stay in WORK_FOLDER")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options, make the folder, and apply ``--smoke``."""
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        options.repeats, options.out = 1, options.folder
    return options


def chosen(runtimes: Sequence[Runtime], only: str, separator: str) -> list[Runtime]:
    """Return the runtimes whose names have one of the parts."""
    parts = [part.lower() for part in only.split(separator) if part]
    return [r for r in runtimes if not parts or any(part in r.name.lower() for part in parts)]


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that were measured."""
    flags = host_flags()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "cpu": cpu_name(), "cpus": os.cpu_count(), "amx": "amx_int8" in flags, "avx512_vnni": "avx512_vnni" in flags,
        "load_average_before": os.getloadavg()[0], "commit": commit.strip(),
    }  # fmt: skip
