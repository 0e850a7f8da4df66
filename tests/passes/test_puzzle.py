"""The pass puzzle: sorted channels, prefixes, scores and sizes against plain references; the pool's law; refusals."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import DECODERS, ENCODERS, VOCAB, make
from packed_models import drop_weights, random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.executor.pool import LocalPool
from compressor.formats.format import Format
from compressor.graph.caches import empty_past
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.sites import linear_sites
from compressor.passes.puzzle import Puzzle
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.structured.architecture import amounts, build, built, find_parts, masked, sort_parts
from compressor.pipeline.structured.architecture_scores import Scores
from compressor.progress import Silent
from compressor.recipe.recipe import Recipe
from compressor.run.steps import Steps
from compressor.search.space import Alternative, alternatives

SAMPLES = random_samples(VOCAB, 8)
SPACE = {"attention": ["none"], "ffn": ["width:0.5", "width:0.25", "none"]}


@functools.cache
def _captured(name: str) -> GraphModule:
    kind, sizes = (DECODERS | ENCODERS)[name]
    model = make(kind, {**sizes, "num_hidden_layers": 3} if name == "Llama" else sizes, name in DECODERS)
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # so that layers and channels are of unlike weight
            if (found := re.search(r"\.(\d)\..*(o_proj|down_proj)\.weight", key)) is not None:
                parameter.mul_(torch.linspace(0.2, 3, parameter.shape[1]) * (4.0, 1.0, 2.0)[int(found[1])])
    return capture(model)


def captured(name: str = "Llama") -> GraphModule:
    return clone_graph(_captured(name))


@torch.no_grad()
def logits(graph: GraphModule, ids: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1])
    found: Tensor = graph(ids, position, position, *empty_past(graph.meta["model"], len(ids)))[0]
    return found


def divergence(dense: Tensor, other: Tensor) -> float:
    """Over all tokens at once, by PyTorch."""
    p, q = (torch.log_softmax(x.double(), -1).flatten(0, 1) for x in (dense, other))
    return float(torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True))


def sorted_space(graph: GraphModule) -> tuple[Any, Any, Any]:
    parts = find_parts(graph, "puzzle", 0, 0)
    space = alternatives(parts.layers, SPACE, 8)
    return parts, space, sort_parts(graph, Context(), parts, space, SAMPLES.ids, "activation")


def one_of_each(space: Any) -> list[Alternative]:
    """Return an architecture with a whole, two narrow and two missing sub-layers."""
    return [row[place] for row, place in zip(space, (0, 1, 1, 2, 0, 3), strict=True)]


def test_sorted_channels_compute_the_same_and_the_first_weigh_most() -> None:
    graph = captured()
    expected = logits(graph, SAMPLES.ids)
    parts, _, order = sorted_space(graph)
    torch.testing.assert_close(logits(graph, SAMPLES.ids), expected, rtol=0, atol=2e-5)
    for layer, found in zip(parts.layers, order, strict=True):
        assert (found is not None) == (layer.branch.part == "ffn")
        assert found is None or not torch.equal(found.order, torch.arange(layer.channels))
        assert found is None or set(found.order.tolist()) == set(range(layer.channels))


def test_an_architecture_with_zeros_is_the_physical_one() -> None:
    graph = captured()
    parts, space, order = sorted_space(graph)
    picks = one_of_each(space)
    expected = logits(masked(graph, parts.layers, picks, order), SAMPLES.ids)
    build(graph, Context(), "puzzle", parts, picks, order)
    torch.testing.assert_close(logits(graph, SAMPLES.ids), expected, rtol=0, atol=2e-5)
    widths = {site.name: site.in_features for site in linear_sites(graph) if site.name.endswith("down_proj")}
    assert widths == {"model.layers.0.mlp.down_proj": 32, "model.layers.1.mlp.down_proj": 16}
    assert graph.meta["model"].layers == 2


def test_scores_are_the_divergence_of_whole_runs() -> None:
    graph = captured()
    parts, space, order = sorted_space(graph)
    scores, dense = Scores(graph, parts.layers, order, SAMPLES.ids), logits(graph, SAMPLES.ids)
    whole = [row[0] for row in space]
    assert scores.of(whole).mean == 0
    for place, alternative in ((2, 1), (3, 2), (5, 3)):
        picks = [*whole[:place], space[place][alternative], *whole[place + 1 :]]
        expected = divergence(dense, logits(masked(graph, parts.layers, picks, order), SAMPLES.ids))
        assert scores.of(picks).mean == pytest.approx(expected, rel=1e-4, abs=1e-7) and scores.of(picks).error > 0


def test_scores_are_the_same_bits_in_other_processes() -> None:
    graph = captured()
    parts, space, order = sorted_space(graph)
    scores = Scores(graph, parts.layers, order, SAMPLES.ids)
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
    for share in (0.7, 0.8, 0.9):  # nothing that was scored is better than the programme's choice but by interplay
        assert any(0.6 * before < one.cost <= share * before for one in front.points)
    assert any(not one.uniform for one in front.points) and any(one.uniform for one in front.points)


def test_times_add_up_and_limit_the_choice() -> None:
    """With a clock that counts parameters, all that is foreseen is exact."""

    def clock(graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
        return [1e-9 * sum(one.numel() for one in graph.parameters()) for graph in graphs], "counted"

    graph, ctx = captured(), Context(samples=SAMPLES, step_seconds=clock)
    (before,), _ = clock([graph])
    Pipeline([Puzzle(latency=0.8, multiple=8, held_out=0.5)], [VerifyStages()]).run(graph, ctx)
    (after,), _ = clock([graph])
    (said,) = [note for note in ctx.notes if "foreseen" in note]
    foreseen, taken = (float(one) for one in re.search(r"take (\S+) ms, and takes (\S+) ms", said).groups())  # type: ignore[union-attr]
    assert foreseen == taken == pytest.approx(1e3 * after, rel=1e-3) and after <= 0.8 * before
    assert "(counted)" in said


def test_steps_are_timed_on_kernels() -> None:
    recipe = Recipe.from_dict({"model": "reference", "passes": [], "tune": "off"})
    (seconds,), told = Steps(recipe, 1, Silent())([captured()])
    assert 0 < seconds < 1 and told == "measured on this machine, with 40 tokens of context"


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
    ],
)
def test_refusals_before_any_work(name: str, step: Puzzle, message: str) -> None:
    graph = captured(name)
    drop_weights(graph)
    with pytest.raises(UsageError, match=message):
        step.requires(graph, Context())


def test_refusals_of_a_run() -> None:
    with pytest.raises(UsageError, match="give a limit"):
        Puzzle()
    with pytest.raises(UsageError, match="1 sample is held out, and a standard error takes two"):
        Puzzle(parameters=1e6).run(captured(), Context(samples=SAMPLES))
    with pytest.raises(UsageError, match="what a step takes is not known here"):
        Puzzle(latency=0.5, held_out=0.5).run(captured(), Context(samples=SAMPLES))
