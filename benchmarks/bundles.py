"""Bundles as benchmarks make them: the phases of `compress run`, for models that are in memory already."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from compressor.codegen.lower import compile_graph
from compressor.graph import twin, weight_bytes
from compressor.independence import check_independence
from compressor.pipeline import Context, Pipeline
from compressor.recipe import Recipe
from compressor.run_assemble import assemble
from compressor.samples import Samples


def write_bundle(dense: Any, recipe: Recipe, samples: Samples, folder: Path, threads: int | None = None) -> Any:
    """Write a bundle of a captured model into an empty folder, which is made; schedules are not tuned.

    Returns:
        the compressed graph, and the seconds that its passes took.
    """
    begin, context = time.perf_counter(), Context(samples=samples)
    graph = Pipeline(recipe.passes).run(twin(dense), context)
    seconds = time.perf_counter() - begin
    folder.mkdir(parents=True)
    lower(dense, graph, recipe, context, folder, threads)
    return graph, seconds


def lower(dense: Any, graph: Any, recipe: Recipe, context: Context, folder: Path, threads: int | None = None) -> None:
    """Generate kernels for what passes made of a model, and fill the bundle's empty folder."""
    target = recipe.target.build()
    library = compile_graph(graph, target, tune="off", threads=threads)
    independent = check_independence(graph).independent
    assemble(folder, graph, [library], target, recipe, context, weight_bytes(dense), independent=independent)
