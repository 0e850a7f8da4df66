"""The main job: a recipe turns a model into a bundle, and says what became of quality, size and speed."""

from __future__ import annotations

import dataclasses
import gc
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from compressor.codegen.backend import Check
from compressor.codegen.lowering.experts.stack import stack_experts
from compressor.codegen.tuning import summary
from compressor.errors import CompressorError, GateError, UsageError
from compressor.evaluate.comparison import Speed, comparisons, measure_speed
from compressor.evaluate.gates import check_gates
from compressor.evaluate.models import SIZES, bundle_quality
from compressor.executor.jobs import Executor, InProcess
from compressor.export.exchange.beside import publishing_exports
from compressor.export.facts import run_facts
from compressor.export.manifest import finite, write_measurements
from compressor.export.publish import (
    check_apart,
    check_destination,
    explaining_failed_writes,
    publishing,
    publishing_checkpoint,
)
from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.host.cache import cache_folder
from compressor.host.tensor_files import Spill, trim
from compressor.host.threads import waits_passively
from compressor.pipeline.context import Context
from compressor.pipeline.observers import Dump, VerifyStages, phase_writer
from compressor.pipeline.pipeline import Observer, Pipeline
from compressor.plan.model import Plan
from compressor.plan.plan import compare_plan
from compressor.progress import Reporter, Silent
from compressor.recipe.recipe import Recipe, load_recipe
from compressor.report.bundle_pages import write_bundle_pages
from compressor.report.outcome import Outcome
from compressor.run.clock import Clock
from compressor.run.prepare import Prepared, prepare
from compressor.run.speculation.lossy import write_with_drafts
from compressor.run.speculation.sparse import add_sparse_drafts
from compressor.runtime import Bundle, BundleError, RequestError, load, thread_count
from compressor.verify.independence.check import Independence, check_independence


def compress(
    model: str | Path | nn.Module | None,
    recipe: Recipe | Mapping[str, Any] | str | Path,
    output: str | Path | None = None,
    *,
    example: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    reporter: Reporter | None = None,
) -> Bundle:
    """Compress a model by a recipe and load the bundle; ``bundle.measurements`` says what became of it.

    Args:
        model: Hugging Face folder or id, or a module; None takes the recipe's.
        recipe: a recipe, plain data with the keys of its YAML form, a file, or a shipped recipe's name.
        output: the bundle's folder; None takes the recipe's.
        example: example inputs, for a module that is no Hugging Face model: a tuple, or the only input.
        dynamic_shapes: which of their sizes may vary, as for torch.export.export; left out, the bundle takes inputs of
            exactly these shapes.
        reporter: receiver of progress and notes, such as ``compressor.LogReporter()``; None reports nothing.
    Raises:
        CompressorError: see ``compressor.errors``; nothing is left behind.  The bundle is complete, and the message
            says so, where it is for another kind of machine and only cannot be opened on this one.
    """
    if not waits_passively():
        warnings.warn(
            "torch was imported before compressor.compress and without OMP_WAIT_POLICY=PASSIVE: where other processes "
            "work, this takes several times as long; set it before torch is imported, or import compress first",
            stacklevel=2,
        )
    outcome = run_recipe(
        _recipe(recipe), output, model=model, example=example, dynamic_shapes=dynamic_shapes, reporter=reporter
    )
    try:
        return load(outcome.bundle)
    except BundleError as error:
        raise CompressorError(
            f"{outcome.bundle} is written, and cannot be opened here ({error}); compressor.run.job.run_recipe does the "
            "same without opening it, and returns what was measured"
        ) from error


def _recipe(given: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if isinstance(given, Recipe):
        return given
    if isinstance(given, str | Path):
        return load_recipe(given)
    if isinstance(given, Mapping):
        return Recipe.from_dict(given)
    raise UsageError(f"recipe: {given!r:.80}; give a Recipe, a mapping, a file, or a shipped recipe's name")


def run_recipe(
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    model: str | Path | nn.Module | None = None,
    example: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    reporter: Reporter | None = None,
    dump: Path | None = None,
    threads: int | None = None,
    locked: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> Outcome:
    """Run a recipe; the bundle appears whole, or not at all.

    Blocks that an earlier run finished are taken from the cache.  A bundle that fails a gate is kept as
    ``<output>.rejected``.

    Args:
        example, dynamic_shapes: as for :func:`compress`.
        dump: folder for the graph after each pass, the program after each lowering phase, and what each rule of
            normalisation and fusion did.
        threads: for tuning and for timing; None takes the physical cores.
        locked: what :func:`compressor.run.lock.read_lock` gave: the run repeats that one, or refuses.
        executor: runs independent jobs of passes; None runs them in this process.
    Raises:
        DriftError: the run would not repeat the locked one; everything that changed is named.
        GateError: a gate failed; each is named with what was expected and measured.
        ResourceError: this machine has too little memory or disk.
        VerificationError: the kernels do not compute what the graph does.
    """
    clock = Clock(reporter or Silent())
    _check_arguments(model, output, threads)
    destination = Path(output or recipe.output or _missing_output())
    check_destination(destination)
    rejected = destination.with_name(destination.name + ".rejected")
    if recipe.gates:
        check_destination(rejected)
    if recipe.checkpoint is not None:
        check_apart(destination, Path(recipe.checkpoint))
    if dump is not None:
        _make_dump_folder(dump)
    given = prepare(recipe, model, example, dynamic_shapes, destination, threads, locked, clock)
    given.context.executor = executor or InProcess()
    with ExitStack() as stack:
        saved = (
            None if recipe.checkpoint is None else stack.enter_context(publishing_checkpoint(Path(recipe.checkpoint)))
        )
        given.exports = stack.enter_context(publishing_exports(recipe, destination))
        return _run(given, destination, rejected, dump, saved)


def _run(given: Prepared, destination: Path, rejected: Path, dump: Path | None, saved: Path | None) -> Outcome:
    """Do the work of :func:`run_recipe`.

    Args:
        rejected: where a bundle goes that fails a gate.
        saved: folder or file for the checkpoint, which appears where it belongs if this returns; None to write none.
    """
    clock = given.clock
    graph, independence = _compress(given, dump, saved)
    given.lock.check()
    with publishing(destination) as partial:
        with clock.stage("write"):
            written = given.backend.write(partial, graph, independence.independent)
            dense_bytes, lock = weight_bytes(given.dense_graph()), given.lock.text()
            facts = run_facts(graph, given.recipe, given.context, dense_bytes, lock)
            manifest = write_with_drafts(given, partial, written, facts)
        del graph
        measured = _measure(given, partial, manifest, independence)
        outcome = _judge(given, destination, partial, measured)
        write_bundle_pages(partial, outcome, given.plan.rooflines, given.context.prices or {}, given.info.source)
        if failed := [str(gate) for gate in outcome.gates if not gate.passed]:
            with publishing(rejected) as kept:
                kept.rmdir()
                partial.rename(kept)
            outcome = dataclasses.replace(outcome, bundle=rejected)
            raise GateError("\n".join([*failed, f"the bundle is kept as {rejected}"]), outcome)
    return outcome


def _check_arguments(model: object, output: object, threads: int | None) -> None:
    if not isinstance(model, str | Path | nn.Module | None):
        raise UsageError(f"model: {model!r:.80}; give a folder, an id of the hub, or a module")
    if isinstance(model, Path) and not os.path.exists(model):  # False as well where no path can be what it is
        raise UsageError(f"model: {str(model)!r:.80}: no such folder")
    if not isinstance(output, str | Path | None):
        raise UsageError(f"output: {output!r:.80}; give a folder")
    try:
        thread_count(threads)
    except RequestError as error:
        raise UsageError(str(error)) from error


def _compress(given: Prepared, dump: Path | None, saved: Path | None) -> tuple[GraphModule, Independence]:
    """Run the passes and generate the kernels for what they leave."""
    observers: list[Observer] = [VerifyStages()] if dump is None else [VerifyStages(), Dump(dump)]
    if saved is not None:
        observers.append(_saver(given, saved))
    graph = Pipeline(given.recipe.passes, observers).run(given.take_graph(), given.context)
    given.context.notes += graph.meta.get("notes", [])
    if given.exports.folders:
        with given.clock.stage("exports"):
            given.exports.write(graph, given.clock.reporter)
    add_sparse_drafts(given, graph)
    stack_experts(graph, Spill(cache_folder() / "spilled", "stacked experts"))
    with given.clock.stage("independence"):
        independence = check_independence(graph)
    with given.clock.stage("compile"):
        given.backend.compile(
            graph, given.recipe.tune, given.lock.schedules, lambda isa: phase_writer(dump, isa.name if isa else "")
        )
    given.lock.add_schedules(given.backend.schedules)
    return graph, independence


def _saver(given: Prepared, place: Path) -> Observer:
    """Return the observer that writes the checkpoint once the model is as it is to be saved."""

    def save(index: int, _: str, graph: GraphModule, __: Context) -> None:
        if given.checkpoint is not None and index == given.checkpoint.after:
            with given.clock.stage("checkpoint"), explaining_failed_writes(place):
                given.checkpoint.form.write(place, graph)

    return save


@dataclass
class _Measured:
    """What is known of a bundle: figures by their JSON names, errors, speed, and what else there is to say."""

    metrics: dict[str, Any]
    notes: list[str]
    kernel_error: float | None = None
    checks: Sequence[Check] = ()
    speed: Speed = field(default_factory=lambda: Speed({}, {}))


def _measure(given: Prepared, bundle: Path, manifest: Mapping[str, Any], independence: Independence) -> _Measured:
    """Check a bundle's kernels, and measure its quality and speed, as far as this machine can run it."""
    backend, clock, info = given.backend, given.clock, given.info
    result = _Measured({key: manifest[key] for key in SIZES}, list(backend.notes))
    result.metrics |= {**_cache_sizes(info, manifest["model"]), **manifest["model"].get("lossy", {})}
    result.metrics["batch_independent"] = independence.independent
    if not independence.independent:
        result.notes.append(f"batch entries are {independence}")
    if backend.runs_here:
        with clock.stage("check"):
            result.kernel_error, result.checks = backend.check_kernels(bundle)
        with clock.stage("evaluate", shown=False):
            result.metrics.update(_quality(given, bundle))
    if not backend.runs_here or backend.launcher:
        result.notes.append(backend.why_not())
    given.drop_dense_graph()
    gc.collect()  # graphs are cyclic, and two more processes are about to need memory
    trim()
    if backend.runs_here and backend.timed:
        with clock.stage("time"):
            result.speed = measure_speed(
                bundle, info, given.recipe.gates, given.threads, given.plan.dense_speed, backend.launcher
            )
        result.metrics.update(result.speed.metrics)
    result.notes += [*given.plan.notes, *result.speed.notes, *comparisons(result.metrics, result.speed.timings)]
    result.metrics["run_peak_rss_bytes"] = clock.peak_rss_bytes(result.metrics)
    result.metrics["run_s"] = clock.since_start()
    return result


def _quality(given: Prepared, bundle: Path) -> dict[str, Any]:
    """Measure a bundle's quality against the dense model."""
    data, recipe, dense, reporter = given.data, given.recipe, given.dense_logits(), given.clock.reporter
    samples = given.context.samples
    return bundle_quality(lambda: given.backend.open(bundle), dense, data, recipe, samples, reporter).metrics()


def _judge(given: Prepared, destination: Path, partial: Path, measured: _Measured) -> Outcome:
    """Hold the figures against the gates, and write them beside the bundle."""
    context, backend = given.context, given.backend
    metrics = {**measured.metrics, "kernel_error": measured.kernel_error}
    gates = check_gates(given.recipe.gates, metrics, measured.speed.timings)
    write_measurements(partial, finite({**metrics, "gates": [gate.content() for gate in gates]}))
    return Outcome(
        destination,
        measured.metrics,
        gates,
        [dataclasses.asdict(record) for record in context.records],
        [dataclasses.asdict(record) for record in context.stages],
        measured.kernel_error,
        measured.notes,
        measured.checks,
        _predictions(given.plan, measured.metrics, given.clock, context),
        [*_reuse(context), *summary(backend.tried), *context.notes],
        backend.tried,
        [dataclasses.asdict(front) for front in context.fronts],
        given.exports.done,
    )


def _cache_sizes(info: ModelInfo, compressed: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a decoder's keys and values, as captured and in the bundle."""
    if not info.generates:
        return {}
    dense_bytes = cache_bytes_per_token(info.cache_format, info.cache_heads, info.head_dim)
    return {
        "cache_bytes_per_token": compressed["cache_bytes_per_token"],
        "dense_cache_bytes_per_token": dense_bytes,
    }


def _reuse(context: Context) -> list[str]:
    """Say which segments an earlier run had finished."""
    if not context.reused or context.results is None:
        return []
    # without the folder's name: a bundle's report goes to others
    return [f"{context.reused} of {context.blocks} blocks were finished by an earlier run and came from the cache"]


def _predictions(
    plan: Plan, metrics: Mapping[str, Any], clock: Clock, context: Context
) -> list[tuple[str, float, float, float]]:
    """Compare the plan with the measured figures; seconds only where everything was done anew."""
    actual = {name: metrics[name] for name in ("weight_bytes", "bundle_bytes")}
    actual["peak_rss_bytes"] = metrics["run_peak_rss_bytes"]
    if not context.reused:
        actual |= clock.seconds
        for stage in context.stages[1:]:
            actual[stage.name] = actual.get(stage.name, 0.0) + stage.seconds
        actual["seconds"] = metrics["run_s"]
    return compare_plan(plan, actual)


def _missing_output() -> str:
    raise UsageError("no output folder: give one with -o, or `output:` in the recipe")


def _make_dump_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"dump: {folder} cannot be made a folder: {error}; choose another") from error
