"""The pass puzzle: sorted channels, prefixes, scores and sizes against plain references; the pool's law; refusals."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, VOCAB, make
from interrupted_training import whole_and_resumed
from packed_models import drop_weights, random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.executor.pool import LocalPool
from compressor.formats.cache import cache_bytes_per_token
from compressor.formats.format import Format
from compressor.graph.caches import empty_past
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.passes.puzzle import Puzzle
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.structured.architecture import amounts, build, built, find_parts, masked
from compressor.pipeline.structured.architecture_scores import Scores
from compressor.pipeline.structured.architecture_search import rank_removals
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.progress import Silent
from compressor.recipe.recipe import Recipe
from compressor.run.steps import Steps
from compressor.search.scenarios import scenarios
from compressor.search.space import Alternative, alternatives
from compressor.training.candidates import Walk, train_candidates
from compressor.training.settings import Settings, split, spread

SAMPLES = random_samples(VOCAB, 8)
EVERY = {"attention": ["heads:0.5", "kv_heads:1", "linear", "none"], "ffn": ["width:0.5", "linear", "none"]}
FFN = ["width:0.5", "width:0.25"]
SPACE = {"attention": ["none"], "ffn": ["width:0.5", "width:0.25", "none"]}


@functools.cache
def _captured(name: str) -> GraphModule:
    kind, sizes = (DECODERS | ENCODERS)[name]
    model = make(kind, {**sizes, "num_hidden_layers": 3} if name == "Llama" else sizes, name in DECODERS)
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # so that layers and channels are of unlike weight
            if (found := re.search(r"\.(\d)\..*(o_proj|down_proj)\.weight", key)) is not None:
                parameter.mul_(torch.linspace(0.2, 3, parameter.shape[1]) * (4.0, 1.0, 2.0)[int(found[1])])
    return capture_once(model)


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


def sorted_space(graph: GraphModule, wanted: Any = SPACE, ids: Tensor = SAMPLES.ids) -> tuple[Any, Any, Any]:
    parts = find_parts(graph, "puzzle", 0, 0)
    space = alternatives(parts.layers, wanted, 8)
    return parts, space, sort_parts(graph, Context(), parts, space, ids, "activation")


def one_of_each(space: Any) -> list[Alternative]:
    """Return an architecture with a whole, two narrow and two missing sub-layers."""
    return [row[place] for row, place in zip(space, (0, 1, 1, 2, 0, 3), strict=True)]


def test_sorted_channels_compute_the_same_and_the_first_weigh_most() -> None:
    graph = captured()
    expected = logits(graph, SAMPLES.ids)
    parts, _, starts = sorted_space(graph)
    torch.testing.assert_close(logits(graph, SAMPLES.ids), expected, rtol=0, atol=2e-5)
    before = captured()
    for layer, found in zip(parts.layers, starts, strict=True):
        assert set(found) == ({"width 32", "width 16"} if layer.branch.part == "ffn" else set())
        for site in layer.cuts["channels"].readers if found else ():
            old, new = (one.get_parameter(site.weight_name) for one in (before, graph))
            assert not torch.equal(old, new) and torch.equal(old.sort(1).values, new.sort(1).values)


def test_an_architecture_with_zeros_is_the_physical_one() -> None:
    graph = captured()
    parts, space, starts = sorted_space(graph)
    picks = one_of_each(space)
    expected = logits(masked(graph, parts.layers, picks, starts), SAMPLES.ids)
    build(graph, Context(), "puzzle", parts, picks, starts)
    torch.testing.assert_close(logits(graph, SAMPLES.ids), expected, rtol=0, atol=2e-5)
    widths = {site.name: site.in_features for site in linear_sites(graph) if site.name.endswith("down_proj")}
    assert widths == {"model.layers.0.mlp.down_proj": 32, "model.layers.1.mlp.down_proj": 16}
    assert graph.meta["model"].layers == 2


CHOICES = [("query heads 2", "linear", "linear", "width 32", "as_is", "none"),
           ("kv heads 1", "as_is", "none", "linear", "kv heads 1", "as_is")]  # fmt: skip


@pytest.mark.parametrize("name", ["Llama", "Qwen 3"])
@pytest.mark.parametrize("choice", CHOICES, ids=["heads", "groups"])
def test_heads_and_linears_are_what_zeros_compute_and_what_is_counted(name: str, choice: tuple[str, ...]) -> None:
    graph = captured(name)
    for site in linear_sites(graph):
        set_parameter(graph, site.weight_name, graph.get_parameter(site.weight_name).detach().half())
    parts, space, starts = sorted_space(graph, EVERY)
    picks = [next(one for one in row if one.label == label) for row, label in zip(space, choice, strict=False)]
    expected = logits(masked(graph, parts.layers, picks, starts), SAMPLES.ids)
    counted = amounts(graph, parts.layers, space, None)
    places = [row.index(one) for row, one in zip(space, picks, strict=True)]
    build(graph, Context(), "puzzle", parts, picks, starts)
    torch.testing.assert_close(logits(graph, SAMPLES.ids), expected, rtol=0, atol=2e-5)
    found = {m: rest + sum(row[i] for row, i in zip(rows, places, strict=True)) for m, (rows, rest) in counted.items()}
    info = graph.meta["model"]
    assert found["parameters"] == sum(one.numel() for one in graph.parameters())
    assert found["weight_bytes"] == weight_bytes(graph)
    assert found["cache_bytes"] == cache_bytes_per_token(info.cache_format, info.cache_heads, info.head_dim)
    names = {site.name for site in linear_sites(graph)}
    mapped = {layer.mapped.name for layer, one in zip(parts.layers, picks, strict=True) if one.is_linear}
    assert mapped and mapped == {name for name in names if name.endswith(".mapped")}


def test_a_linear_starts_as_the_least_squares_map() -> None:
    graph, ids = captured(), random_samples(VOCAB, 64).ids
    parts, _, starts = sorted_space(graph, EVERY, ids)
    layer, seen = parts.layers[2], []
    for node in (layer.mapped.source, layer.mapped.term):
        copy = clone_graph(graph)
        result = next(one for one in copy.graph.nodes if one.name == node.name)
        output = copy.graph.output_node()
        output.args = ((result, *output.args[0][1:]),)
        copy.recompile()
        seen.append(logits(copy, ids).flatten(0, 1).double())
    x, y = torch.cat([seen[0], torch.ones(len(seen[0]), 1)], 1), seen[1]
    best = float((x @ torch.linalg.lstsq(x, y).solution - y).square().sum())
    weight, bias = (starts[2]["linear"].weights[f"{layer.mapped.name}.{one}"] for one in ("weight", "bias"))
    reached = float((x @ torch.cat([weight, bias[:, None]], 1).double().T - y).square().sum())
    assert best <= reached <= 1.05 * best
    assert starts[2]["linear"].errors[layer.mapped.name] == pytest.approx(reached / float(y.square().sum()), rel=1e-3)


def test_scenarios_are_all_architectures_and_each_depth() -> None:
    _, space, _ = sorted_space(captured(), EVERY)
    free, *depths = scenarios(space, [3, 2])
    assert free.is_free and free.allowed == tuple(tuple(range(len(row))) for row in space)
    assert len(depths) == 3 and not any(one.is_free for one in depths)
    for number, one in enumerate(depths):
        gone = {i for i, places in enumerate(one.allowed) if all(not space[i][place].stays for place in places)}
        assert gone == set([3, 2][:number])
        others = [i for i in range(len(space)) if i not in gone]
        assert all({space[i][place] for place in one.allowed[i]} == {x for x in space[i] if x.stays} for i in others)


def test_sub_layers_go_in_the_order_of_what_the_model_loses() -> None:
    graph = captured()
    parts, space, _ = sorted_space(graph)
    ranked = rank_removals(graph, Context(), "puzzle", parts, space, SAMPLES.ids, "perplexity")
    assert sorted(ranked) == sorted(set(ranked)) and len(ranked) == len(space) - 1
    assert rank_removals(graph, Context(), "puzzle", parts, space, SAMPLES.ids, "none") == []

    def loss(gone: int) -> float:
        picks = [row[-1 if i == gone else 0] for i, row in enumerate(space)]
        other = clone_graph(graph)
        build(other, Context(), "puzzle", find_parts(other, "puzzle", 0, 0), picks, [{}] * len(space))
        rows = logits(other, SAMPLES.ids)[:, :-1].flatten(0, 1).double()
        return float(torch.nn.functional.cross_entropy(rows, SAMPLES.ids[:, 1:].flatten()))

    assert ranked[0] == min(range(len(space)), key=loss)


WIDTHS = {"attention": ["heads:0.5", "linear"], "ffn": ["width:0.75", "width:0.5", "width:0.25", "linear"]}
SETTINGS = Settings(steps=6, batch=4, learning_rate=3e-4, evaluate_every=2, checkpoint_every=2)


def train(graph: GraphModule, ctx: Context) -> tuple[Any, Any, Any]:
    parts, space, starts = sorted_space(graph, WIDTHS)
    ids = torch.randint(3, VOCAB, (40, 8), generator=torch.Generator().manual_seed(1))
    return parts, space, train_candidates(graph, ctx, "puzzle", parts, space, starts, ids, SETTINGS, "")


def test_trained_alternatives_run_as_they_are_built_and_end_no_worse() -> None:
    graph, ctx = captured(), Context(samples=SAMPLES)
    parts, space, starts = train(graph, ctx)
    picks = [row[1 if number % 2 else -1] for number, row in enumerate(space)]  # linears and the widest
    expected = logits(masked(graph, parts.layers, picks, starts), SAMPLES.ids)
    build(graph, ctx, "puzzle", parts, picks, starts)
    torch.testing.assert_close(logits(graph, SAMPLES.ids), expected, rtol=0, atol=2e-5)
    told = re.findall(r"([\w ]+) (\S+) to ([^\s,]+)", " ".join(note.partition("trained:")[2] for note in ctx.notes))
    assert len(told) == sum(len(row) - 1 for row in space)
    assert all(float(last) <= float(first) for _, first, last in told)
    assert sum(float(last) < float(first) for _, first, last in told) > len(told) / 2


def test_a_step_of_training_is_that_of_the_built_graph() -> None:
    """The error of the state behind each sub-layer, before the first step, by whole runs of built graphs."""
    graph = captured()
    parts, space, starts = sorted_space(graph, WIDTHS)
    walk = Walk(graph, Context(), "puzzle", parts, space, starts, SAMPLES.ids)
    for i, label in ((0, "linear"), (0, "query heads 2"), (3, "width 32")):
        one = next(one for one in space[i] if one.label == label)
        model, exit_ = walk.candidates(i), parts.layers[i].branch.exit.name
        states = []
        for each in (space[i][0], one):
            other = clone_graph(graph)
            picks = [row[0] for row in space]
            picks[i] = each
            found = find_parts(other, "puzzle", 0, 0)
            build(other, Context(), "puzzle", found, picks, starts)
            output = other.graph.output_node()
            state = next(node for node in other.graph.nodes if node.name == exit_)
            output.args = ((state, *output.args[0][1:]),)
            other.recompile()
            states.append(logits(other, SAMPLES.ids))
        outputs = dict(zip(model.ran, model(torch.arange(len(SAMPLES.ids))).hidden, strict=True))
        torch.testing.assert_close(model.target(torch.arange(len(SAMPLES.ids))), states[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(outputs[label], states[1], rtol=0, atol=2e-5)
        drawn = {tuple(model.drawn(number)) for number in range(8)}
        assert {(each[0], each[-1]) for each in drawn} == {(model.labels[0], model.labels[-1])}
        assert len(drawn) == max(1, len(model.labels) - 2)


def test_an_interrupted_training_gives_the_same_bits(tmp_path: Path) -> None:
    def run(ctx: Context) -> GraphModule:
        graph = captured()
        for row in train(graph, ctx)[2]:
            for label, start in row.items():
                for name, value in start.weights.items():
                    set_parameter(graph, f"{label.replace(' ', '_')}.{name}", value)
        return graph

    whole, resumed = whole_and_resumed(run, tmp_path, 5, samples=SAMPLES)
    assert len(whole) > 40 and whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_caches_may_have_unlike_heads() -> None:
    """Allow four of six heads in three caches: two layers lose one head each."""
    graph, ctx = captured(), Context(samples=SAMPLES)
    limit = 4 * 2 * 16 * 4
    step = Puzzle(cache_bytes=limit, multiple=8, held_out=0.5, attention=("kv_heads:1",), ffn=(), pool=3, keep_first=0)
    Pipeline([step], [VerifyStages()]).run(graph, ctx)
    info = graph.meta["model"]
    assert (info.layers, info.kv_heads, sorted(info.uneven_heads)) == (3, 2, [1, 1, 2])
    assert cache_bytes_per_token(info.cache_format, info.cache_heads, info.head_dim) == limit
    assert "sub-layers that go:" in "".join(ctx.notes)


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
