"""draft_heads: its loss and its figures by definition, what it learns, what it leaves alone, what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from captures import capture_once
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from tiny_models import DECODERS, build
from torch.fx import GraphModule

from compressor.errors import RecipeError, UsageError
from compressor.graph.kinds.draft_heads import add_heads
from compressor.graph.model import clone_graph
from compressor.passes.draft_heads import DraftHeads
from compressor.passes.rtn import Rtn
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.plan.passes import mark_entries
from compressor.recipe.recipe import Recipe
from compressor.training.objectives.heads import agreement, heads_loss
from compressor.training.settings import split
from compressor.training.trainable import TrainableGraph

SAMPLES = random_samples(97, 12)
QUICK = DraftHeads(heads=2, width=16, steps=12, evaluate_every=4, checkpoint_every=4, held_out=0.25, learning_rate=1e-2)


@pytest.fixture(scope="module")
def plain() -> GraphModule:
    graph = capture_once(build(DECODERS["llama"]()))
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True)
    return graph


def run(graph: GraphModule, *steps: Pass) -> tuple[GraphModule, Context]:
    ctx = Context(samples=SAMPLES)
    return Pipeline(steps, [VerifyStages()]).run(clone_graph(graph), ctx), ctx


def test_the_loss_is_the_divergence_from_the_model_s_next_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    drafts, logits = torch.randn(2, 5, 3, 7, generator=generator), torch.randn(2, 5, 7, generator=generator)
    losses = []
    for head in (1, 2, 3):
        rows = []
        for b in range(2):
            for t in range(5 - head):  # head i says at t what the model says at t + i
                p, q = logits[b, t + head].double().softmax(0), drafts[b, t, head - 1].double().softmax(0)
                rows.append(float((p * (p / q).log()).sum()))
        losses.append(sum(rows) / len(rows))
    assert float(heads_loss(drafts, logits)) == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_it_learns_and_says_how_often_heads_are_right(plain: GraphModule) -> None:
    trained, ctx = run(plain, QUICK)
    loss, *figures = ctx.notes
    begun, best = (float(loss.split(word)[0].split()[-1]) for word in (" at the start", " after step"))
    assert best < 0.99 * begun
    assert [record.site for record in ctx.records] == ["draft_heads.up", "draft_heads.0.down", "draft_heads.1.down"]
    assert [record.bytes_after for record in ctx.records] == [4 * 2 * 16 * 128, 4 * 16 * 64, 4 * 16 * 64]
    before = dict(plain.named_parameters())
    kept = {name: value for name, value in trained.named_parameters() if name in before}
    assert kept.keys() == before.keys() and all(torch.equal(value, before[name]) for name, value in kept.items())
    model = TrainableGraph(trained, (), [trained.graph.output_node().args[0][-1]])  # type: ignore[index, list-item]
    held_out, _ = split(SAMPLES.ids, QUICK.held_out, 0)
    outputs = model(held_out)
    for head, (found, note) in enumerate(zip(agreement(model, held_out, 2, (1, 4)), figures, strict=True), 1):
        hits = [0, 0]
        places = [(b, t) for b in range(len(held_out)) for t in range(12 - head)]
        for b, t in places:
            order = outputs.hidden[0][b, t, head - 1].argsort(descending=True)[:4].tolist()
            token = int(outputs.last[b, t + head].argmax())
            hits = [hits[0] + (token == order[0]), hits[1] + (token in order)]
        assert found == [count / len(places) for count in hits]
        assert note == (
            f"draft_heads: head {head}: the model's likeliest token is its own in {found[0]:.1%}, and among its 4 "
            f"likeliest in {found[1]:.1%}, on held-out samples"
        )


def test_a_killed_training_goes_on_to_the_same_bits(plain: GraphModule, tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(lambda ctx: QUICK.run(clone_graph(plain), ctx), tmp_path, 9, samples=SAMPLES)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_what_is_refused(plain: GraphModule) -> None:
    unasked = clone_graph(plain)
    unasked.meta["model"] = dataclasses.replace(plain.meta["model"], speculates=False)
    with pytest.raises(UsageError, match="only drafts read the heads; give `speculate: heads`"):
        QUICK.requires(unasked, Context())
    with pytest.raises(UsageError, match="put the pass in front of those that pack it"):
        QUICK.requires(run(plain, Rtn("W8A8"))[0], Context())
    add_heads(headed := clone_graph(plain), 1, 8)
    with pytest.raises(UsageError, match="put the pass in front of draft_heads"):
        SwiftKv(after=1).requires(headed, Context())
    with pytest.raises(UsageError, match="samples of 12 tokens teach 11 heads nothing"):
        run(plain, dataclasses.replace(QUICK, heads=11))
    for options, reason in (({"heads": 0}, "heads 0"), ({"heads": 16}, "from 1 to 15"), ({"width": 0}, "width 0")):
        with pytest.raises(UsageError, match=reason):
            DraftHeads(**options)
    with pytest.raises(RecipeError, match="speculate: heads: the model has none; add the pass draft_heads"):
        mark_entries(clone_graph(plain), Recipe.from_dict({"passes": [], "speculate": "heads"}))
    mark_entries(clone_graph(plain), Recipe.from_dict({"passes": [{"draft_heads": {}}], "speculate": "heads"}))
    for target, reason in (
        ("cuda", "kernels that verify"),
        ("webgpu", "drafts heads"),
        ("wasm", "kernels that verify"),
    ):
        with pytest.raises(RecipeError, match=f"the target {target} has no {reason}"):
            recipe = {"passes": [{"draft_heads": {}}], "speculate": "heads", "target": target}
            mark_entries(clone_graph(plain), Recipe.from_dict(recipe))
