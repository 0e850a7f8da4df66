"""Search an architecture within limits: scores and costs of single changes, a programme, and true scores of a pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.host.digests import digest
from compressor.pipeline.context import Context
from compressor.pipeline.resume import cached_tensors
from compressor.pipeline.structured.architecture import Parts, naming
from compressor.pipeline.structured.architecture_scores import Score, Scores
from compressor.pipeline.structured.costs.limits import Costs
from compressor.pipeline.structured.costs.times import Choice, Costing, unit_of
from compressor.pipeline.structured.layer_ranking import choose_layers
from compressor.search.front import Front, Point, with_front
from compressor.search.joint import has_one_format, parts_of_pairs
from compressor.search.programme import Limit, check_reachable, restricted
from compressor.search.scenarios import Scenario
from compressor.search.space import Alternative, Space, Starts, uniform

Depth: TypeAlias = Literal["iterative", "perplexity", "none"]
"""How sub-layers that go together are ranked (:mod:`compressor.pipeline.structured.layer_ranking`); or not at all."""
_TURNS = 12  # of the programme, after each of which a few of its choices are timed


@dataclass(frozen=True)
class Search:
    """Hold what a search is given.

    Attributes:
        pass_name: for messages.
        parts, space, starts: of the graph, whose channels are sorted.
        scores: on held-out samples.
        limits: by measure, but for time.
        latency: a step's largest time, as a share of the whole graph's; None where it is not limited.
        memory: most bytes of activations at once; None where they are not limited.
        fmt: of the blocks' linears, as times are taken; None leaves them dense.
        budgets: further limits of the one measure, as shares of the whole model's.
        scenarios: what each turn of the programme chooses among.
        decides: further plain data that determine the scores, part of their key in the cache.
    """

    pass_name: str
    parts: Parts
    space: Space
    starts: Starts
    scores: Scores
    limits: dict[str, Limit]
    latency: float | None
    memory: float | None
    fmt: Format | None
    budgets: Sequence[float]
    scenarios: Sequence[Scenario]
    decides: Any = None

    def picks(self, choice: Sequence[int]) -> list[Alternative]:
        """Return the alternatives of a choice."""
        return [row[place] for row, place in zip(self.space, choice, strict=True)]


def search(graph: GraphModule, ctx: Context, given: Search, pool: int) -> list[Alternative]:
    """Return what stands in the place of each sub-layer: the best of a pool by its divergence as a whole.

    In the pool are choices of the programme, which differ in two sub-layers at least: up to ``pool`` of each scenario
    that is free, and one of each that names the sub-layers that go; and every architecture within the limits that is
    the same in each layer.  So the choice is never worse than the best of these, on the samples of the scores.
    Further budgets add as many choices each, and all of the latter.  So among budgets that are searched together, a
    larger one never gives a worse choice, whichever of them is the limit.

    Where time is limited, the best of the pool are timed as wholes, and the programme chooses again by what that tells
    of single alternatives, until the best one within the limit has been timed twice, and is within it by the mean.

    Raises:
        UsageError: the limits cannot be met, or time is limited and nothing here tells it.
    """
    costing = Costing(given.pass_name, given.parts.layers, given.space, given.fmt, _decides(ctx, given, "costs"))
    costs = Costs(graph, ctx, costing, given.limits, given.latency, given.memory, given.budgets)
    with naming(given.pass_name):
        check_reachable(costs.limits)  # before candidates are scored
    singles = _singles(graph, ctx, given)
    even = [tuple(one) for one in uniform(given.parts.layers, given.space) if has_one_format(given.picks(one))]
    means, proposed, whole = [[one.mean for one in row] for row in singles], list[Choice](), dict[Choice, Score]()
    for _ in range(_TURNS):
        found = _proposed(given, costs, means, pool, whole)
        proposed += [one for one in dict.fromkeys(found) if one not in proposed]
        found += [one for one in even if given.budgets or costs.within(one)]
        whole |= _wholes(graph, ctx, given, [one for one in dict.fromkeys(found) if one not in whole])
        if not costs.time_best(_ranked(whole)):
            break
    best = costs.best(_ranked(whole))
    ctx.notes.append(_of_scenarios(given, proposed, whole))
    uniforms = [one for one in even if one in whole and costs.within(one)]
    ctx.notes += [*_told(given, unit_of(graph), best, singles, whole, uniforms), *costs.told(best)]
    if given.budgets:
        ctx.fronts.append(_front(given, whole, costs, set(even), best))
    picks = given.picks(best)
    ctx.state = digest(ctx.state, [one.label for one in picks])  # times differ from run to run, and so may choices
    return picks


def _ranked(whole: Mapping[Choice, Score]) -> list[Choice]:
    return sorted(whole, key=lambda one: whole[one].mean)


def _proposed(
    given: Search, costs: Costs, means: Sequence[Sequence[float]], pool: int, known: Collection[Choice]
) -> list[Choice]:
    """Return the programme's choices under the limits, and under each further budget.

    Args:
        known: choices so far; those that turned out to be above a limit are left out.
    Raises:
        UsageError: the limits can be met in no scenario, and no choice is known.
    """
    found = list[Choice]()
    for share, limits in costs.sets():
        above = [one for one in known if not costs.within(one, share)]
        with naming(given.pass_name):
            try:
                found += _in_scenarios(means, limits, given.scenarios, pool, above)
            except UsageError:
                if not known:
                    raise
    return found


def _in_scenarios(
    means: Sequence[Sequence[float]],
    limits: dict[str, Limit],
    scenarios: Sequence[Scenario],
    pool: int,
    above: Sequence[Choice],
) -> list[Choice]:
    """Return the programme's choices in each scenario.

    Raises:
        UsageError: the limits can be met in none of them.
    """
    found, why = list[Choice](), list[UsageError]()
    for scenario in scenarios:
        for _ in range(pool if scenario.is_free else 1):
            try:
                picked = restricted(means, limits, scenario.allowed, found, above)
            except UsageError as error:
                why.append(error)
                break
            if picked is None:
                break
            found.append(tuple(picked))
    if not found and why:
        raise why[0]
    return found


def _of_scenarios(given: Search, proposed: Sequence[Choice], whole: Mapping[Choice, Score]) -> str:
    """Say what the programme's choices reach, by the number of sub-layers that go."""
    best = dict[int, Score]()
    for one in proposed:
        gone = sum(not pick.stays for pick in given.picks(one))
        best[gone] = min(best.get(gone, whole[one]), whole[one], key=lambda score: score.mean)
    told = ", ".join(f"{gone} gone: {best[gone]}" for gone in sorted(best))
    return f"{given.pass_name}: the programme's {len(proposed)} choices as wholes, by sub-layers that go: {told}"


def _front(given: Search, whole: Mapping[Choice, Score], costs: Costs, even: set[Choice], best: Choice) -> Front:
    """Return all architectures that were scored as wholes, by the one measure that is limited."""
    ((measure, limit),) = costs.limits.items()
    points = []
    for one, score in whole.items():
        labels = tuple(pick.label for pick in given.picks(one))
        points.append(Point(costs.of(measure, one), score.mean, score.error, labels, one in even, one == best))
    return Front(measure, limit.unit, limit.sum([0] * len(best)), "kl_divergence", with_front(points))


def _singles(graph: GraphModule, ctx: Context, given: Search) -> list[list[Score]]:
    """Return the score of each alternative alone; those of pairs with a format follow from their parts."""
    pairs = [parts_of_pairs(row) for row in given.space]
    measured = [[i for i in range(len(row)) if i not in known] for row, known in zip(given.space, pairs, strict=True)]
    with ctx.reporter.task("score candidates", sum(map(len, measured))) as task:
        several = []
        for i, places in enumerate(measured):
            for place in places:
                picks = [one[0].plain for one in given.space]  # all others as they are, and not rounded
                picks[i] = given.space[i][place]
                several.append(picks)

        def make() -> dict[str, torch.Tensor]:
            scores = given.scores.all(several, ctx.executor, task, ctx.reporter)
            return {"scores": torch.tensor([[one.mean, one.error] for one in scores], dtype=torch.float64)}

        flat = cached_tensors(graph, ctx, given.pass_name, _decides(ctx, given, "singles"), make)["scores"].tolist()
    rest, found = iter(flat), list[list[Score]]()
    for row, places, known in zip(given.space, measured, pairs, strict=True):
        scores = {place: Score(*next(rest)) for place in places}
        for place, (one, other) in known.items():
            added = scores[one].mean + scores[other].mean - scores[0].mean
            scores[place] = Score(max(0.0, added), math.hypot(scores[one].error, scores[other].error))
        found.append([scores[place] for place in range(len(row))])
    return found


def _wholes(graph: GraphModule, ctx: Context, given: Search, pool: Sequence[Choice]) -> dict[Choice, Score]:
    """Return the score of each architecture of the pool."""
    with ctx.reporter.task("score the pool", len(pool)) as task:
        found = given.scores.all([given.picks(one) for one in pool], ctx.executor, task, ctx.reporter)
    return dict(zip(pool, found, strict=True))


def _decides(ctx: Context, given: Search, what: str) -> list[object]:
    sha256 = None if ctx.samples is None else ctx.samples.sha256
    labels = [[one.label for one in row] for row in given.space]
    held = given.scores.samples
    return [what, sha256, held, labels, ctx.seed, given.decides]


def _told(
    given: Search,
    unit: str,
    best: Choice,
    singles: Sequence[Sequence[Score]],
    whole: Mapping[Choice, Score],
    uniforms: Sequence[Choice],
) -> list[str]:
    """Say what was chosen, layer by layer, and what the pool's others reach."""
    name, notes = given.pass_name, []
    for layer, row, place, scores in zip(given.parts.layers, given.space, best, singles, strict=True):
        alone = f", alone {scores[place]} nats {unit}" if place else ""
        cut = layer.cut(row[place])
        of = "" if cut is None else f" of {cut.family.count}"
        notes.append(f"{name}: {layer.name}: {row[place].label.replace('_', ' ')}{of}{alone}")
    added = sum(scores[place].mean for scores, place in zip(singles, best, strict=True))
    notes.append(
        f"{name}: KL(model || architecture) {whole[best]} nats {unit} on {given.scores.samples} held-out samples; "
        f"scores add up to {added:.4g}; of {len(whole)} architectures that were scored as wholes"
    )
    if uniforms:
        first = min(uniforms, key=lambda one: whole[one].mean)
        notes.append(f"{name}: the best of {len(uniforms)} uniform ones within the limits reaches {whole[first]}")
    return notes


def rank_removals(
    graph: GraphModule, ctx: Context, pass_name: str, parts: Parts, space: Space, ids: torch.Tensor, depth: Depth
) -> list[int]:
    """Return the places of the sub-layers that may go, in the order in which they do: ranked anew after each.

    Args:
        ids: samples that nothing is scored on, int64 [samples, sequence].
    """
    able = [any(not one.stays for one in row) for row in space]
    if depth == "none" or not any(able):
        return []
    layers = [replace(one, is_kept=not can) for one, can in zip(parts.removable, able, strict=True)]

    def remember(gone: Sequence[int], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        sha256 = None if ctx.samples is None else ctx.samples.sha256
        decides = ["depth", sha256, len(ids), ctx.seed, depth, able, [*gone]]
        return cached_tensors(graph, ctx, pass_name, decides, lambda: {"scores": make()})["scores"]

    with ctx.reporter.task("rank sub-layers", 1) as task:
        count = min(sum(able), len(able) - 1)
        found = choose_layers(graph, ids, layers, count, depth, remember, ctx.spill)
        task.advance()
    return [one.layer.number for one in found]
