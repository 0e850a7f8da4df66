"""The reference model, trained while 90% of its blocks are left out, against pruning at once and dense bundles.

    python benchmarks/sparse_training.py [--work DIR] [--turns 15] [--threads 1]

Each row is a `compress run` with other passes; its perplexity is that of the bundle's kernels on the held-out text.
Bundles take turns: 64 tokens after a prompt of 128.  A ratio is the median over the turns of the time of a token of
the dense bundle in the row's own formats over the row's.  Bundles that lie in DIR already are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from compressor.evaluate.speed import Worker

TABLE = "{embedding: {scheme: W8A16}}"
HEAD = ", ignore: [lm_head]"
TRAIN = (
    "{sparse_train: {scheme: W8A16_B16x1@90, steps: 1200, batch: 4, learning_rate: 0.003, schedule: linear, "
    "held_out: 0.05, ignore: [lm_head]}}"
)
ROWS = {
    "dense W8A16": ("W8A16", f"[{{rtn: {{scheme: W8A16{HEAD}}}}}, {TABLE}]"),
    "dense W8A8": ("W8A8", f"[{{rtn: {{scheme: W8A8}}}}, {TABLE}]"),
    "alps 70% W8A16": ("W8A16", f"[{{alps: {{scheme: W8A16_B16x1@70{HEAD}}}}}, {TABLE}]"),
    "sparse_train 90% W8A16": ("W8A16", f"[{TRAIN}, {{magnitude: {{scheme: W8A16_B16x1@90{HEAD}}}}}, {TABLE}]"),
    "sparse_train 90% W8A8": (
        "W8A8",
        f"[{TRAIN}, {{magnitude: {{scheme: W8A8_B16x1@90{HEAD}}}}}, {{rtn: {{scheme: W8A8}}}}, {TABLE}]",
    ),
}


def bundle(passes: str, folder: Path, threads: int) -> dict[str, Any]:
    """Make a bundle, and return the run's report, which lies beside it."""
    report = folder.with_suffix(".json")
    if not folder.is_dir():
        compress = str(Path(sys.executable).with_name("compress"))
        options = ["--set", "gates={}", "--set", f"passes={passes}", "--threads", str(threads), "--report", str(report)]
        command = [compress, "run", "sparse_train_w8a16_x86", "-o", str(folder), *options]
        subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def race(folders: list[Path], turns: int, threads: int) -> list[list[float]]:
    """Return the milliseconds of a token, by bundle and turn."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(folder, threads=threads, prompt_tokens=128, new_tokens=64)) for folder in folders
        ]
        rounds = [[worker.repeat()["latency_ms"] for worker in workers] for _ in range(-2, turns)]
    return [list(times) for times in zip(*rounds[2:], strict=True)]


def main() -> None:
    """Make what is missing, race, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        folders = [work / f"decoder-{number}" for number in range(len(ROWS))]
        reports = [
            bundle(passes, folder, options.threads) for folder, (_, passes) in zip(folders, ROWS.values(), strict=True)
        ]
        load = os.getloadavg()[0]
        times = dict(zip(ROWS, race(folders, options.turns, options.threads), strict=True))
    print(f"{options.threads} thread(s), {options.turns} turns, load average before {load:.1f}\n")
    print(f"| bundle | perplexity | weight bytes | ms | of dense, in speed | passes, minutes |\n{6 * '|---'}|")
    for (name, (fmt, _)), report in zip(ROWS.items(), reports, strict=True):
        ratio = statistics.median(a / b for a, b in zip(times[f"dense {fmt}"], times[name], strict=True))
        cached = any(step["reused"] for step in report["passes"])
        minutes = sum(step["seconds"] for step in report["passes"]) / 60
        ms, cache = statistics.median(times[name]), " (partly from the cache)" if cached else ""
        cells = [name, f"{report['perplexity']:.3f}", f"{report['weight_bytes']:,}", f"{ms:.3f}", f"{ratio:.2f}x"]
        print(f"| {' | '.join(cells)} | {minutes:.1f}{cache} |")


if __name__ == "__main__":
    main()
