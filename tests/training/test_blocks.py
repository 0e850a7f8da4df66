"""Blocks one by one: against the whole graph trained at one block's place, never worse, gone on to the same bits."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from families import DECODERS, ENCODERS, make
from interrupted_training import whole_and_resumed
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples, tokens_sha256
from compressor.errors import UsageError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.segments import segments
from compressor.graph.sites import linear_sites
from compressor.passes.distill import Distill
from compressor.passes.magnitude import Magnitude
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.progress import Silent
from compressor.training.blocks import last_node, names_by_block
from compressor.training.checkpoints import Checkpoints
from compressor.training.loop import Training
from compressor.training.objectives.losses import hidden_error
from compressor.training.settings import Settings
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.zeros.masks import KeptZeros

IDS = torch.randint(3, 97, (32, 24), generator=torch.Generator().manual_seed(0))
SAMPLES = Samples(IDS, IDS.flatten(), tokens_sha256(IDS), "random tokens")
QUICK = Distill(steps=8, batch=3, learning_rate=5e-3, evaluate_every=2, checkpoint_every=2, by_block=True)
PRUNE = Magnitude("W8A16_B16x1@50", pack=False)


def damaged(family: str, families: dict[str, tuple[str, dict[str, object]]]) -> tuple[GraphModule, GraphModule]:
    """Return a small model, and one with half of its blocks at zero and noise on the others."""
    dense = capture(make(*families[family], family in DECODERS))
    graph = Pipeline([PRUNE]).run(clone_graph(dense), Context(samples=SAMPLES))
    generator = torch.Generator().manual_seed(1)
    for site in linear_sites(graph):
        weight = graph.get_parameter(site.weight_name).detach()
        noise = 1 + 0.5 * torch.randn(weight.shape, generator=generator)
        set_parameter(graph, site.weight_name, weight * noise)
    return dense, graph


def train(dense: GraphModule, graph: GraphModule, ctx: Context) -> GraphModule:
    ctx.samples, ctx.dense = SAMPLES, dense
    return QUICK.run(graph, ctx)


def reference(dense: GraphModule, graph: GraphModule) -> dict[str, Tensor]:
    """Train each block within the whole graph, by its states behind the block, with those in front as trained."""
    settings = Settings(**{field.name: getattr(QUICK, field.name) for field in fields(Settings)})
    names = [name for name, value in graph.named_parameters() if value.dim() == 1 or "embed" not in name]
    for number, part in enumerate(names_by_block(graph, names)[:-1]):
        model, teacher = (
            TrainableGraph(of, part if of is graph else (), [last_node(of, segments(of)[number])])
            for of in (graph, dense)
        )

        def objective(batch: Tensor, outputs: Outputs, step: int, teacher: TrainableGraph = teacher) -> Tensor:
            with torch.no_grad():
                wanted = teacher(batch).hidden
            return hidden_error(outputs.hidden, wanted)

        masks = KeptZeros(model.weights, [name for name in part if model.weights[name].dim() == 2])
        training = Training(model, objective, SAMPLES.ids, settings, masks, Checkpoints(None, "", ""), seed=0)
        with Silent().task("", 1) as task:
            for name, value in training.run(task).items():
                set_parameter(graph, name, value)
    return {name: value.detach() for name, value in graph.named_parameters()}


@pytest.mark.parametrize(("family", "families"), [("Llama", DECODERS), ("BERT", ENCODERS)])
def test_a_block_learns_what_it_would_within_the_whole_graph(family: str, families: dict[str, object]) -> None:
    dense, graph = damaged(family, families)  # type: ignore[arg-type]
    expected = reference(dense, clone_graph(graph))
    ctx = Context()
    found = train(dense, clone_graph(graph), ctx)
    last = set(names_by_block(found, list(expected))[-1])
    changed = 0
    for name, value in found.named_parameters():
        zeros = graph.get_parameter(name) == 0
        assert value.dim() == 1 or not bool(value[zeros].any()), f"{name}: zeros stay"
        if name not in last:
            torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=2e-4, msg=lambda m, n=name: n + m)
            changed += not torch.equal(value, graph.get_parameter(name))
    assert changed > 10
    note = ctx.notes[-1]
    begun, best = ([float(x) for x in part.split(":")[-1].split()] for part in note.split("; of what is kept"))
    assert len(begun) == len(segments(dense)) and all(b <= a for a, b in zip(begun, best, strict=True))
    assert sum(best) < sum(begun), note


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    dense, graph = damaged("Llama", DECODERS)
    found = whole_and_resumed(lambda ctx: train(dense, clone_graph(graph), ctx), tmp_path, 3)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_what_two_blocks_read_stays_and_a_plan_counts_one_block() -> None:
    tied = capture(make(*DECODERS["Llama, tied"], True))
    names = [name for name, _ in tied.named_parameters()]
    parts = names_by_block(tied, names)
    placed = [name for part in parts for name in part]
    assert sorted(set(names) - set(placed)) == ["model.embed_tokens.weight"] and len(placed) == len(set(placed))
    one, whole = (
        step.plan(tied, Context(samples=SAMPLES))[0].working_bytes for step in (QUICK, replace(QUICK, by_block=False))
    )
    assert one < whole / 2


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="distill: by_block compares hidden states alone"):
        Distill(by_block=True, hidden=1.0)
    shared = Distill(by_block=True, targets="lm_head", vectors=False)
    with pytest.raises(UsageError, match="distill: by_block: several blocks read each of the chosen weights"):
        shared.plan(capture(make(*DECODERS["Llama, tied"], True)), Context(samples=SAMPLES))
