"""Get everything ready that a run needs, and refuse what cannot go well, before any pass works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.backend import Backend, make_backend
from compressor.data.load import load_data
from compressor.errors import DriftError
from compressor.evaluate.quality import GraphLogits
from compressor.export.exchange.beside import BesideBundle, plan_exports
from compressor.graph.model import ModelInfo, clone_graph
from compressor.host.cache import cache_folder
from compressor.host.digests import code_digest, digest, model_fingerprint, tensors_sha256
from compressor.host.machine import cpu_name
from compressor.host.tensor_files import Spill
from compressor.pipeline.context import Context
from compressor.pipeline.segment_cache import SegmentCache
from compressor.plan.checkpoint import PlannedCheckpoint, plan_checkpoint
from compressor.plan.model import Plan
from compressor.plan.passes import PlannedPasses, mark_entries, plan_passes
from compressor.plan.plan import check_plan, plan_graph
from compressor.plan.prices import machine_prices
from compressor.recipe.recipe import Recipe
from compressor.run.clock import Clock
from compressor.run.lock import Lock
from compressor.run.steps import Peaks, Steps
from compressor.version import installed_versions

if TYPE_CHECKING:
    from torch import nn

    from compressor.codegen.target import Target

_LOCKED_DRAFTS: Mapping[str | None, tuple[str, str]] = {
    "self": ("skips", "what drafts leave out"),
    "auto": ("sparse_drafts", "whether drafts skip inputs"),
}
"""Kinds of drafts that measurements choose: the lock's key of the choice, and what it says."""


@dataclass
class Prepared:
    """Hold what a run goes on with, once nothing stands against it.

    Attributes:
        recipe: with the model that was given in place of its own.
        backend: of the target.
        context: of the passes.
        plan: what the run will do and cost.
        checkpoint: how the model is saved beside its bundle; None if the recipe does not ask for it.
        data: what quality is measured on, as :func:`compressor.evaluate.models.bundle_quality` takes it.
        info: about the model as captured.
        lock: of this run, so far.
        threads: None takes the physical cores.
        exports: what the run writes for other programs.
        graph, dense: the captured graph, for the passes and for comparison; None once they are given away.
    """

    recipe: Recipe
    backend: Backend
    context: Context
    plan: Plan
    checkpoint: PlannedCheckpoint | None
    data: Any
    info: ModelInfo
    lock: Lock
    clock: Clock
    threads: int | None
    graph: GraphModule | None
    dense: GraphModule | None
    exports: BesideBundle = field(default_factory=BesideBundle)

    def take_graph(self) -> GraphModule:
        """Give the captured graph away: whoever has it decides how long its weights stay in memory."""
        graph, self.graph = self.graph, None
        assert graph is not None
        return graph

    def dense_graph(self) -> GraphModule:
        """Return the captured graph for comparison."""
        assert self.dense is not None
        return self.dense

    def dense_logits(self) -> GraphLogits:
        """Return the captured graph as evaluations call it."""
        return GraphLogits(self.dense_graph(), spill=self.context.spill)

    def drop_dense_graph(self) -> None:
        """Let the captured graph's memory go."""
        self.dense = None


def prepare(
    recipe: Recipe,
    model: str | Path | nn.Module | None,
    example: tuple[Any, ...] | None,
    dynamic_shapes: Any,
    destination: Path,
    threads: int | None,
    locked: Mapping[str, Any] | None,
    clock: Clock,
) -> Prepared:
    """Capture the model, ask passes and target what they need, read the data, and plan.

    The arguments are those of :func:`compressor.run.job.run_recipe`.

    Raises:
        CompressorError: as for ``run_recipe``: whatever would stop the run later and can be known now.
    """
    if isinstance(model, str):
        recipe, model = recipe.model_copy(update={"model": model}), None
    source = recipe.model_source() if model is None else model
    recipe.check_texts()
    target = recipe.target.build()
    target.check_toolchain()
    backend = make_backend(target, threads)
    results = SegmentCache()
    results.prepare()
    lock = _first_lock(recipe, target, source, locked)
    with clock.stage("capture"):
        graph = capture(source, example, dynamic_shapes=dynamic_shapes, trust_remote_code=recipe.trust_remote_code)
        mark_entries(graph, recipe)
        dense = clone_graph(graph)
        state = _origin(graph, recipe, lock.facts.get("gpu"))
    info: ModelInfo = graph.meta["model"]
    planned = plan_passes(graph, recipe, backend)
    checkpoint = _planned_beside(planned, recipe, source, destination, clock)
    with clock.stage("text"):
        samples, data = load_data(recipe, info)
    _note_short_text(recipe, data, clock)
    here = machine_prices(reporter=clock.reporter)  # measured once and remembered: not part of what the plan predicts
    with clock.stage("plan", shown=False):
        plan = plan_graph(graph, recipe, backend, planned, destination, checkpoint)
    check_plan(plan, recipe.gates)
    clock.reporter.expect({name: left.value for name, left in plan.stages.items() if name not in clock.seconds})
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
        step_seconds=Steps(recipe, threads, clock.reporter),
        peak_bytes=Peaks(recipe),
    )
    return Prepared(recipe, backend, context, plan, checkpoint, data, info, lock, clock, threads, graph, dense)


def _first_lock(recipe: Recipe, target: Target, source: Any, locked: Mapping[str, Any] | None) -> Lock:
    """Lock the setting, and the model if it is here; an id of the hub may have to be fetched first."""
    lock = Lock(locked)
    lock.add_setting(recipe, target)
    if not isinstance(source, str):
        lock.add_model(source, recipe.trust_remote_code)
    lock.check()
    key, what = _LOCKED_DRAFTS.get(recipe.drafts, ("", ""))
    if locked is not None and key and locked.get(key) in (None, []):
        raise DriftError(f"--locked: the lock does not say {what}; run without --locked to make a new one")
    return lock


def _planned_beside(
    planned: PlannedPasses, recipe: Recipe, source: object, destination: Path, clock: Clock
) -> PlannedCheckpoint | None:
    """Check the exports that a recipe asks for, and plan its checkpoint, and say how that will be."""
    plan_exports(recipe, planned.final, destination)
    checkpoint = plan_checkpoint(planned, recipe, source)
    if checkpoint is not None:
        clock.reporter.note(checkpoint.note)
    return checkpoint


def _note_short_text(recipe: Recipe, data: Any, clock: Clock) -> None:
    asked = recipe.evaluation.tokens
    if isinstance(data, Tensor) and recipe.evaluation.kind is not None and len(data) < asked:
        clock.reporter.note(f"evaluation: the text has {len(data)} tokens, of the {asked} asked for")


def _origin(graph: GraphModule, recipe: Recipe, gpu: Mapping[str, str] | None) -> str:
    """Digest all that decides what passes make of this model: itself, code, versions, the CPU, the GPU that trains."""
    info: ModelInfo = graph.meta["model"]
    if info.source is not None:
        model: Any = model_fingerprint(info.source, recipe.trust_remote_code)
    else:
        model = tensors_sha256([*graph.named_parameters(), *graph.named_buffers()])
    return digest(str(graph.graph), model, code_digest(), installed_versions(), cpu_name(), gpu, recipe.seed)
