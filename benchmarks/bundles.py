"""Make bundles for benchmarks: the phases of `compress run` without its checks and measurements.

    python benchmarks/bundles.py MODEL SCHEME FOLDER [--threads 2]

Compresses every linear of a Hugging Face folder with RTN and chooses schedules quickly; benchmarks/x86_llm.py times
such bundles.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.capture.capture import capture
from compressor.codegen.backend import make_backend
from compressor.codegen.lowering.experts.stack import stack_experts
from compressor.data.text import Samples
from compressor.export.bundle import write_bundle as finish
from compressor.export.facts import run_facts
from compressor.graph.model import clone_graph, weight_bytes
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.plan.passes import mark_entries
from compressor.recipe.recipe import Recipe
from compressor.verify.independence.check import check_independence


def write_bundle(
    dense: Any, recipe: Recipe, samples: Samples | None, folder: Path, threads: int | None = None, tune: str = "off"
) -> Any:
    """Write a bundle of a captured model into an empty folder, which is made.

    Returns:
        the compressed graph, and the seconds that its passes took.
    """
    begin, context = time.perf_counter(), Context(samples=samples)
    graph = Pipeline(recipe.passes).run(clone_graph(dense), context)
    seconds = time.perf_counter() - begin
    folder.mkdir(parents=True)
    lower(dense, graph, recipe, context, folder, threads, tune)
    return graph, seconds


def lower(
    dense: Any,
    graph: Any,
    recipe: Recipe,
    context: Context,
    folder: Path,
    threads: int | None = None,
    tune: str = "off",
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Generate kernels for a compressed graph, and fill the bundle's empty folder.

    Args:
        facts: further ones that the manifest states about the model.
    """
    mark_entries(graph, recipe)
    backend = make_backend(recipe.target.build(), threads)
    stack_experts(graph)
    backend.compile(graph, tune, None, lambda _isa: None)
    written = backend.write(folder, graph, check_independence(graph).independent)
    written = dataclasses.replace(written, model={**written.model, **(facts or {})})
    finish(folder, written, run_facts(graph, recipe, context, weight_bytes(dense)))


def main() -> None:
    """Make one bundle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("scheme")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    passes = [{"rtn": {"scheme": options.scheme, "targets": "Linear"}}]
    recipe = Recipe.from_dict({"model": options.model, "passes": passes, "target": "x86"})
    write_bundle(capture(options.model), recipe, None, options.folder, options.threads, recipe.tune)


if __name__ == "__main__":
    main()
