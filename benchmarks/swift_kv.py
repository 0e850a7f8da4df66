"""The reference model whose prompts stop behind two of five layers: savings, costs, what training brings back.

    python benchmarks/swift_kv.py [--work DIR] [--turns 21] [--markdown FILE]

Perplexity is that of the graphs in PyTorch on the recipe's held-out text, all tokens kept: those of decoding.  The
gap is the perplexity that an untrained change adds.  Prompts are timed on bundles of the same formats (W8A16, one
thread), which take turns, in time of the processor.  What DIR holds already is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from bundles import write_bundle

from compressor.capture.capture import capture
from compressor.data.text import load_evaluation, load_samples
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.graph.kept_tokens.figures import prompt_cost
from compressor.graph.model import clone_graph
from compressor.passes.kv_cache import KvCache
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.recipe.recipe import load_recipe
from compressor.runtime import load

RECIPE = load_recipe("swift_kv_x86")
CHANGE = next(step for step in RECIPE.passes if isinstance(step, SwiftKv))
SHARES, LONG = (1, 2, 3), 1200
PROMPTS = (512, 1024)


def main() -> None:
    """Train what is missing, measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        lines = [*costs(), "", *qualities(work), "", *prompts(work, options.turns)]
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(["# SwiftKV on the reference model", "", *lines, ""]), encoding="utf-8")


def changed(**options: Any) -> SwiftKv:
    """Return the recipe's pass with other options."""
    return dataclasses.replace(CHANGE, **options)


def costs() -> list[str]:
    """Return the table of operations and bytes."""
    dense = capture(RECIPE.model_source())
    found = {"dense": dense}
    for share in SHARES:
        found[f"`share: {share}`"] = changed(share=share, steps=0).run(clone_graph(dense), Context())
    packed = KvCache("INT8").run(clone_graph(found[f"`share: {SHARES[-1]}`"]), Context())
    found[f"`share: {SHARES[-1]}`, caches in INT8"] = packed
    lines = ["| | caches | million multiply-adds a token of a prompt of 512 | bytes a token | weights, bytes |"]
    lines.append("|---|---|---|---|---|")
    before = prompt_cost(dense)
    for name, graph in found.items():
        cost = prompt_cost(graph)
        shares = [cost.multiply_adds / before.multiply_adds, cost.cache_bytes / before.cache_bytes]
        lines.append(
            f"| {name} | {graph.meta['model'].layers} | {cost.multiply_adds / 1e6:.3f} ({shares[0]:.1%}) | "
            f"{cost.cache_bytes} ({shares[1]:.1%}) | {cost.weight_bytes:,} |"
        )
    return lines


def qualities(work: Path) -> list[str]:
    """Return the table of perplexities."""
    folder = Path(RECIPE.model_source())
    dense, spec = capture(folder), RECIPE.evaluation
    assert RECIPE.calibration is not None
    samples = load_samples(RECIPE.calibration, folder)
    tokens, _ = load_evaluation(spec, samples, folder)

    def perplexity(graph: Any) -> float:
        found = measure_quality(GraphLogits(graph), tokens, window=spec.window, stride=spec.stride).perplexity
        assert found is not None
        return found

    whole = perplexity(dense)
    lines = [f"Perplexity of the model as it is: {whole:.2f}.", ""]
    lines += [
        "| | steps | untrained | trained | of the gap closed | minutes of one core |",
        "|---|---|---|---|---|---|",
    ]
    for share, steps in [*((share, CHANGE.steps) for share in SHARES), (SHARES[-1], LONG)]:
        begun = perplexity(changed(share=share, steps=0).run(clone_graph(dense), Context()))
        context = Context(samples=samples, results=SegmentCache(work / "cache"), state="reference")
        start = time.process_time()
        graph = Pipeline([changed(share=share, steps=steps)]).run(clone_graph(dense), context)
        minutes = "from the cache" if context.reused else f"{(time.process_time() - start) / 60:.1f}"
        ended = perplexity(graph)
        closed = (begun - ended) / (begun - whole)
        lines.append(f"| `share: {share}` | {steps} | {begun:.2f} | {ended:.2f} | {closed:.1%} | {minutes} |")
        print(lines[-1], flush=True)
    return lines


def prompts(work: Path, turns: int) -> list[str]:
    """Return the table of times."""
    dense = capture(RECIPE.model_source())
    behind = [step for step in RECIPE.passes if not isinstance(step, SwiftKv | KvCache)]
    rows = {
        "dense": behind,
        "share: 1": [changed(share=1, steps=0), *behind],
        "share: 3": [changed(share=3, steps=0), *behind],
        "share: 3, caches in INT8": [changed(share=3, steps=0), *behind, KvCache("INT8")],
    }
    bundles = {}
    for number, (name, passes) in enumerate(rows.items()):
        folder = work / f"bundle-{number}"
        if not folder.is_dir():
            write_bundle(dense, RECIPE.model_copy(update={"passes": tuple(passes)}), None, folder, 1, "quick")
        bundles[name] = load(folder, threads=1)
    rng = np.random.default_rng(0)
    lines = [f"Milliseconds of the processor, medians of {turns} turns; in brackets, times as fast as dense.", ""]
    lines += ["| | " + " | ".join(f"prompt of {n}" for n in PROMPTS) + " | token behind 512 |", "|---|---|---|---|"]
    times: dict[str, list[list[float]]] = {name: [] for name in rows}
    for _ in range(turns + 2):
        for name, bundle in bundles.items():
            times[name].append([prompt(bundle, rng, n) for n in PROMPTS] + [step(bundle, rng)])
    medians = {
        name: [statistics.median(each) for each in zip(*found[2:], strict=True)] for name, found in times.items()
    }
    for name, found in medians.items():
        pairs = zip(found, medians["dense"], strict=True)
        lines.append(f"| {name} | " + " | ".join(f"{ms:.2f} ({base / ms:.2f}x)" for ms, base in pairs) + " |")
    return lines


def prompt(bundle: Any, rng: np.random.Generator, tokens: int) -> float:
    """Return the milliseconds of a prompt."""
    session, ids = bundle.session(capacity=tokens), rng.integers(0, 2048, (1, tokens))
    begin = time.process_time()
    session.step(ids)
    return 1e3 * (time.process_time() - begin)


def step(bundle: Any, rng: np.random.Generator) -> float:
    """Return the milliseconds of a token behind a prompt."""
    session = bundle.session(capacity=640)
    session.step(rng.integers(0, 2048, (1, 512)))
    begin = time.process_time()
    for _ in range(16):
        session.step([[5]])
    return 1e3 * (time.process_time() - begin) / 16


if __name__ == "__main__":
    main()
