"""Compress a model by passes of ours: a request as JSON on stdin, the figures on stdout.

A request holds a model's entry of quality.yaml as ``data``, ``passes``, and the empty folder that gets the ``bundle``.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bundles import lower
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples, load_evaluation, load_samples
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites
from compressor.host.machine import peak_rss_bytes
from compressor.host.tensor_files import map_safetensors
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import Recipe, load_text_spec
from compressor.registry import PASSES

SAMPLES, LENGTH, TOKENS, WINDOW, STRIDE = 64, 256, 16384, 256, 128
_SEPARATOR = "<|endoftext|>"


def cpu_s() -> float:
    """Return user and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def texts(data: dict[str, Any], scratch: Path) -> tuple[str, str]:
    """Return the text to calibrate on and the text to evaluate on; one text is halved at the end of a document."""
    if "text" not in data:
        return data["calibration"], data["evaluation"]
    text = Path(data["text"]).read_text(encoding="utf-8")
    middle = text.index(_SEPARATOR, len(text) // 2) + len(_SEPARATOR)
    halves = [scratch / "first.txt", scratch / "second.txt"]
    for file, half in zip(halves, (text[:middle], text[middle:]), strict=True):
        file.write_text(half, encoding="utf-8")
    return str(halves[0]), str(halves[1])


def load_texts(data: dict[str, Any], dense: GraphModule) -> tuple[Samples, Tensor]:
    """Return samples of the calibration text, and the tokens to evaluate on."""
    model, vocab_size = Path(data["model"]), dense.meta["model"].vocab_size
    with tempfile.TemporaryDirectory() as scratch:
        learn, score = texts(data, Path(scratch))
        spec = load_text_spec(learn).model_copy(update={"samples": SAMPLES, "sequence_length": LENGTH})
        evaluation = load_text_spec(score, evaluation=True).model_copy(update={"tokens": TOKENS})
        samples = load_samples(spec, model, vocab_size)
        return samples, load_evaluation(evaluation, None, model, vocab_size)[0]


def stored_bits(bundle: Path, sites: dict[str, int]) -> float:
    """Return the bits per weight that the bundle's file of weights holds for the given linears (name -> weights).

    Everything under a linear's name counts, but its bias.
    """
    stored = 0
    for name, tensor in map_safetensors(bundle / "weights.safetensors").items():
        site, _, part = name.rpartition(".")
        if site in sites and part != "bias":
            stored += tensor.numel() * tensor.element_size()
    return 8 * stored / sum(sites.values())


def compress(
    dense: GraphModule, passes: list[dict[str, Any]], samples: Samples
) -> tuple[GraphModule, Context, Recipe, dict[str, Any]]:
    """Run passes of ours on a model; return the graph, context and recipe, and the time and memory that it took."""
    steps = [
        PASSES.find(name)(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
        for step in passes
        for name, options in step.items()
    ]
    recipe = Recipe.from_dict({"model": str(dense.meta["model"].source), "passes": steps, "tune": "off"})
    graph, context = clone_graph(dense), Context(samples=samples)
    begin, began = time.perf_counter(), cpu_s()
    graph = Pipeline(steps).run(graph, context)
    spent = {"seconds": time.perf_counter() - begin, "cpu_s": cpu_s() - began, "peak_rss_bytes": peak_rss_bytes()}
    return graph, context, recipe, {**spent, "notes": context.notes}


def bundled(dense: GraphModule, graph: GraphModule, context: Context, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Lower, write the bundle to ``folder``, and count the bytes that it stores for the compressed linears."""
    weights = {site.name: site.in_features * site.out_features for site in linear_sites(dense)}
    for site in linear_sites(graph):
        del weights[site.name]  # left dense
    lower(dense, graph, recipe, context, folder)
    return {"bits": stored_bits(folder, weights), "weights": sum(weights.values())} if weights else {}


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    dense = capture(request["data"]["model"])
    samples, _ = load_texts(request["data"], dense)
    graph, context, recipe, row = compress(dense, request["passes"], samples)
    json.dump(row | bundled(dense, graph, context, recipe, Path(request["bundle"])), sys.stdout)


if __name__ == "__main__":
    main()
