"""early_exit: logits of the first blocks, blocks that samples skip, thresholds, and what training leaves."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import swift_kv_oracle as oracle
import torch
from captures import capture_once
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits
from compressor.graph.exits.logits import SKIPS
from compressor.graph.model import clone_graph
from compressor.numerics.depth.thresholds import NEVER, choose_giving_up, choose_thresholds, outcome
from compressor.passes.early_exit import EarlyExit
from compressor.passes.rtn import Rtn
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.training.exits.layer_skip import SkippingGraph, active_exits, dropout_rate, exit_shares
from compressor.training.exits.measure import head_cost, measure_exits

SAMPLES = random_samples(97, 16)
IDS = torch.randint(0, 97, (3, 12), generator=torch.Generator().manual_seed(1))
QUICK = EarlyExit(steps=20, batch=4, learning_rate=3e-4, evaluate_every=5, checkpoint_every=5, held_out=0.25)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(oracle.make_llama())


def run(graph: GraphModule, *steps: Pass, ctx: Context | None = None) -> GraphModule:
    return Pipeline(steps, [VerifyStages()]).run(clone_graph(graph), ctx or Context(samples=SAMPLES))


@torch.no_grad()
def without(*gone: int) -> Tensor:
    """Return the logits of the model without some layers."""
    model = oracle.make_llama()
    layers = [layer for number, layer in enumerate(model.model.layers) if number not in gone]
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    return model(IDS, use_cache=False).logits  # type: ignore[no-any-return]


def test_an_exit_is_the_model_of_the_first_blocks(llama: GraphModule) -> None:
    nodes = str(llama.graph)
    found = SkippingGraph(llama, (), (1, 3, 5), 0.0, 0)(IDS)
    expected = [without(1, 2, 3, 4), without(3, 4), without()]
    for rows, wanted in zip((*found.hidden, found.last), (*expected, expected[-1]), strict=True):
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-5)
    assert str(llama.graph) == nodes
    figures = measure_exits(llama, (1, 3), IDS)
    likeliest = [rows.argmax(-1)[:, :-1] for rows in expected]
    assert torch.equal(figures.agrees, torch.stack([row == likeliest[-1] for row in likeliest[:2]]))
    torch.testing.assert_close(figures.confidence[1], expected[1].softmax(-1).amax(-1)[:, :-1], rtol=1e-4, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(expected[1][:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert figures.losses[1] == pytest.approx(float(loss), rel=1e-5)
    assert head_cost(llama) == pytest.approx((97 * 32 + 32) / (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 64), rel=1e-3)


def test_samples_skip_blocks_each_for_itself(llama: GraphModule) -> None:
    """What a sample leaves out is drawn from the seed and the number; rates rise from 0 as 2^(l / (L - 1)) - 1."""
    model = SkippingGraph(llama, (), (3,), 0.9, 7)
    draws = torch.rand(4, 3, generator=torch.Generator().manual_seed(7 * 1_000_003 + 2))
    rates = torch.tensor([0.9 * (2 ** (block / 4) - 1) for block in range(1, 5)])
    skipped = draws < rates[:, None]
    assert skipped.any(0).sum() > 1 and not skipped.all(), "else nothing is compared"
    found = model(IDS, number=2)
    for sample in range(3):
        gone = [block for block in range(1, 5) if skipped[block - 1, sample]]
        torch.testing.assert_close(found.last[sample], without(*gone)[sample], rtol=1e-4, atol=1e-5)
        ahead = without(*{*gone, 3, 4})
        torch.testing.assert_close(found.hidden[0][sample], ahead[sample], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(IDS).last, without(), rtol=1e-4, atol=1e-5)
    assert [dropout_rate(block, 5, 0.2) for block in (0, 4)] == pytest.approx([0, 0.2])
    assert not any(name.startswith(SKIPS) for name, _ in llama.named_buffers())


def test_shares_and_curricula() -> None:
    assert exit_shares((2, 3), 5, 0.5) == pytest.approx([1.5 / 14.5, 3 / 14.5, 10 / 14.5])
    assert [active_exits("rotational", (1, 2, 3), 4, step, 9) for step in (0, 4)] == [
        [True, False, False],
        [False, True, False],
    ]
    begins = [next(step for step in range(80) if active_exits("gradual", (1, 2, 3), 4, step, 80)[i]) for i in range(3)]
    assert begins == [20, 10, 0]  # a block every steps / (2 L)
    assert active_exits("all", (1, 2), 4, 0, 9) == [True, True]


def test_thresholds_save_what_can_be_saved() -> None:
    generator = torch.Generator().manual_seed(4)
    confidence = torch.rand(2, 60, generator=generator)
    agrees = torch.rand(2, 60, generator=generator) < confidence
    levels = [NEVER, *confidence[0].double().tolist()]
    possible = [
        found for at in levels if (found := outcome(confidence[:1], agrees[:1], (2,), 5, [at])).agreement >= 0.9
    ]
    chosen = choose_thresholds(confidence[:1], agrees[:1], (2,), 5, 0.9)
    assert outcome(confidence[:1], agrees[:1], (2,), 5, chosen).blocks == min(found.blocks for found in possible) < 5
    both = choose_thresholds(confidence, agrees, (2, 4), 5, 0.9)
    best = min(
        found.blocks
        for pair in itertools.product(levels, [NEVER, *confidence[1].double().tolist()])
        if (found := outcome(confidence, agrees, (2, 4), 5, pair)).agreement >= 0.9
    )
    found = outcome(confidence, agrees, (2, 4), 5, both)
    assert found.agreement >= 0.9 and found.blocks <= best + 0.25, "a greedy choice among two"
    assert choose_thresholds(confidence, torch.zeros_like(agrees), (2, 4), 5, 1.0) == (NEVER, NEVER)
    sure, same = torch.tensor([[0.9, 0.2, 0.5], [0.9, 0.8, 0.1]]), torch.tensor([[True] * 3, [False] * 3])
    by_hand = outcome(sure, same, (1, 2), 4, (0.5, 0.5))
    assert by_hand == dataclasses.replace(by_hand, agreement=2 / 3, leaving=(2 / 3, 1 / 3), blocks=4 / 3, heads=4 / 3)


def test_texts_are_given_up_below_the_confidence_of_wrong_ones() -> None:
    generator = torch.Generator().manual_seed(5)
    confidence = torch.rand(4, 20, generator=generator)
    right = torch.rand(4, 20, generator=generator) < confidence
    places = [(text, slice(begin, begin + 3)) for text in range(4) for begin in range(18)]
    windows = [(float(confidence[place].double().mean()), float(right[place].double().mean())) for place in places]
    chosen = choose_giving_up(confidence, right, 3, 0.4)
    below = {at: [share for mean, share in windows if mean < at] for at, _ in windows}
    held = [at for at, shares in below.items() if shares and sum(shares) <= 0.4 * len(shares)]
    assert chosen == pytest.approx(max(held), abs=1e-12)
    assert choose_giving_up(confidence, torch.ones_like(right), 3, 0.3) == 0.0


def test_exits_learn_and_a_killed_run_ends_with_the_same_bits(llama: GraphModule, tmp_path: Path) -> None:
    contexts: list[Context] = []

    def train(ctx: Context) -> GraphModule:
        contexts.append(ctx)
        return Pipeline([QUICK]).run(clone_graph(llama), ctx)

    found = whole_and_resumed(train, tmp_path, 12, samples=SAMPLES)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert found[0].keys() == dict(llama.named_parameters()).keys(), "nothing is added, and no mask stays"
    assert contexts[0].notes == contexts[2].notes
    said = [note for note in contexts[0].notes if "after 3 of 5 blocks, on held-out" in note]
    before, now = (float(text.split(",")[0].split(";")[0]) for text in said[0].split("loss ")[1].split(", now "))
    assert before != now


def test_what_a_bundle_is_told(llama: GraphModule) -> None:
    graph = run(llama, EarlyExit(exits=(2, 3), steps=0, agreement=0.0, action="both", hopeless=1.0, window=2))
    told = graph.meta["model"].exits
    assert told.blocks == (2, 3) and told.thresholds[0] <= 1 and told.give_up > 0 and told.window == 2
    torch.testing.assert_close(GraphLogits(graph)(IDS.numpy()), without(), rtol=1e-4, atol=1e-5)
    stops = run(llama, EarlyExit(steps=0, action="stop")).meta["model"].exits
    assert stops.blocks == (3,) and stops.thresholds == (NEVER,)
    behind = run(llama, Rtn("W8A8"), EarlyExit(steps=0)).meta["model"].exits
    assert behind.blocks == (3,)
    drafts = Context(samples=SAMPLES)
    assert run(llama, EarlyExit(steps=0, action="draft"), ctx=drafts).meta["model"].exits is None
    assert any("after 3 of 5 blocks, on held-out samples: agreement" in note for note in drafts.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exits": 5}, "exits 5: between the model's 5 blocks there are 4"),
        ({"exits": (2, 5)}, "5 blocks in front of one: the model has 5"),
        ({"exits": (3, 3)}, "numbers of blocks that rise"),
        ({"exits": 0}, "give a number from 1"),
        ({"agreement": 1.5}, "agreement 1.5 is not a share"),
        ({"dropout": 1.0}, "dropout 1 is not a probability"),
        ({"window": 0}, "window 0 is not"),
        ({"exit_scale": 0.0}, "exit_scale 0 is not"),
        ({"steps": -1}, "steps -1"),
    ],
)
def test_what_is_refused(llama: GraphModule, options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EarlyExit(**options).requires(llama, Context(samples=SAMPLES))  # type: ignore[arg-type]


def test_models_without_early_exits_are_refused(llama: GraphModule) -> None:
    kept = run(llama, SwiftKv(steps=0))
    with pytest.raises(UsageError, match="leave swift_kv or this pass out"):
        EarlyExit().requires(kept, Context(samples=SAMPLES))
