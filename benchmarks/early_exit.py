"""Blocks saved against agreement lost by early exits of the reference model, before and after training.

    python benchmarks/early_exit.py [--steps 900] [--exits 3] [--documents] [--cache build/early_exit]

Trains by the pass `early_exit`, on calibration/python_docs.txt or, with --documents, on all documents that the
reference model was trained on (models/train_reference.py, which reads this Python's library).  Thresholds are chosen
for each agreement on samples that were held out of the training, and measured on calibration/python_docs_heldout.txt,
which neither has seen.  Runs in PyTorch on the dense graph; the run-time's tokens leave by the same rule, over the same
keys and values.  A killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples, load_evaluation, load_samples
from compressor.graph.model import clone_graph
from compressor.host.resources import resource
from compressor.numerics.depth.thresholds import choose_thresholds, outcome
from compressor.passes.early_exit import EarlyExit
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.recipe.recipe import Recipe
from compressor.training.exits.measure import ExitFigures, head_cost, measure_exits
from compressor.training.settings import split

RECIPE = {"model": "reference", "calibration": "python_docs_training", "evaluation": "python_docs_heldout"}
AGREEMENTS = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8)
BLOCKS = 5


def training_text(all_documents: bool, count: int) -> Samples:
    """Return samples of the calibration text, or of all documents that the model was trained on."""
    recipe, folder = Recipe.from_dict({**RECIPE, "passes": []}), resource("models") / "reference"
    assert recipe.calibration is not None
    if not all_documents:
        return load_samples(recipe.calibration, folder)
    sys.path.insert(0, str(resource("models")))
    from train_reference import END, documents, is_held_out

    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(END.join(text for name, text in documents() if not is_held_out(name)))
        file.flush()
        source = {"text": file.name, "samples": count, "sequence_length": 256, "seed": 0}
        own = Recipe.from_dict({**RECIPE, "calibration": source, "passes": []}).calibration
        assert own is not None
        return load_samples(own, folder)


def curve(
    chosen_on: ExitFigures, measured_on: ExitFigures, exits: tuple[int, ...], head: float
) -> list[dict[str, Any]]:
    """Return, for each agreement that is asked for, what its thresholds do on other text."""
    rows = []
    for wanted in AGREEMENTS:
        at = choose_thresholds(chosen_on.confidence.flatten(1), chosen_on.agrees.flatten(1), exits, BLOCKS, wanted)
        found = outcome(measured_on.confidence.flatten(1), measured_on.agrees.flatten(1), exits, BLOCKS, at)
        cost = (found.blocks + head * found.heads) / (BLOCKS + head)
        rows.append(
            {
                "wanted": wanted,
                "thresholds": [round(value, 4) for value in at],
                "agreement": found.agreement,
                "leaving": list(found.leaving),
                "blocks": found.blocks,
                "cost_with_heads": cost,
            }
        )
    return rows


def figures(graph: GraphModule, exits: tuple[int, ...], held_out: Tensor, text: Tensor) -> dict[str, Any]:
    """Return how a model's exits are on held-out text."""
    ours, others = measure_exits(graph, exits, held_out), measure_exits(graph, exits, text)
    return {
        "perplexity": math.exp(others.losses[-1]),
        "exit_perplexity": [math.exp(loss) for loss in others.losses[:-1]],
        "agreement": list(others.agreement),
        "curve": curve(ours, others, exits, head_cost(graph)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exits", default="3")
    parser.add_argument("--documents", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path("build/early_exit"))
    for name, value in (("steps", 900), ("batch", 4), ("samples", 3600), ("tokens", 16384), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, rate in (("rate", 1e-3), ("scale", 4.0), ("dropout", 0.1), ("held_out", 0.02)):
        parser.add_argument(f"--{name}", type=float, default=rate)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    exits = tuple(map(int, given.exits.split(",")))
    samples = training_text(given.documents, given.samples)
    dense = capture(resource("models") / "reference")
    spec = Recipe.from_dict({**RECIPE, "passes": []}).evaluation.model_copy(update={"tokens": given.tokens})
    text = load_evaluation(spec, None, resource("models") / "reference")[0]
    text = text[: len(text) // 256 * 256].view(-1, 256)
    train = EarlyExit(
        exits=exits,
        steps=given.steps,
        batch=given.batch,
        learning_rate=given.rate,
        exit_scale=given.scale,
        dropout=given.dropout,
        held_out=given.held_out,
        evaluate_every=150,
        checkpoint_every=50,
    )
    context = Context(samples=samples, results=SegmentCache(given.cache), state="reference")
    begin = time.process_time()
    graph = Pipeline([train]).run(clone_graph(dense), context)
    seconds, held_out = time.process_time() - begin, split(samples.ids, given.held_out, 0)[0]  # type: ignore[arg-type]
    found: dict[str, Any] = {"options": {**vars(given), "cache": str(given.cache)}, "training_cpu_s": seconds}
    found |= {"text": samples.source if not given.documents else "documents of models/train_reference.py"}
    for name, model in (("as it ships", dense), ("trained", graph)):
        found[name] = figures(model, exits, held_out, text)
    found["notes"] = context.notes
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
