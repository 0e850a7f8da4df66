"""Bundles of the reference model that run fewer blocks: quality, operations and speed, beside the bundle that runs all.

    python benchmarks/skipping_bundles.py [--work DIR] [--steps 60] [--turns 11] [--prompts 64] [--markdown FILE]
    python benchmarks/widened.py WIDE && python benchmarks/skipping_bundles.py --model WIDE --steps 0

Every bundle is in W8A8 with embeddings in W8A16.  Perplexity is the bundle's on held-out text in windows of 256 tokens,
agreement the share of a greedy continuation of 64 tokens before its first difference from the dense model's, which
runs in PyTorch.  All bundles write the same 224 tokens behind a prompt of 32 in turns, on one thread, in time of the
processor.  Multiply-adds are those of a step in the middle of such a text, of the blocks that its positions run on
average.  What DIR holds already is neither trained nor compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from bundles import write_bundle
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples, load_samples
from compressor.evaluate.models import evaluate_path
from compressor.graph.costs import node_costs
from compressor.passes.distill import Distill
from compressor.passes.skip_decode import SkipDecode
from compressor.passes.skip_layers import SkipLayers
from compressor.pipeline.pipeline import Pass
from compressor.recipe.recipe import load_recipe
from compressor.runtime import load

RECIPE = load_recipe("skip_decode_x86")
PACKING = tuple(step for step in RECIPE.passes if not isinstance(step, SkipDecode))
TEXT, PROMPT = 256, 32
GONE = {"1 block": (3,), "2 blocks": (1, 3)}
"""The blocks that every ranking chooses (benchmarks/skipping.py)."""
COSTS = (0.9, 0.8, 0.7)
TRAINING: dict[str, Any] = {"batch": 4, "ignore": ("lm_head",)}


def methods(steps: int) -> dict[str, tuple[Pass, ...]]:
    """Return the passes of each row, in front of those that pack."""
    found: dict[str, tuple[Pass, ...]] = {"all blocks": ()}
    taught = Distill(steps=max(1, steps), learning_rate=5e-4, **TRAINING)  # the rate of recipes/skip_layers_x86.yaml
    for name, layers in GONE.items():
        gone = SkipLayers(layers=layers)
        found[f"`skip_layers`, {name} gone"] = (gone,)
        if steps:
            found[f"`skip_layers`, {name} gone, distilled"] = (gone, taught)
    for part in ("attention", "ffn"):
        found[f"`skip_layers`, 1 {part} gone"] = (SkipLayers(1.0, part=part),)
    for cost in COSTS:
        found[f"`skip_decode`, cost {cost:g}"] = (SkipDecode(cost=cost),)
        if steps:
            trained = SkipDecode(cost=cost, steps=steps, learning_rate=7e-4, **TRAINING)  # its recipe's rate
            found[f"`skip_decode`, cost {cost:g}, trained"] = (trained,)
    return found


def products(graph: GraphModule) -> float:
    """Return the multiply-adds of a step in the middle of the text, all blocks counted."""
    costs = node_costs(graph, 1, 1, TEXT // 2, rows=1).values()
    return sum(cost.flops for cost in costs if cost.kind in ("linear", "attention")) / 2


def seconds(bundle: Any, tokens: Sequence[int]) -> float:
    """Return the time of the processor that a token behind the prompt takes."""
    session = bundle.session(capacity=TEXT)
    session.step(np.array([tokens[:PROMPT]]))
    begin = time.process_time()
    for token in tokens[PROMPT:]:
        session.step([[token]])
    return (time.process_time() - begin) / (TEXT - PROMPT)


def main() -> None:
    """Make what is missing, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=RECIPE.model_source(), help="a folder; the reference model")
    parser.add_argument("--work", type=Path)
    for name, value in (("steps", 60), ("turns", 11), ("prompts", 64), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        lines = table(options.work or Path(scratch), options)
    if options.markdown:
        options.markdown.write_text("\n".join([*lines, ""]), encoding="utf-8")


def table(work: Path, options: argparse.Namespace) -> list[str]:
    """Return the table's lines, and print each as it is known."""
    folder = Path(options.model)
    dense, calibration = capture(folder), RECIPE.calibration
    assert calibration is not None
    samples = load_samples(calibration, folder)
    spec = RECIPE.evaluation.model_copy(
        update={"tokens": options.tokens, "window": TEXT, "stride": TEXT // 2, "continuations": options.prompts}
    )
    rows = {}
    for number, (name, passes) in enumerate(methods(options.steps).items()):
        rows[name] = one = made(work / f"bundle-{number}", dense, samples, passes)
        one |= evaluate_path(one["bundle"], spec, dense=str(folder), threads=1)
        one["loaded"] = load(one["bundle"], threads=1)
        print(name, {key: one[key] for key in ("perplexity", "continuation_agreement", "repetition")}, flush=True)
    tokens = np.random.default_rng(0).integers(0, dense.meta["model"].vocab_size, TEXT).tolist()
    for turn in range(options.turns + 1):
        for one in rows.values():
            took = seconds(one["loaded"], tokens)
            if turn:  # the first is not counted
                one.setdefault("times", []).append(took)
    return written(rows)


def made(bundle: Path, dense: GraphModule, samples: Samples, passes: Sequence[Pass]) -> dict[str, Any]:
    """Make a bundle that is not there yet, and return what is known of its graph."""
    facts = bundle.with_suffix(".json")
    if not facts.is_file():
        recipe = RECIPE.model_copy(update={"passes": (*passes, *PACKING)})
        graph, took = write_bundle(dense, recipe, samples, bundle, 1, "quick")
        found = {"seconds": took, "products": products(graph), "depths": graph.meta["model"].depths}
        facts.write_text(json.dumps(found), encoding="utf-8")
    return {**json.loads(facts.read_text(encoding="utf-8")), "bundle": bundle}


def written(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the page's lines."""
    whole, times = rows["all blocks"], {name: statistics.median(one["times"]) for name, one in rows.items()}
    block = whole["products"] - rows["`skip_layers`, 1 block gone"]["products"]
    heads = ("million multiply-adds", "perplexity", "top-1", "agreement", "repetition", "µs a token", "times as fast")
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, one in rows.items():
        spared = sum(TEXT - min(TEXT, end) for end in one["depths"] or () if end is not None) / TEXT  # blocks
        took, spread = times[name], statistics.quantiles(one["times"], n=4)
        cells = [
            f"{(one['products'] - spared * block) / 1e6:.2f}",
            f"{one['perplexity']:.2f}",
            f"{one['top1_agreement']:.1%}",
            f"{one['continuation_agreement']:.1%}",
            f"{one['repetition']:.1%}",
            f"{took * 1e6:.0f} ({spread[0] * 1e6:.0f} to {spread[2] * 1e6:.0f})",
            f"{times['all blocks'] / took:.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()
