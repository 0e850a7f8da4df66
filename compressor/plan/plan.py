"""Predict what a run will do and cost, before any weight is read: formats, bytes, memory, disk, time, speed bounds.

Only the headers of the model's files are read.  Each pass rewrites a graph without weights as it will rewrite the real
one, so sizes are counted rather than estimated; memory, disk and time come from models of what each stage does
(:mod:`compressor.plan.memory`, :mod:`compressor.plan.durations`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from compressor.capture.convolution.rewrite import dense_convolutions
from compressor.codegen.backend import Backend, make_backend
from compressor.errors import GateError, ResourceError
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.host.cache import cache_folder
from compressor.host.devices import DeviceFigures
from compressor.host.machine import available_memory, free_disk
from compressor.plan.checkpoint import PlannedCheckpoint, plan_checkpoint
from compressor.plan.durations import estimate, slower_prompts
from compressor.plan.memory import needed, peak
from compressor.plan.model import Plan
from compressor.plan.passes import PlannedPasses, mark_entries, plan_passes
from compressor.plan.prices import Prices, machine_prices
from compressor.plan.roofline import device_rooflines, rooflines
from compressor.plan.stages import Costs, run_costs
from compressor.progress import Reporter
from compressor.recipe.gates import Gate
from compressor.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


def make_plan(
    recipe: Recipe,
    model: str | Path | nn.Module | None = None,
    output: str | Path | None = None,
    *,
    measure: bool = False,
    reporter: Reporter | None = None,
) -> Plan:
    """Plan a run from the headers of the model's files.

    Args:
        model: in place of the recipe's.
        output: the bundle's folder, whose disk counts; None takes the recipe's, else the current folder.
        measure: measure this machine anew.
        reporter: told where the machine is measured, which takes seconds.
    Raises:
        CompressorError: what would stop the run as well: the model, the recipe's patterns, its data, the target.
    """
    from compressor.capture.capture import capture
    from compressor.data.load import load_data

    source = recipe.model_source() if model is None else model
    recipe.check_texts()
    graph = capture(source, trust_remote_code=recipe.trust_remote_code, weights=False)
    mark_entries(graph, recipe)
    backend = make_backend(recipe.target.build())
    planned = plan_passes(graph, recipe, backend)  # first, as the model's positions limit what is advised
    checkpoint = plan_checkpoint(planned, recipe, source)
    info: ModelInfo = graph.meta["model"]
    if "hub" not in (recipe.evaluation.kind, getattr(recipe.calibration, "kind", None)):
        load_data(recipe, info)  # what does not do as data is said now; a data set on the hub is not fetched for a plan
    return plan_graph(graph, recipe, backend, planned, output, checkpoint, measure=measure, reporter=reporter)


def plan_graph(
    graph: GraphModule,
    recipe: Recipe,
    backend: Backend,
    planned: PlannedPasses,
    output: str | Path | None = None,
    checkpoint: PlannedCheckpoint | None = None,
    *,
    measure: bool = False,
    reporter: Reporter | None = None,
) -> Plan:
    """Plan a run on a captured graph, which stays as it is; its weights are not read.

    Args:
        planned: what :func:`compressor.plan.passes.plan_passes` gave for these.
        checkpoint: what :func:`compressor.plan.checkpoint.plan_checkpoint` gave for these.
        output, measure, reporter: as for :func:`make_plan`.
    """
    here, passes, final = machine_prices(measure, reporter), planned.passes, planned.final
    place = Path(output or recipe.output or ".")
    available = available_memory()
    costs = run_costs(graph, planned, recipe, backend)
    spill = dense_speed = False
    for spill, dense_speed in ((False, True), (False, False), (True, True), (True, False)):
        memory = costs.memory(here, spill=spill, dense_speed=dense_speed)
        if needed(memory).needed_bytes <= available.bytes:
            break
    disk = _disk(place, costs, spill)
    bounds = rooflines(final, here) if costs.isa is not None else []
    seconds = costs.seconds(here, bounds, spill=spill, dense_speed=dense_speed)
    info: ModelInfo = graph.meta["model"]
    target = recipe.target.build()
    device: DeviceFigures | None = target.figures() if hasattr(target, "figures") else None
    plan = Plan(
        model=info.name,
        architecture=info.architecture,
        target=target.resolve().name,
        passes=passes,
        dense_weight_bytes=weight_bytes(graph),
        weight_bytes=weight_bytes(final),
        bundle_bytes=costs.bundle_bytes,
        memory=tuple(memory),
        peak_rss_bytes=peak(memory).peak_bytes,
        needed_bytes=needed(memory).needed_bytes,
        available=available,
        spill=spill,
        dense_speed=dense_speed and costs.times_dense,
        disk=disk,
        stages={stage: estimate(value, here) for stage, value in seconds.items()},
        seconds=estimate(sum(seconds.values()), here),
        rooflines=tuple(bounds),
        device="" if device is None else device.name,
        device_rooflines=() if device is None else tuple(device_rooflines(final, here, device)),
        notes=tuple(_notes(planned, costs, recipe.target.name, spill, dense_speed, checkpoint)),
    )
    return dataclasses.replace(plan, advice=_advice(plan, graph, recipe, backend, here)) if _short(plan) else plan


def _notes(
    planned: PlannedPasses,
    costs: Costs,
    target: str,
    spill: bool,
    dense_speed: bool,
    checkpoint: PlannedCheckpoint | None,
) -> list[str]:
    """Say what is not in the figures, and what the run will do differently for want of memory."""
    notes = [
        f"{step.name}: says nothing of its cost: its time and memory are not in these figures"
        for step in planned.passes
        if not step.cost_known
    ]
    notes += [
        f"{step.name}: trains on a GPU: its time there, and that memory, are not in these figures"
        for step in planned.passes
        if step.training is not None and step.training.on_gpu
    ]
    notes += [checkpoint.note] if checkpoint is not None else []
    notes += dense_convolutions(planned.final)
    notes += slower_prompts(planned.final, costs.isa) if costs.isa is not None else []
    if spill:
        notes.append(f"hidden states go to {cache_folder()}: {_size(costs.spilled_bytes)} do not fit in memory")
    if not dense_speed and costs.times_dense:
        notes.append("the dense model's speed will not be measured: in float32 it does not fit in memory")
    if costs.isa is None:
        notes.append(
            f"{target}: what generating, checking and evaluating kernels costs is not in these figures, "
            "and how fast they are is up to the users' devices"
        )
    return notes


def check_plan(plan: Plan, gates: Sequence[Gate] = ()) -> None:
    """Refuse a run that will not fit, or whose result is certain to fail a gate: the bytes of its weights are known.

    Raises:
        ResourceError: names what is short, by how much, and settings that would help.
        GateError: names the gate.
    """
    _check_gates(plan, gates)
    if short := _short(plan):
        advice = "; or ".join(plan.advice) or "none of the recipe's settings is enough: take a machine with more"
        raise ResourceError(f"{plan.model}: {' and '.join(short)}; {advice}")


def _check_gates(plan: Plan, gates: Sequence[Gate]) -> None:
    if not all(step.cost_known and step.is_exact for step in plan.passes):
        return
    for gate in gates:
        figure = plan.weight_bytes / (plan.dense_weight_bytes if gate.relative else 1)
        if gate.metric == "weight_bytes" and not gate.holds(figure):
            shown = f"{figure:.4g}x dense" if gate.relative else _size(plan.weight_bytes)
            raise GateError(
                f"weight_bytes: expected {gate}, and this recipe gives {shown}: choose smaller formats, or another gate"
            )


def compare_plan(plan: Plan, actual: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """Predictions beside what happened: (name, predicted, measured, predicted / measured).

    Args:
        actual: any of ``weight_bytes``, ``bundle_bytes``, ``peak_rss_bytes``, ``disk_bytes``, ``seconds``, and seconds
            of stages by their names in ``plan.stages``.
    """
    predicted = {
        name: float(getattr(plan, name)) for name in ("weight_bytes", "bundle_bytes", "peak_rss_bytes", "disk_bytes")
    }
    predicted |= {"seconds": plan.seconds.value, **{name: stage.value for name, stage in plan.stages.items()}}
    return [
        (name, value, actual[name], value / actual[name])
        for name, value in predicted.items()
        if actual.get(name, 0) > 0
    ]


def _short(plan: Plan) -> list[str]:
    """Say which memory or disk is too small for the run."""
    short = []
    if plan.needed_bytes > plan.available.bytes:
        stage = needed(plan.memory)
        missing = plan.needed_bytes - plan.available.bytes
        short.append(
            f"memory: the stage {stage.stage} needs {_size(plan.needed_bytes)}, {_size(missing)} more than there is "
            f"({_size(plan.available.bytes)}, by {plan.available.limit})"
        )
    for folder, (written, free) in plan.disk.items():
        if written > free:
            short.append(
                f"disk: {folder} needs {_size(written)}, {_size(written - free)} more than is free ({_size(free)})"
            )
    return short


def _size(size_bytes: float) -> str:
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.2f} GB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.1f} kB"


def _disk(output: Path, costs: Costs, spill: bool) -> dict[str, tuple[int, int]]:
    """Bytes written and free by folder; one entry, the output's, where both folders are on one disk."""
    cached = costs.cache_bytes + (costs.spilled_bytes if spill else 0)
    (disk, free), (cache_disk, cache_free) = free_disk(output), free_disk(cache_folder())
    if disk == cache_disk:
        return {str(output): (costs.bundle_bytes + cached, free)}
    return {str(output): (costs.bundle_bytes, free), str(cache_folder()): (cached, cache_free)}


def _advice(plan: Plan, graph: GraphModule, recipe: Recipe, backend: Backend, here: Prices) -> tuple[str, ...]:
    """Find settings that would make the run fit, each tried on the model; the least change of each kind."""
    found: list[str] = []
    for setting, changed in _alternatives(recipe):
        costs = run_costs(graph, plan_passes(graph, changed, backend), changed, backend)
        memory = costs.memory(here, spill=plan.spill, dense_speed=plan.dense_speed)
        place = Path(next(iter(plan.disk)))
        fits = needed(memory).needed_bytes <= plan.available.bytes
        if fits and all(written <= free for written, free in _disk(place, costs, plan.spill).values()):
            kind = setting.partition("=")[0]
            if not any(text.startswith(kind) for text in found):
                found.append(f"{setting} would fit")
    short_disks = [folder for folder, (written, free) in plan.disk.items() if written > free]
    if short_disks and plan.needed_bytes <= plan.available.bytes:
        found.append("another output folder (-o) or COMPRESS_CACHE_DIR, on a disk with more room, would fit")
    return tuple(found)


def _alternatives(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """Smaller runs, each with the setting that makes it so; larger ones of a kind come first."""
    found: list[tuple[str, Recipe]] = []
    if (spec := recipe.calibration) is not None:
        for key, least in (("samples", 1), ("sequence_length", 32)):
            value = getattr(spec, key) // 2
            while value >= least:
                changed = spec.model_copy(update={key: value})
                found.append((f"calibration.{key}={value}", recipe.model_copy(update={"calibration": changed})))
                value //= 2
        for option in dict.fromkeys(option for step in recipe.passes for option in step.costly_options):
            passes = tuple(
                dataclasses.replace(step, **{option: False}) if option in step.costly_options else step
                for step in recipe.passes
            )
            if passes != recipe.passes:
                found.append((f"{option}=false", recipe.model_copy(update={"passes": passes})))
    evaluated = recipe.evaluation.kind is not None or recipe.calibration is not None
    window = recipe.evaluation.window // 2 if evaluated else 0
    while window >= 32:
        changed_spec = recipe.evaluation.model_copy(update={"window": window, "stride": max(1, window // 2)})
        found.append((f"evaluation.window={window}", recipe.model_copy(update={"evaluation": changed_spec})))
        window //= 2
    return found
