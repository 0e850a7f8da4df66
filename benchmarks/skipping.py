"""Quality of the reference model without some of its blocks, by each ranking, as it is and after distillation.

    python benchmarks/skipping.py [--counts 1,2] [--samples 64] [--steps 60] [--tokens 8192] [--prompts 64]

Runs in PyTorch on the dense graph, without packing: what is lost here is lost by leaving blocks out.  Held-out text
measures perplexity, and continuations of its prompts what the model writes on its own.  Sets of blocks that several
rankings choose are measured once.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, get_args

import torch
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples, load_evaluation, load_samples
from compressor.evaluate.generation.continuations import graph_continued, measure_continuations
from compressor.evaluate.quality import EvalResult, GraphLogits, measure_quality
from compressor.graph.model import clone_graph, weight_bytes
from compressor.host.resources import resource
from compressor.passes.distill import Distill
from compressor.passes.skip_layers import SkipLayers
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.pipeline.structured.layer_ranking import Ranking
from compressor.recipe.recipe import Recipe

RECIPE = {"model": "reference", "calibration": "python_docs_training", "evaluation": "python_docs_heldout"}
RATE = 5e-4  # that of recipes/skip_layers_x86.yaml


def measured(graph: GraphModule, dense: GraphModule, tokens: torch.Tensor, prompts: int) -> EvalResult:
    """Return perplexity and continuations, both against the dense graph's."""
    ours, theirs = GraphLogits(graph), GraphLogits(dense)
    found = measure_quality(ours, tokens, window=256, stride=128, dense=theirs)
    positions = dense.meta["model"].max_positions
    return measure_continuations(found, graph_continued(ours), tokens, prompts, positions, dense=theirs)


def compressed(dense: GraphModule, samples: Samples, *steps: Pass) -> tuple[GraphModule, Context, float]:
    """Run passes; return the graph, what they said, and the processor's seconds."""
    context, begin = Context(samples=samples), time.process_time()
    return Pipeline(steps).run(clone_graph(dense), context), context, time.process_time() - begin


def row(graph: GraphModule, seconds: float, found: EvalResult) -> dict[str, Any]:
    figures = ("perplexity", "top1_agreement", "continuation_agreement", "repetition")
    return {"bytes": weight_bytes(graph), "seconds": seconds, **{name: getattr(found, name) for name in figures}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1,2")
    for name, value in (("samples", 64), ("steps", 60), ("tokens", 8192), ("prompts", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    recipe = Recipe.from_dict({**RECIPE, "passes": []})
    folder = resource("models") / "reference"
    dense, calibration = capture(folder), recipe.calibration
    assert calibration is not None
    samples = load_samples(calibration.model_copy(update={"samples": given.samples}), folder)
    training = load_samples(calibration, folder)
    text = recipe.evaluation.model_copy(update={"tokens": given.tokens})
    tokens, _ = load_evaluation(text, None, folder)
    print(json.dumps({"dense": row(dense, 0.0, measured(dense, dense, tokens, given.prompts))}), flush=True)
    done: dict[tuple[str, ...], dict[str, Any]] = {}
    for count in map(int, given.counts.split(",")):
        for ranking in get_args(Ranking):
            graph, said, seconds = compressed(dense, samples, SkipLayers(float(count), ranking=ranking))
            gone = tuple(sorted({record.note.split()[-1] for record in said.records if "goes with" in record.note}))
            gone = tuple(name for name in gone if name.startswith("model.layers"))
            if gone not in done:
                plain = row(graph, 0.0, measured(graph, dense, tokens, given.prompts))
                numbers = tuple(int(name.rpartition(".")[2]) for name in gone)
                steps = Distill(steps=given.steps, batch=4, learning_rate=RATE, ignore=("lm_head",))
                taught, _, took = compressed(dense, training, SkipLayers(layers=numbers), steps)
                done[gone] = {
                    "plain": plain,
                    "distilled": row(taught, took, measured(taught, dense, tokens, given.prompts)),
                }
            line = {"count": count, "ranking": ranking, "gone": gone, "ranking_seconds": seconds, **done[gone]}
            print(json.dumps({**line, "notes": said.notes}), flush=True)


if __name__ == "__main__":
    main()
