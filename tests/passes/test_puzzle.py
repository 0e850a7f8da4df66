"""The pass puzzle: scores and sizes against plain references; the pool's law; limits and times; refusals."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packed_models import drop_weights
from searched_models import (
    FFN,
    SAMPLES,
    captured,
    divergence,
    logits,
    one_of_each,
    sorted_space,
)
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.executor.pool import LocalPool
from compressor.formats.format import Format
from compressor.graph.model import clone_graph, weight_bytes
from compressor.passes.puzzle import Puzzle
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.structured.architecture import amounts, build, built, find_parts, masked
from compressor.pipeline.structured.architecture_scores import Scores
from compressor.progress import Silent
from compressor.recipe.recipe import Recipe
from compressor.run.steps import Steps
from compressor.training.settings import split, spread


def test_scores_are_the_divergence_of_whole_runs() -> None:
    graph = captured()
    parts, space, starts = sorted_space(graph)
    scores, dense = Scores(graph, parts.layers, starts, SAMPLES.ids), logits(graph, SAMPLES.ids)
    whole = [row[0] for row in space]
    assert scores.of(whole).mean == 0
    for place, alternative in ((2, 1), (3, 2), (5, 3)):
        picks = [*whole[:place], space[place][alternative], *whole[place + 1 :]]
        expected = divergence(dense, logits(masked(graph, parts.layers, picks, starts), SAMPLES.ids))
        assert scores.of(picks).mean == pytest.approx(expected, rel=1e-4, abs=1e-7) and scores.of(picks).error > 0


def test_scores_are_the_same_bits_in_other_processes() -> None:
    graph = captured()
    parts, space, starts = sorted_space(graph)
    scores = Scores(graph, parts.layers, starts, SAMPLES.ids)
    several = [one_of_each(space), [row[0] for row in space], [*(row[0] for row in space[:5]), space[5][2]]]
    with LocalPool(2) as pool:
        assert scores.all(several, pool, Silent(), Silent()) == [scores.of(picks) for picks in several]


@pytest.mark.parametrize("scheme", [None, "W8A16"])
def test_amounts_are_those_of_the_built_graph(scheme: str | None) -> None:
    graph = captured()
    parts, space, _ = sorted_space(graph)
    picks = one_of_each(space)
    fmt = None if scheme is None else Format.parse(scheme)
    counted = amounts(graph, parts.layers, space, fmt)
    places = [row.index(one) for row, one in zip(space, picks, strict=True)]
    found = {
        name: rest + sum(row[place] for row, place in zip(rows, places, strict=True))
        for name, (rows, rest) in counted.items()
    }
    result = built(graph, "puzzle", picks, fmt)
    assert found["weight_bytes"] == weight_bytes(result)
    assert found["cache_bytes"] == 2 * counted["cache_bytes"][0][0][0]
    if fmt is None:
        assert found["parameters"] == sum(one.numel() for one in result.parameters())


def test_the_choice_is_within_its_limits_and_no_worse_than_a_uniform_one() -> None:
    graph, ctx = captured(), Context(samples=SAMPLES)
    before = sum(one.numel() for one in graph.parameters())
    step = Puzzle(parameters=0.75 * before, cache_bytes=512, multiple=8, held_out=0.5, ffn=("width:0.5", "width:0.25"))
    result = Pipeline([step, Rtn("W8A16", ignore=("lm_head",))], [VerifyStages()]).run(graph, ctx)
    assert result.meta["model"].layers == 2 and "the attention of model.layers.1: none" in "".join(ctx.notes)
    told = "\n".join(ctx.notes)
    chosen, best = (
        float(re.search(pattern, told)[1])  # type: ignore[index]
        for pattern in (r"\|\| architecture\) (\S+) ±", r"uniform ones within the limits reaches (\S+) ±")
    )
    assert 0 < chosen <= best
    assert len({record.site for record in ctx.records if record.pass_name == "puzzle"}) >= 5


def test_several_budgets_give_a_front() -> None:
    graph, ctx = captured(), Context(samples=SAMPLES)
    before = sum(one.numel() for one in graph.parameters())
    step = Puzzle(parameters=0.8 * before, multiple=8, held_out=0.5, budgets=(0.9, 0.7))
    Pipeline([step]).run(graph, ctx)
    (front,) = ctx.fronts
    assert (front.measure, front.whole, front.points[-1].score) == ("parameters", before, 0.0)
    (built,) = [one for one in front.points if one.chosen]
    assert built.cost == sum(one.numel() for one in graph.parameters()) <= 0.8 * before
    assert built.score == min(one.score for one in front.points if one.cost <= 0.8 * before) > 0
    assert any(not one.uniform for one in front.points) and any(one.uniform for one in front.points)


def test_no_choice_is_worse_than_a_uniform_one_or_than_that_of_a_smaller_budget() -> None:
    """Uniform architectures are counted and scored here by building each, whatever the search did."""
    graph, (held, fitted) = captured(), split(SAMPLES.ids, 0.5, 0)
    before = sum(one.numel() for one in graph.parameters())
    _, space, starts = sorted_space(graph, {"attention": ["none"], "ffn": FFN}, fitted)
    even = list[tuple[int, float]]()
    for gone, width in itertools.product((False, True), (None, "width 32", "width 16")):
        labels = ["as_is", width, *(["none"] if gone else ["as_is"]), width, "as_is", width]  # both ends keep theirs
        picks = [next((one for one in row if one.label == x), row[0]) for row, x in zip(space, labels, strict=True)]
        other = clone_graph(graph)
        build(other, Context(), "puzzle", find_parts(other, "puzzle", 0, 0), picks, starts)
        count = sum(one.numel() for one in other.parameters())
        even.append((count, divergence(logits(graph, held), logits(other, held))))
    chosen, shares = list[float](), (0.75, 0.85, 0.95)
    for share in shares:
        ctx, others = Context(samples=SAMPLES), tuple(one for one in shares if one != share)
        options: dict[str, Any] = {"ffn": tuple(FFN), "importance": "activation", "budgets": others}
        Pipeline([Puzzle(parameters=share * before, multiple=8, held_out=0.5, **options)]).run(captured(), ctx)
        (found,) = [one for one in ctx.fronts[0].points if one.chosen]
        within = [score for count, score in even if count <= share * before]
        assert within and found.cost <= share * before and found.score <= min(within) * (1 + 1e-4) + 1e-7
        chosen.append(found.score)
    assert chosen == sorted(chosen, reverse=True) and chosen[-1] < chosen[0]


@pytest.mark.parametrize(
    "options", [{}, {"attention": ("heads:0.5", "kv_heads:1", "linear"), "ffn": ("linear",), "steps": 2, "batch": 2}]
)
def test_times_add_up_and_limit_the_choice(options: dict[str, Any]) -> None:
    """With a clock that counts parameters, all that is foreseen is exact."""

    def clock(graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
        return [1e-9 * sum(one.numel() for one in graph.parameters()) for graph in graphs], "counted"

    graph, ctx = captured(), Context(samples=SAMPLES, step_seconds=clock)
    (before,), _ = clock([graph])
    Pipeline([Puzzle(latency=0.8, multiple=8, held_out=0.5, **options)], [VerifyStages()]).run(graph, ctx)
    (after,), _ = clock([graph])
    (said,) = [note for note in ctx.notes if "foreseen" in note]
    foreseen, taken = (float(one) for one in re.search(r"take (\S+) ms, and takes (\S+) ms", said).groups())  # type: ignore[union-attr]
    assert foreseen == taken == pytest.approx(1e3 * after, rel=1e-3) and after <= 0.8 * before
    assert "(counted)" in said


def test_steps_are_timed_on_kernels() -> None:
    recipe = Recipe.from_dict({"model": "reference", "passes": [], "tune": "off"})
    (seconds,), told = Steps(recipe, 1, Silent())([captured()])
    assert 0 < seconds < 1 and told == "measured on this machine, with 52 tokens of context"


def test_what_a_search_takes_is_foreseen() -> None:
    timed = list[int]()

    def clock(graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
        timed.append(len(graphs))
        return [1.0] * len(graphs), "counted"

    graph, step = captured(), Puzzle(latency=0.5, multiple=8, held_out=0.5)
    foreseen, alike = step.timed_graphs(graph), Puzzle(parameters=1e5).timed_graphs(graph)
    with pytest.raises(UsageError, match="latency"):  # nothing is quicker by this clock
        step.run(graph, Context(samples=SAMPLES, step_seconds=clock))
    assert foreseen == timed[0] + 5 * 8 and alike == 0
    few = Puzzle(latency=0.5, multiple=8, samples=8)
    assert few.forward_samples(graph, 800) == few.forward_samples(graph, 8) < step.forward_samples(graph, 800)


@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        ("BERT", Puzzle(parameters=1e4), "is not a decoder"),
        ("Llama", Puzzle(parameters=1e4, attention=(), ffn=()), "search space is empty"),
        ("Llama", Puzzle(parameters=1e4, attention=(), ffn=("width:0.5",), multiple=64), "it stays whole"),
        ("Llama", Puzzle(parameters=10), "parameters of at most 10 cannot be met: .* has"),
        ("Llama", Puzzle(weight_bytes="1 kB"), "weight_bytes of at most 1000 cannot be met"),
        ("Llama", Puzzle(parameters=1e5, budgets=(0.01,)), "parameters for the budget 0.01 of at most .* has"),
        ("Llama", Puzzle(parameters=1e6, ffn=("widht:0.5",)), "alternative 'widht' is unknown; nearest: width"),
        ("Llama", Puzzle(parameters=1e6, ffn=("width:2",)), "give a share"),
        ("Llama", Puzzle(parameters=1e6, attention=("heads:1",)), "heads:1: give a share of the query heads"),
        ("Llama", Puzzle(parameters=1e6, attention=("kv_heads:0.5",)), "give a number of heads of keys from 1"),
        ("Llama", Puzzle(parameters=1e6, attention=("linear:2",)), "takes nothing behind its name"),
        ("GPT-2", Puzzle(parameters=1e6, attention=("heads:0.5",), ffn=()), "no groups of query heads that can lose"),
    ],
)
def test_refusals_before_any_work(name: str, step: Puzzle, message: str) -> None:
    graph = captured(name)
    drop_weights(graph)
    with pytest.raises(UsageError, match=message):
        step.requires(graph, Context())


def test_some_samples_are_spread_over_all() -> None:
    ids = torch.arange(10)[:, None].expand(10, 3)
    assert spread(ids, 4, "puzzle")[:, 0].tolist() == [0, 2, 5, 7] and torch.equal(spread(ids, 10, "puzzle"), ids)
    assert torch.equal(spread(ids, 0, "puzzle"), ids)


def test_refusals_of_a_run() -> None:
    with pytest.raises(UsageError, match="give a limit"):
        Puzzle()
    with pytest.raises(UsageError, match=f"samples 99: the calibration has {len(SAMPLES.ids)}; raise its `samples`"):
        Puzzle(parameters=1e6, samples=99).run(captured(), Context(samples=SAMPLES))
    with pytest.raises(UsageError, match="steps 0 or samples -1 is below 0"):
        Puzzle(parameters=1e6, samples=-1)
    with pytest.raises(UsageError, match="1 sample is held out, and a standard error takes two"):
        Puzzle(parameters=1e6).run(captured(), Context(samples=SAMPLES))
    with pytest.raises(UsageError, match="what a step takes is not known here"):
        Puzzle(latency=0.5, held_out=0.5).run(captured(), Context(samples=SAMPLES))
