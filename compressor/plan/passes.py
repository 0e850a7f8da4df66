"""Ask passes and backend what they need, and what they will do, on a graph without weights: before any work is done.

Each pass rewrites the graph as it will rewrite the real one, so what a later pass or the backend asks of it is asked of
the graph that it will meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from compressor.codegen.lowering.experts.stack import as_lowered
from compressor.errors import CaptureError, RecipeError, UsageError
from compressor.formats.format import Format
from compressor.graph.blocks import find_blocks
from compressor.graph.kinds.sparse_drafts import SPARSE, limit_drafts, may_draft_sparse
from compressor.graph.kinds.token_trees import why_no_trees
from compressor.graph.kinds.upper_planes import PLANES, has_planes
from compressor.graph.model import ModelInfo, clone_graph, weight_bytes
from compressor.graph.parts.cut import why_no_parts
from compressor.graph.rewrite import set_parameter
from compressor.pipeline.context import Context
from compressor.plan.model import PassPlan
from compressor.plan.prices import machine_prices
from compressor.recipe.drafts import ExitSpec
from compressor.recipe.gates import METRICS, is_measured
from compressor.registry import PASSES
from compressor.search.knapsack import require_solver

if TYPE_CHECKING:
    from compressor.codegen.backend import Backend
    from compressor.pipeline.pipeline import Pass
    from compressor.recipe.recipe import Recipe


_LEAST_TOKENS = 64
"""Least length of a calibration sample on which drafts' agreement is measured: a draft stands behind 16 tokens."""
_KINDS = {"decoder": "a decoder", "encoder": "an encoder", "seq2seq": "an encoder-decoder", "module": "a plain module"}


@dataclass(frozen=True)
class PlannedPasses:
    """Hold what the passes of a recipe will do.

    Attributes:
        passes: a plan for each, in order.
        before: the graph before each pass, without weights.
        final: after the last, as it will be lowered.
    """

    passes: tuple[PassPlan, ...]
    before: tuple[GraphModule, ...]
    final: GraphModule


def mark_entries(graph: GraphModule, recipe: Recipe) -> None:
    """State in the facts about a captured model whether its library is to verify drafted tokens.

    Raises:
        RecipeError: this model's tokens cannot be verified, the target has no kernels for that, or no pass makes what
            the drafts need; it names the recipe's line.
    """
    if recipe.speculate is None:
        return
    target = recipe.target.build()
    if not getattr(target, "verifies", False):
        raise recipe.problem(
            ("speculate",), f"the target {recipe.target.name} has no kernels that verify drafted tokens; leave it out"
        )
    kinds: tuple[str, ...] | None = getattr(target, "drafts", None)
    if kinds is not None and recipe.drafts not in kinds:
        name = recipe.target.name
        raise recipe.problem(
            ("speculate",), f"the target {name} has no drafts {recipe.drafts}; take {' or '.join(kinds)}"
        )
    if reason := why_no_trees(graph):
        raise recipe.problem(("speculate",), f"{graph.meta['model'].name}: {reason}; leave it out")
    if recipe.drafts == "heads" and not any(PASSES.name_of(step) == "draft_heads" for step in recipe.passes):
        raise recipe.problem(("speculate",), "heads: the model has none; add the pass draft_heads, which trains them")
    first = None
    if recipe.drafts in ("exit", "self"):
        asked = recipe.speculate.layer if isinstance(recipe.speculate, ExitSpec) else None
        first = max(1, len(find_blocks(graph)) // 2) if asked is None else asked
        first = 0 if recipe.drafts == "self" else first
        if reason := why_no_parts(graph, first):
            raise recipe.problem(("speculate",), f"{graph.meta['model'].name}: {reason}; take another kind of drafts")
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True, first_blocks=first)


def plan_passes(graph: GraphModule, recipe: Recipe, backend: Backend) -> PlannedPasses:
    """Plan all passes on a copy of a captured graph without weights; the graph itself stays as it is.

    Raises:
        RecipeError: a pass or the backend cannot serve this model or these formats; it names the recipe's line.
    """
    meta = _without_weights(graph)
    check_recipe(recipe, graph.meta["model"])
    with _at(recipe, ("target",), ""):
        backend.check(meta)
    context = Context(seed=recipe.seed, target=recipe.target.name, prices=_SecondsByUnit())
    passes: list[PassPlan] = []
    before: list[GraphModule] = []
    for index, step in enumerate(recipe.passes):
        before.append(clone_graph(meta))
        name = PASSES.name_of(step)
        with _at(recipe, ("passes", index, name), name):
            passes.append(_plan_pass(index + 1, step, meta, context, recipe))
            backend.check(meta)
    if meta.meta["model"].first_blocks is not None and meta.meta["model"].stages:
        raise recipe.problem(
            ("speculate",),
            f"{recipe.drafts}: tokens do not run all blocks, so the library is cut there, and cannot be cut for drafts "
            "of its own layers as well; take another kind of drafts, or train exits for drafts alone (early_exit, "
            "`action: draft`)",
        )
    if recipe.drafts == "self":
        _check_self_drafts(recipe, backend)
    if recipe.drafts == SPARSE:
        _check_sparse_drafts(recipe, meta)
    if recipe.speculate == PLANES and not has_planes(meta):
        raise recipe.problem(
            ("speculate",), "no linear's codes lie in two planes; give a pass such a scheme, for example W8A8_P4"
        )
    return PlannedPasses(tuple(passes), tuple(before), as_lowered(meta))


def _check_self_drafts(recipe: Recipe, backend: Backend) -> None:
    """Refuse to choose what drafts leave out where that cannot be measured."""
    reason = ""
    if recipe.calibration is None or recipe.calibration.sequence_length < _LEAST_TOKENS:
        reason = f"they are chosen on calibration text; add `calibration:`, samples of {_LEAST_TOKENS} tokens or more"
    elif not backend.runs_here or not backend.timed or backend.launcher:
        reason = "they are chosen by times, and this machine does not run the kernels by itself"
    if reason:
        raise recipe.problem(("speculate",), f"self: drafts leave parts of the model out; {reason}")
    require_solver()


def _check_sparse_drafts(recipe: Recipe, graph: GraphModule) -> None:
    """Refuse drafts of few inputs where there are none to choose, and store linears as the run will."""
    reason = "thresholds are chosen on calibration text; add `calibration:`" if recipe.calibration is None else ""
    sites = may_draft_sparse(graph)
    if not sites:
        reason = "no linear's format skips inputs; give a pass such a scheme, for example W8A16 or W4A16_G128"
    if reason:
        raise recipe.problem(("speculate",), f"sparse: drafts leave small inputs out; {reason}")
    limit_drafts(graph, {site.name: torch.empty(site.in_features, device="meta") for site in sites})


def check_recipe(recipe: Recipe, info: ModelInfo) -> None:
    """Refuse what the recipe asks of text and gates and this model cannot give.

    Raises:
        RecipeError: names the recipe's line.
    """
    reads_text = info.kind != "module" and not info.hears
    longest = recipe.calibration.sequence_length if recipe.calibration is not None and reads_text else 0
    if 0 < info.max_positions < longest:
        from compressor.data.load import longest_samples

        raise recipe.problem(
            ("calibration", "sequence_length"),
            f"{longest} tokens are more than the {info.max_positions} positions of {info.name}; give at most "
            f"{longest_samples(recipe, info)}",
        )
    for gate in recipe.gates:
        if not is_measured(gate.metric, info.kind, info.hears):
            measured = ", ".join(name for name in METRICS if is_measured(name, info.kind, info.hears))
            what = f"{_KINDS[info.kind]}{' of speech' if info.hears else ''}"
            raise recipe.problem(("gates", gate.metric), f"is not measured on {what}; what is: {measured}")
        needs_dense = METRICS[gate.metric].timing or gate.metric == "peak_rss_bytes"
        if gate.relative and needs_dense and info.unpacked_bytes:
            why = "the dense model's is not measured: PyTorch does not load its checkpoint, which is quantised, alone"
            raise recipe.problem(("gates", gate.metric), f"{why}; give a limit in {gate.metric}'s own unit")


def _plan_pass(index: int, step: Pass, graph: GraphModule, context: Context, recipe: Recipe) -> PassPlan:
    """Ask one pass, which rewrites the graph without weights."""
    name, said = PASSES.name_of(step), len(context.notes)
    step.requires(graph, context)
    samples = 0 if recipe.calibration is None else recipe.calibration.samples
    forwards, timed, is_exact = step.forward_samples(graph, samples), step.timed_graphs(graph), step.plans_sizes(graph)
    planned = step.plan(graph, context)
    sites = tuple(planned or ())
    if recipe.calibration is None and (step.runs_samples or step.training or any(site.needs for site in sites)):
        scales = next((s.format for s in sites if s.format and Format.parse(s.format).has_input_scale), "")
        context.calibration(name, scales and f"stored scales of {scales}")  # raises, as in the run
    return PassPlan(
        index=index,
        name=name,
        sites=sites,
        weight_bytes=weight_bytes(graph),
        cost_known=planned is not None,
        runs_samples=step.runs_samples,
        notes=tuple(context.notes[said:]),
        training=step.training,
        forward_samples=forwards,
        timed_graphs=timed,
        is_exact=is_exact,
    )


def _without_weights(graph: GraphModule) -> GraphModule:
    """Copy a graph, with parameters on the meta device."""
    meta = clone_graph(graph)
    for name, parameter in list(meta.named_parameters()):
        if not parameter.is_meta:
            set_parameter(meta, name, parameter.detach().to("meta"))
    return meta


@contextmanager
def _at(recipe: Recipe, path: tuple[str | int, ...], name: str) -> Iterator[None]:
    """Say where in the recipe stands what an error is about."""
    try:
        yield
    except (RecipeError, CaptureError):  # the latter is about the model, and names its line
        raise
    except UsageError as error:
        raise recipe.problem(path, str(error).removeprefix(f"{name}: ")) from error


class _SecondsByUnit(Mapping[str, float]):
    """Seconds by unit of work; the machine is measured when the first of them is asked for."""

    def __getitem__(self, unit: str) -> float:
        return machine_prices().seconds[unit]

    def __iter__(self) -> Iterator[str]:
        return iter(machine_prices().seconds)

    def __len__(self) -> int:
        return len(machine_prices().seconds)
