"""Perplexity of the reference model with fewer channels or heads, refitted and not trained; nothing is packed.

    python benchmarks/pruned_reference.py

Prints Markdown.  Passes see 128 samples of 256 tokens; perplexity is that of the float32 graph on 16,384 held-out
tokens in windows of 256 with stride 128.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import load_evaluation, load_samples
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.graph.model import clone_graph, weight_bytes
from compressor.host.resources import resource
from compressor.pipeline.context import Context
from compressor.recipe.recipe import load_recipe
from compressor.registry import PASSES

ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ffn_prune", {"ratio": 0.25}),
    ("ffn_prune", {"ratio": 0.25, "refit": False}),
    ("ffn_prune", {"ratio": 0.25, "importance": "magnitude", "refit": False}),
    ("ffn_prune", {"ratio": 0.5}),
    ("channel_prune", {"ratio": 0.25}),
    ("head_prune", {"ratio": 0.25}),
    ("head_prune", {"ratio": 0.5, "remove": "query_heads"}),
)


def main() -> None:
    """Measure and print a line for each row."""
    torch.set_num_threads(1)
    recipe, folder = load_recipe("ffn_prune_w4a16_x86"), resource("models") / "reference"
    assert recipe.calibration is not None
    dense, samples = capture(folder), load_samples(recipe.calibration, folder)
    tokens, _ = load_evaluation(recipe.evaluation, None, folder)

    def perplexity(graph: GraphModule) -> float:
        spec = recipe.evaluation
        found = measure_quality(GraphLogits(graph), tokens, window=spec.window, stride=spec.stride).perplexity
        assert found is not None
        return found

    least, size = perplexity(dense), weight_bytes(dense)
    print("| pass | options | weight bytes | perplexity | times dense | CPU s |\n|---|---|---|---|---|---|")
    print(f"| none | | {size:,} | {least:.4f} | 1.00 | |", flush=True)
    for name, options in ROWS:
        begin, step = time.process_time(), PASSES.find(name)(**options)
        graph = step.run(clone_graph(dense), Context(samples=samples))
        seconds, found = time.process_time() - begin, perplexity(graph)
        text = ", ".join(f"`{key}: {str(value).lower()}`" for key, value in options.items())
        bytes_left = f"{weight_bytes(graph):,}"
        print(f"| {name} | {text} | {bytes_left} | {found:.4f} | {found / least:.3f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
