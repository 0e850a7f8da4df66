"""The reference model whose prompts a small model reads: operations, quality behind prompts, time to the first token.

    python benchmarks/predict_kv.py --work DIR [--layers 2 3 4] [--steps 200] [--turns 15] [--markdown FILE]

Quality is that of the graphs in PyTorch, float32, on windows of the recipe's held-out text: the first half of each is a
prompt, whose keys and values are predicted, and tokens of the second half are scored.  Prompts are timed on bundles of
the recipe's formats, one thread, in time of the processor: ``read_prompt``, which predicts, and ``step``, which runs
the model, take turns on one bundle.  What DIR holds already is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from bundles import write_bundle
from compressor_runtime.depth.prompts import read_prompt

from compressor.capture.capture import capture
from compressor.data.text import load_evaluation, load_samples
from compressor.graph.kept_tokens.predicted_caches import prompt_operations
from compressor.graph.model import clone_graph
from compressor.passes.predict_kv import PredictKv
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.recipe.recipe import load_recipe
from compressor.runtime import load
from compressor.training.objectives.prompts import measure_prompts

RECIPE = load_recipe("predict_kv_x86")
CHANGE = next(step for step in RECIPE.passes if isinstance(step, PredictKv))
PROMPTS, WINDOW, WINDOWS = (128, 512), 256, 64


def main() -> None:
    """Train what is missing, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=CHANGE.steps)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(RECIPE.model_source())
    dense = capture(folder)
    assert RECIPE.calibration is not None
    samples = load_samples(RECIPE.calibration, folder)
    tokens, _ = load_evaluation(RECIPE.evaluation, samples, folder)
    windows = torch.as_tensor(np.asarray(tokens)[: WINDOW * WINDOWS]).view(-1, WINDOW)
    timed = " | ".join(f"first token behind {count}: times as fast" for count in PROMPTS)
    lines = [
        f"| layers copied | steps | million multiply-adds a token of a prompt of 512 | perplexity behind prompts | "
        f"agreement | minutes | {timed} |",
        "|" + "---|" * (6 + len(PROMPTS)),
    ]
    for layers in options.layers:
        for steps in (1, options.steps):
            change = dataclasses.replace(CHANGE, layers=layers, steps=steps)
            context = Context(samples=samples, results=SegmentCache(options.work / "cache"), state="reference")
            begin = time.process_time()
            graph = Pipeline([change]).run(clone_graph(dense), context)
            minutes = "cached" if context.reused else f"{(time.process_time() - begin) / 60:.1f}"
            own, whole = prompt_operations(graph, 512)
            found = measure_prompts(graph, windows, 8)
            speed = ["" for _ in PROMPTS]
            if steps > 1:
                speed = ratios(dense, samples, change, options.work, options.turns)
            lines.append(
                f"| {layers} | {steps} | {own / 1e6:.3f} of {whole / 1e6:.3f} ({own / whole:.1%}) | "
                f"{found.predicted:.2f} (model: {found.dense:.2f}) | {found.agreement:.1%} | {minutes} | "
                f"{' | '.join(speed)} |"
            )
            print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join([*lines, ""]), encoding="utf-8")


def ratios(dense: Any, samples: Any, change: PredictKv, work: Path, turns: int) -> list[str]:
    """Return how many times as fast a first token is with predicted caches, of each length of prompts."""
    folder = work / f"bundle-{change.layers}"
    if not folder.is_dir():  # speed does not depend on the weights' values
        passes = (dataclasses.replace(change, steps=1), *(x for x in RECIPE.passes if not isinstance(x, PredictKv)))
        write_bundle(dense, RECIPE.model_copy(update={"passes": passes}), samples, folder, 1, "quick")
    bundle, rng, found = load(folder, threads=1), np.random.default_rng(0), []
    for count in PROMPTS:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(turns + 2):
            ids = rng.integers(0, bundle.model["vocab_size"], (1, count))
            for which, predicts in enumerate((True, False)):
                session = bundle.session(capacity=count)
                begin = time.process_time()
                if predicts:
                    read_prompt(session, ids)
                else:
                    session.step(ids)
                times[which].append(time.process_time() - begin)
        own, model = (statistics.median(each[2:]) * 1e3 for each in times)
        found.append(f"{model / own:.2f} ({own:.2f} ms in place of {model:.2f})")
    return found


if __name__ == "__main__":
    main()
