"""The main job: a recipe turns a model into a bundle, and says what became of quality, size and speed."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.target import Target
from compressor.codegen.tuning import summary
from compressor.data.load import load_data
from compressor.errors import GateError, UsageError
from compressor.evaluate.comparison import Speed, comparisons, measure_speed
from compressor.evaluate.gates import check_gates
from compressor.evaluate.models import SIZES, bundle_quality
from compressor.evaluate.quality import GraphLogits
from compressor.export.manifest import finite, write_measurements
from compressor.export.publish import check_destination, publishing
from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.model import ModelInfo, twin, weight_bytes
from compressor.host.cache import cache_folder
from compressor.host.digests import code_digest, digest, model_fingerprint, tensors_sha256
from compressor.host.machine import cpu_name
from compressor.host.tensor_files import Spill, trim
from compressor.pipeline.context import Context
from compressor.pipeline.observers import Dump, verify_stage
from compressor.pipeline.pipeline import Observer, Pipeline
from compressor.pipeline.segment_cache import Results
from compressor.plan.model import Plan
from compressor.plan.plan import check_plan, compare_plan, plan_graph
from compressor.plan.prices import machine
from compressor.progress import Reporter, Silent
from compressor.recipe.recipe import Recipe
from compressor.run.clock import _Clock
from compressor.run.lock import Lock
from compressor.run.native import NativeMaker
from compressor.run.outcome import Outcome
from compressor.run.web import WebMaker
from compressor.runtime import Bundle, load
from compressor.verify.check import Check
from compressor.verify.independence.check import check_independence
from compressor.version import installed_versions

if TYPE_CHECKING:
    from torch import nn

    from compressor.codegen.isa import Isa

_MAKERS: Mapping[str, Callable[[Any, int | None], NativeMaker | WebMaker]] = {"native": NativeMaker, "web": WebMaker}


def compress(
    model: str | Path | nn.Module | None,
    recipe: Recipe | Mapping[str, Any],
    output: str | Path | None = None,
    *,
    example: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    reporter: Reporter | None = None,
) -> Bundle:
    """Compress a model by a recipe and load the bundle.

    Args:
        model: Hugging Face folder or id, or a module; None takes the recipe's.
        recipe: a recipe, or plain data with the keys of its YAML form.
        output: the bundle's folder; None takes the recipe's.
        example: example inputs, for a module that is no Hugging Face model.
        dynamic_shapes: which of their sizes may vary, as for torch.export.export; left out, the bundle takes inputs of
            exactly these shapes.
    Raises:
        CompressorError: see ``compressor.errors``; nothing is left behind.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_dict(recipe)
    return load(
        run_recipe(
            recipe, output, model=model, example=example, dynamic_shapes=dynamic_shapes, reporter=reporter
        ).bundle
    )


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
) -> Outcome:
    """Run a recipe; the bundle appears whole, or not at all.

    Blocks that an earlier run finished are taken from the cache.  A bundle that fails a gate is kept as
    ``<output>.rejected``.

    Args:
        example, dynamic_shapes: as for :func:`compress`.
        dump: folder for the graph after each pass and the program after each lowering phase.
        threads: for tuning and for timing; None takes the physical cores.
        locked: what :func:`compressor.run.lock.read_lock` gave: the run repeats that one, or refuses.
    Raises:
        DriftError: the run would not repeat the locked one; everything that changed is named.
        GateError: a gate failed; each is named with what was expected and measured.
        ResourceError: this machine has too little memory or disk.
        VerificationError: the kernels do not compute what the graph does.
    """
    clock = _Clock(reporter or Silent())
    destination = Path(output or recipe.output or _missing_output())
    rejected = destination.with_name(destination.name + ".rejected")
    for folder in (destination, rejected) if recipe.gates else (destination,):
        check_destination(folder)
    if dump is not None:
        _make_dump_folder(dump)
    if isinstance(model, str):
        recipe, model = recipe.model_copy(update={"model": model}), None
    source = recipe.model_source() if model is None else model
    recipe.check_texts()
    target: Target = recipe.target.build()
    target.check_toolchain()  # fails now rather than after calibration
    maker = _MAKERS[target.bundle](target, threads)
    results = Results()
    results.prepare()
    lock = Lock(locked)
    lock.add_setting(recipe, target)
    if not isinstance(source, str):
        lock.add_model(source, recipe.trust_remote_code)
    lock.check()
    with clock.stage("capture"):
        graph = capture(source, example, dynamic_shapes=dynamic_shapes, trust_remote_code=recipe.trust_remote_code)
        dense = twin(graph)  # for comparison
        state = _origin(graph, recipe)
    info: ModelInfo = graph.meta["model"]
    with clock.stage("text"):
        samples, data = load_data(recipe, info)
    here = machine()  # measured once and remembered; that is no part of what the plan predicts
    with clock.stage("plan", shown=False):
        plan = plan_graph(graph, recipe, destination)
    check_plan(plan)
    if isinstance(source, str) and info.source is not None:  # an id of the hub, whose files are here now
        lock.add_model(info.source, recipe.trust_remote_code)
    lock.add_data(samples, data)
    lock.check()
    context = Context(
        samples=samples,
        seed=recipe.seed,
        target=recipe.target.name,
        reporter=clock.reporter,
        results=results,
        state=state,
        spill=Spill(cache_folder() / "spilled") if plan.spill else None,
        prices=here.seconds,
    )
    observers: list[Observer] = [verify_stage] if dump is None else [verify_stage, Dump(dump)]
    graph = Pipeline(recipe.passes, observers).run(graph, context)
    with clock.stage("independence"):
        independence = check_independence(graph)
    with clock.stage("compile"):
        maker.compile(graph, recipe.tune, lock.schedules, lambda isa: _dumper(dump, isa))
    lock.add_schedules(maker.schedules)
    lock.check()
    with publishing(destination) as partial:
        with clock.stage("write"):
            manifest = maker.write(
                partial, graph, recipe, context, weight_bytes(dense), lock.text(), independence.independent
            )
        metrics: dict[str, Any] = {key: manifest[key] for key in SIZES}
        metrics |= _cache_sizes(info, manifest["model"])
        metrics["batch_independent"] = independence.independent
        checks: Sequence[Check] = ()
        notes = list(maker.notes)
        if not independence.independent:
            notes.append(f"batch entries are {independence}")
        kernel_error, speed = None, Speed({}, {})
        del graph
        if maker.runs_here:
            with clock.stage("check"):
                kernel_error, checks = maker.check(partial)
            with clock.stage("evaluate", shown=False):
                reference = GraphLogits(dense, spill=context.spill)
                quality = bundle_quality(lambda: maker.process(partial), reference, data, recipe, clock.reporter)
            metrics.update(quality.metrics())
            del dense, reference
            gc.collect()  # graphs are cyclic, and two more processes are about to need memory
            trim()
        else:
            notes.append(maker.why_not())
        if maker.runs_here and maker.timed:
            with clock.stage("time"):
                speed = measure_speed(partial, info, recipe.gates, threads, plan.dense_speed)
            metrics.update(speed.metrics)
        notes += [*plan.notes, *speed.notes, *comparisons(metrics, speed.timings)]
        metrics["run_peak_rss_bytes"] = clock.peak_rss_bytes(metrics)
        metrics["run_s"] = clock.since_start()
        gates = check_gates(recipe.gates, {**metrics, "kernel_error": kernel_error}, speed.timings)
        outcome = Outcome(
            destination,
            metrics,
            gates,
            [dataclasses.asdict(record) for record in context.records],
            [dataclasses.asdict(record) for record in context.stages],
            kernel_error,
            notes,
            checks,
            _predictions(plan, metrics, clock, context),
            [*_reuse(context), *summary(maker.tried), *context.notes],
            maker.tried,
        )
        measurements = {**metrics, "kernel_error": kernel_error, "gates": [gate.content() for gate in gates]}
        write_measurements(partial, finite(measurements))
        if failed := [str(gate) for gate in gates if not gate.passed]:
            with publishing(rejected) as kept:
                kept.rmdir()
                partial.rename(kept)
            outcome = dataclasses.replace(outcome, bundle=rejected)
            raise GateError("\n".join([*failed, f"the bundle is kept as {rejected}"]), outcome)
    return outcome


def _cache_sizes(info: ModelInfo, compressed: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a decoder's keys and values, as captured and in the bundle."""
    if info.kind != "decoder":
        return {}
    dense_bytes = cache_bytes_per_token(info.cache_format, info.layers, info.kv_heads, info.head_dim)
    return {
        "cache_bytes_per_token": compressed["cache_bytes_per_token"],
        "dense_cache_bytes_per_token": dense_bytes,
    }


def _origin(graph: GraphModule, recipe: Recipe) -> str:
    """Digest of all that decides what passes make of this model: the model itself, our code, versions, the CPU."""
    info: ModelInfo = graph.meta["model"]
    if info.source is not None:
        model: Any = model_fingerprint(info.source, recipe.trust_remote_code)
    else:
        model = tensors_sha256([*graph.named_parameters(), *graph.named_buffers()])
    return digest(str(graph.graph), model, code_digest(), installed_versions(), cpu_name(), recipe.seed)


def _reuse(context: Context) -> list[str]:
    """What was not computed anew, in words."""
    if not context.reused or context.results is None:
        return []
    return [
        f"{context.reused} of {context.blocks} blocks were finished by an earlier run and came from "
        f"{context.results.folder}"
    ]


def _predictions(
    plan: Plan, metrics: Mapping[str, Any], clock: _Clock, context: Context
) -> list[tuple[str, float, float, float]]:
    """The plan beside what happened; seconds only where everything was done anew."""
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


def _dumper(folder: Path | None, isa: Isa | None) -> Any:
    if folder is None:
        return None
    count, of = iter(range(1, 1000)), "" if isa is None else f"_{isa.name}"

    def write(phase: str, text: str) -> None:
        (folder / f"lower{of}_{next(count):02d}_{phase}.py").write_text(text, encoding="utf-8")

    return write
