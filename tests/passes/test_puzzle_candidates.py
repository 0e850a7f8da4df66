"""Alternatives of an architecture: channels, heads, linears, depth and their training, against plain references."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from searched_models import (
    EVERY,
    SAMPLES,
    captured,
    logits,
    one_of_each,
    sorted_space,
)
from torch.fx import GraphModule

from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.passes.puzzle import Puzzle
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.structured.architecture import amounts, build, find_parts, masked
from compressor.pipeline.structured.architecture_search import rank_removals
from compressor.search.scenarios import scenarios
from compressor.training.candidates import Walk, train_candidates
from compressor.training.settings import Settings


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
