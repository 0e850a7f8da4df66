"""Export a batch of candidates for a machine with a GPU, and take home what it measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compressor.codegen.backend import make_backend
from compressor.codegen.device_tuning import gpu_kernels_digest
from compressor.codegen.tuning import Database
from compressor.errors import UsageError
from compressor.export.batch import BATCH, Batch, exported, finish_batch, writing_batch
from compressor.host.cache import merge_entries
from compressor.plan.passes import mark_entries, plan_passes
from compressor.progress import Reporter
from compressor.recipe.recipe import Recipe

if TYPE_CHECKING:
    from compressor.codegen.target import NativeTarget


def export_batch(recipe: Recipe, folder: Path, reporter: Reporter) -> Batch:
    """Compile all candidates of all kernels of a recipe's model into ``folder``; no weight is read.

    Raises:
        UsageError: the target's kernels are timed where they are made, or there is nothing to choose.
        ToolchainError: nvcc or a linker is missing, or refuses the kernels.
    """
    from compressor.capture.capture import capture
    from compressor.codegen.batch.collect import collect
    from compressor.codegen.batch.compile import compile_choice
    from compressor.codegen.gpu.kernel_set import gpu_kernels

    target = cast("NativeTarget", recipe.target.build())
    isa = target.resolve()
    if not isa.archs:
        raise UsageError(
            f"target {recipe.target.name}: batches are for the target cuda; other kernels are timed by `compress run` "
            "(`tune: full` in the recipe)"
        )
    target.check_toolchain()
    digest = gpu_kernels_digest()  # of what is loaded: the files may change meanwhile
    with writing_batch(folder) as partial:
        with reporter.task("capture", 1):
            graph = capture(recipe.model_source(), trust_remote_code=recipe.trust_remote_code, weights=False)
            mark_entries(graph, recipe)
            planned = plan_passes(graph, recipe, make_backend(target))
        with reporter.task("collect", 1):
            wanted = collect(planned.final, target.tvm_target(isa), gpu_kernels(isa))
        kernels: list[Mapping[str, Any]] = []
        with reporter.task("compile", sum(len(one.candidates) for one in wanted)) as task:
            for index, one in enumerate(wanted):
                name = f"kernels/{index:03d}.so"
                kernels.append({**compile_choice(one, target, isa, partial / name), "library": name})
                task.advance(len(one.candidates))
        return finish_batch(partial, folder, kernels, digest, isa.archs)


@dataclass(frozen=True)
class Imported:
    """What came home.

    Attributes:
        device: the class of GPUs that it counts for.
        name: of the GPU.
        database: where it is now.
        won: by kernel: microseconds of the default (None if it failed) and of the best, and the best's schedule.
        missing: kernels that were not measured.
        failed: candidates that failed, and why.
    """

    device: str
    name: str
    database: Path
    won: Mapping[str, tuple[float | None, float, Mapping[str, Any]]]
    missing: tuple[str, ...]
    failed: tuple[str, ...]


def import_results(file: Path, batch: Path | None, partial: bool, database: Path | None) -> Imported:
    """Take the results of a batch into a database, whole or not at all.

    Args:
        batch: the batch's folder; None looks for it among those that were exported here.
        partial: take what was measured if the batch did not come to its end.
        database: None takes the user's, in the cache.
    Raises:
        UsageError: the results are damaged, partial, of another batch or of other kernels, or times that cannot be.
    """
    from compressor.codegen.batch.results import check_results, read_results

    found = read_results(file)
    content = _batch_of(file, found.batch, batch)
    results = check_results(file, found, content, partial)
    place = Database().path if database is None else database
    if not results.entries:
        raise UsageError(f"{file}: no kernel was measured; {'; '.join(results.failed[:3])}")
    merge_entries(place, results.entries)
    schedules = {kernel["kernel"]: [one["schedule"] for one in kernel["candidates"]] for kernel in content["kernels"]}
    won = {}
    for name, times in results.kernels.items():
        if known := [(us, i) for i, us in enumerate(times) if us is not None]:
            best, index = min(known)
            won[name] = (times[0], best, schedules[name][index])
    return Imported(results.device, results.name, place, won, results.missing, results.failed)


def _batch_of(file: Path, digest: str, folder: Path | None) -> dict[str, Any]:
    """Return the content of the batch that results are of."""
    from compressor.host.digests import file_sha256

    place = exported(digest) if folder is None else folder / BATCH
    if not place.is_file() and folder is None:
        raise UsageError(
            f"{file}: results of a batch that was not exported here ({digest[:12]}); name the folder of that batch "
            "with --batch"
        )
    if not place.is_file() or file_sha256(place) != digest:
        raise UsageError(f"{file}: results of another batch ({digest[:12]}) than {place}")
    return cast(dict[str, Any], json.loads(place.read_bytes()))
