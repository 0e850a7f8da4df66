"""skip_decode: the function of its definition, whole caches, the search, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import swift_kv_oracle as oracle
import torch
from captures import capture_once
from families import DECODERS, make
from interrupted_training import whole_and_resumed
from packed_models import drop_weights, random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits
from compressor.graph.blocks import find_blocks
from compressor.graph.caches import empty_caches
from compressor.graph.exits.gates import gate_blocks
from compressor.graph.model import clone_graph
from compressor.graph.segments import segments
from compressor.numerics.depth.schedules import block_ends, blocks_at, linear_schedule, mean_blocks
from compressor.passes.early_exit import EarlyExit
from compressor.passes.gptq import Gptq
from compressor.passes.skip_decode import SkipDecode
from compressor.passes.skip_layers import SkipLayers
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.training.exits.depths import candidates, schedule_loss

SAMPLES = random_samples(97, 16)
IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
FALLS = SkipDecode(depths=((0, 5), (4, 4), (9, 2)))


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(oracle.make_llama())


def run(graph: GraphModule, *steps: Pass, ctx: Context | None = None) -> GraphModule:
    return Pipeline(steps, [VerifyStages()]).run(clone_graph(graph), ctx or Context(samples=SAMPLES))


def by_definition(graph: GraphModule, ran: list[set[int]]) -> Tensor:
    """Return logits [B, S, V] token by token, each through its own blocks over caches of the tokens that ran them.

    Args:
        graph: without gates.
        ran: blocks of each token.
    """
    info, found = graph.meta["model"], list[Tensor]()
    caches = empty_caches(info, len(IDS), IDS.shape[1])
    for cache in caches:
        cache.fill_(torch.nan)  # a row that is read unwritten shows
    alone = {}
    for place, blocks in enumerate(ran):
        key = tuple(sorted(blocks))
        if key not in alone:
            ends = [None if block in blocks else 0 for block in range(5)]
            alone[key] = clone_graph(graph)
            gate_blocks(alone[key], ends)
        at = torch.tensor([place])
        clean = [cache if number % 5 in blocks else cache.nan_to_num() for number, cache in enumerate(caches)]
        logits, keys, values = alone[key](IDS[:, place : place + 1], at, torch.tensor([0]), clean[:5], clean[5:])
        found.append(logits)
        for number, rows in enumerate([*keys, *values]):
            if number % 5 in blocks:
                caches[number][:, :, at] = rows
    return torch.cat(found, 1)


def test_each_token_runs_its_blocks_and_no_missing_row_is_read(llama: GraphModule) -> None:
    graph = run(llama, FALLS)
    ran = [{0, 1, 2, 3, 4}] * 4 + [{0, 2, 3, 4}] * 5 + [{0, 4}] * 3
    expected = by_definition(llama, ran)
    assert expected.isfinite().all()
    torch.testing.assert_close(GraphLogits(graph)(IDS.numpy()), expected, rtol=1e-4, atol=1e-5)
    assert graph.meta["model"].depths == (None, 4, 9, 9, None)
    whole = GraphLogits(llama)(IDS.numpy())
    assert torch.equal(GraphLogits(graph)(IDS[:, :4].numpy()), GraphLogits(llama)(IDS[:, :4].numpy()))
    assert not torch.allclose(expected[:, 9:], whole[:, 9:], atol=0.1)


def test_a_block_that_is_left_out_is_no_block_at_all(llama: GraphModule) -> None:
    """Against transformers' model without the layer; and in a family that adds both branches at once."""
    model = oracle.make_llama()
    model.model.layers = torch.nn.ModuleList([layer for i, layer in enumerate(model.model.layers) if i != 1])
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    found = GraphLogits(run(llama, SkipDecode(depths=((0, 4),))))(IDS.numpy())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    both = capture_once(make(*DECODERS["Cohere"], True))
    count = len(find_blocks(both))
    gated = run(both, SkipDecode(depths=((0, count), (6, count - 1)), first=0))
    torch.testing.assert_close(
        GraphLogits(gated)(IDS.numpy())[:, :6], GraphLogits(both)(IDS.numpy())[:, :6], rtol=0, atol=0
    )
    assert len(find_blocks(gated)) == count


def test_other_passes_work_behind_it_and_a_plan_has_the_same_graph(llama: GraphModule) -> None:
    graph = run(llama, FALLS, Gptq("W8A16_G32"))
    assert len(segments(graph)) == len(segments(llama)) and len(find_blocks(graph)) == 5
    found, exact = (GraphLogits(x)(IDS.numpy()) for x in (graph, run(llama, FALLS)))
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 0.1
    shadow = clone_graph(llama)
    drop_weights(shadow)
    FALLS.plan(shadow, Context())
    assert str(shadow.graph) == str(run(llama, FALLS).graph)


def test_schedules() -> None:
    falls = linear_schedule(5, 2, 10, 40)
    exact = [min(5, max(2, 5 - 3 * (position - 10) / 30)) for position in range(60)]
    assert all(abs(blocks_at(falls, position) - depth) <= 0.5 for position, depth in enumerate(exact))
    assert block_ends(((0, 5), (4, 4), (9, 2)), 5, 1) == [None, 4, 9, 9, None]
    assert mean_blocks(((0, 4), (2, 2)), 8) == 2.5
    for schedule in candidates(5, 1, 0.7, 32):
        assert mean_blocks(schedule, 32) <= 3.5 and all(a[1] > b[1] for a, b in pairwise(schedule))


def test_the_search_takes_the_schedule_that_loses_least(llama: GraphModule) -> None:
    ctx = Context(samples=SAMPLES)
    graph = run(llama, SkipDecode(cost=0.8, tried=3), ctx=ctx)
    losses = {s: schedule_loss(llama, s, 1, SAMPLES.ids[:3]) for s in candidates(5, 1, 0.8, 16)}
    best = min(losses, key=losses.__getitem__)
    assert len(losses) > 3 and graph.meta["model"].depths == tuple(block_ends(best, 5, 1))
    assert f"loss on the samples {losses[best]:.4f}" in ctx.notes[0]


def test_training_goes_on_to_the_same_bits(llama: GraphModule, tmp_path: Path) -> None:
    train = SkipDecode(
        depths=FALLS.depths, steps=8, batch=2, learning_rate=3e-4, evaluate_every=4, checkpoint_every=3, held_out=0.25
    )
    found = whole_and_resumed(lambda ctx: Pipeline([train]).run(clone_graph(llama), ctx), tmp_path, 5, samples=SAMPLES)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depths": ((0, 3), (8, 4))}, "they rise from 3 to 4 blocks at position 8"),
        ({"depths": ((0, 6),)}, "6 blocks at position 0: the model has 5, 1 at least run"),
        ({"depths": ((0, 5), (4, 0))}, "0 blocks at position 4"),
        ({"depths": ((0, 5), (4, 4), (4, 3))}, "position 4 stands behind 4"),
        ({"depths": ((2, 5),)}, "begin at 0"),
        ({"depths": ((0, 5), (3, 1)), "first": 2}, "1 blocks at position 3: the model has 5, 2 at least run"),
        ({"cost": 0.5, "first": 5}, "first 5: the model has 5 blocks"),
        ({"cost": 1.5}, "cost 1.5 is not a share"),
        ({}, "give `depths`, or `cost`"),
    ],
)
def test_what_is_refused(llama: GraphModule, options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SkipDecode(**options).requires(llama, Context(samples=SAMPLES))  # type: ignore[arg-type]


def test_what_cannot_be_is_refused(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match=r"cost 0.1: with 1 of 5 blocks at least, 16 positions cost 0.2 or more"):
        run(llama, SkipDecode(cost=0.1))
    gated = run(llama, FALLS)
    for step in (FALLS, EarlyExit(), SkipLayers(remove=1), SwiftKv()):
        with pytest.raises(UsageError, match=r"by skip_decode already|in front of early_exit|leave one of them out"):
            step.requires(gated, Context(samples=SAMPLES))
    with pytest.raises(UsageError, match="do not add to one residual stream"):
        FALLS.requires(
            capture_once(make(*DECODERS["OPT"][:1], {**DECODERS["OPT"][1], "do_layer_norm_before": False}, True)),
            Context(),
        )
