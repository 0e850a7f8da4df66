"""Drafts by the upper planes of a bundle's weights, beside a bundle of the same weights without planes.

    python benchmarks/planes_beside.py --work DIR [--formats W8A8_P4,W8A8_G128_P4] [--method rtn] [--texts 8]
                                       [--tokens 96] [--widths 8,2,16] [--markdown FILE]

For the reference model widened so that its weights do not fit into the caches (benchmarks/widened.py), on the tasks of
benchmarks/speculation.py that are greedy.  One thread, timed by its CPU time.  For each text the bundle in W8A8, which
takes plain steps, and each bundle with planes, with its drafts off and on, take turns in an order that is turned.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import mean, median

os.environ["OMP_NUM_THREADS"] = "1"

from compressor_runtime import Bundle
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.pace import Pace
from speculation import KINDS, LEAST_TOKENS, Task, continued, made, tasks

from compressor.host.resources import resource

DENSE, KIND = "W8A8", "planes"
HEADING = (
    "| text | bundle | drafts | ms a token: mean, median | over W8A8: means, median of texts | acceptance | "
    "tokens a verification |\n|---|---|---|---|---|---|---|"
)


def bundle_of(given: argparse.Namespace, scheme: str) -> Bundle:
    """Return the widened model in a format, with planes or without."""
    method = f"{{{given.method}: {{scheme: {scheme}, targets: Linear, ignore: [lm_head]}}}}"
    changes = [f"passes=[{method}, {{embedding: {{scheme: W8A16}}}}]"]
    if scheme == DENSE:
        changes.append("speculate=lookup")  # never asked for
    return made(argparse.Namespace(**{**vars(given), "override": changes}), "widened", KINDS[KIND])


def measured(bundles: dict[str, Bundle], task: Task, count: int) -> list[str]:
    """Return rows of the table: all bundles on one task."""
    clock = time.thread_time
    drafts = {name: Drafts(bundle.model["vocab_size"], Pace(clock), bundle.entries) for name, bundle in bundles.items()}
    runs = [(DENSE, False), *((name, on) for name in bundles if name != DENSE for on in (False, True))]
    seconds: dict[tuple[str, bool], list[float]] = {run: [] for run in runs}
    counted: dict[str, Speculation] = {}
    for number, prompt in enumerate(task.prompts):
        first, texts = number % len(runs), dict[str, list[int]]()
        for name, on in runs[first:] + runs[:first]:
            learnt = drafts[name] if on else None
            tokens, took, counts = continued(bundles[name], KIND, learnt, prompt, 0.0, number, count)
            if texts.setdefault(name, tokens) != tokens:
                raise SystemExit(f"{name}, {task.name}, text {number}: drafts change the text")
            if counts is not None:
                counted[name] = counted[name] + counts if name in counted else counts
            seconds[name, on].append(took / (len(tokens) - 1) if len(tokens) >= LEAST_TOKENS else 0.0)
    kept = [index for index in range(len(task.prompts)) if all(each[index] for each in seconds.values())]
    dense = [seconds[DENSE, False][index] for index in kept]
    rows = []
    for (name, on), each in seconds.items():
        own = [each[index] for index in kept]
        gains = [theirs / ours for theirs, ours in zip(dense, own, strict=True)]
        figures = counted[name].facts() if on else {}
        drafted = [f"{figures['acceptance']:.2f}", f"{figures['tokens_per_verification']:.2f}"] if figures else ["", ""]
        rows.append(
            f"| {task.name} | {name} | {'on' if on else 'off'} | {mean(own) * 1e3:.2f}, {median(own) * 1e3:.2f} | "
            f"{mean(dense) / mean(own):.2f}, {median(gains):.2f} | {' | '.join(drafted)} |"
        )
    return rows


def main() -> None:
    """Make what is missing, measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--source", type=Path, default=resource("models") / "reference")
    parser.add_argument("--widths", default="8,2,16", help="copies of residual, heads and inner units")
    parser.add_argument("--formats", default="W8A8_P4,W8A8_G128_P4")
    parser.add_argument("--method", default="rtn", help="the pass that chooses codes")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    bundles = {scheme: bundle_of(given, scheme) for scheme in (DENSE, *given.formats.split(","))}
    text = (resource("calibration") / "python_docs_heldout.txt").read_text(encoding="utf-8")
    lines = [HEADING]
    for task in tasks(bundles[DENSE], text, given.texts):
        if task.temperature == 0:
            lines += measured(bundles, task, given.tokens)
    print("\n".join(lines))
    if given.markdown:
        given.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
