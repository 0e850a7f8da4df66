"""Blocks one by one: against the whole graph trained at one block's place, never worse, gone on to the same bits."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, make
from interrupted_training import whole_and_resumed
from torch import Tensor
from torch.fx import GraphModule

from compressor.data.text import Samples, tokens_sha256
from compressor.errors import UsageError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.segments import cut_at, segments
from compressor.graph.sites import linear_sites
from compressor.passes.distill import Distill
from compressor.passes.magnitude import Magnitude
from compressor.passes.skip_layers import SkipLayers
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.progress import Silent
from compressor.training.blocks import last_node, names_by_block
from compressor.training.checkpoints import Checkpoints
from compressor.training.loop import Training
from compressor.training.objectives.losses import hidden_error
from compressor.training.settings import Settings
from compressor.training.teacher import partners
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.zeros.masks import KeptZeros

IDS = torch.randint(3, 97, (32, 24), generator=torch.Generator().manual_seed(0))
SAMPLES = Samples(IDS, IDS.flatten(), tokens_sha256(IDS), "random tokens")
QUICK = Distill(steps=8, batch=3, learning_rate=5e-3, evaluate_every=2, checkpoint_every=2, by_block=True)
PRUNE = Magnitude("W8A16_B16x1@50", pack=False)


@functools.cache
def small(family: str, layers: int = 2, **sizes: int) -> GraphModule:
    kind, given = (DECODERS | ENCODERS)[family]
    named = {"n_layer" if "n_layer" in given else "num_hidden_layers": layers}
    return capture_once(make(kind, {**given, **named, **sizes}, family in DECODERS))


def damaged(dense: GraphModule, *steps: Pass) -> GraphModule:
    """Return a model with half of its blocks at zero and noise on the others, behind other passes."""
    graph = Pipeline([*steps, PRUNE]).run(clone_graph(dense), Context(samples=SAMPLES))
    generator = torch.Generator().manual_seed(1)
    for site in linear_sites(graph):
        weight = graph.get_parameter(site.weight_name).detach()
        noise = 1 + 0.5 * torch.randn(weight.shape, generator=generator)
        set_parameter(graph, site.weight_name, weight * noise)
    return graph


def train(dense: GraphModule, graph: GraphModule, ctx: Context) -> GraphModule:
    ctx.samples, ctx.dense = SAMPLES, dense
    return QUICK.run(graph, ctx)


def reference(dense: GraphModule, graph: GraphModule, twins: list[int]) -> dict[str, Tensor]:
    """Train each block within the whole graph, by its states behind the block, with those in front as trained.

    Args:
        twins: number of the dense graph's block for each block.
    """
    settings = Settings(**{field.name: getattr(QUICK, field.name) for field in fields(Settings)})
    names = [name for name, value in graph.named_parameters() if value.dim() == 1 or "embed" not in name]
    for number, part in enumerate(names_by_block(graph, names)[:-1]):
        model = TrainableGraph(graph, part, [last_node(graph, segments(graph)[number])])
        teacher = TrainableGraph(dense, (), [last_node(dense, segments(dense)[twins[number]])])

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


LESS = SkipLayers(layers=1)
CASES = [
    ("Llama", 3, (LESS,), [0, 1, 4, 5, 6]),  # an attention or a feed-forward network each, and the head
    ("BERT", 2, (), [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("family", "layers", "steps", "twins"), CASES)
def test_a_block_learns_what_it_would_within_the_whole_graph(
    family: str, layers: int, steps: tuple[Pass, ...], twins: list[int]
) -> None:
    dense = small(family, layers)
    graph = damaged(dense, *steps)
    expected = reference(dense, clone_graph(graph), twins)
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
    assert len(begun) == len(twins) and all(b <= a for a, b in zip(begun, best, strict=True))
    assert sum(best) < sum(begun), note


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    dense = small("Llama")
    graph = damaged(dense)
    found = whole_and_resumed(lambda ctx: train(dense, clone_graph(graph), ctx), tmp_path, 3)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


LEFT = [
    ("Llama", 3, SkipLayers(layers="1-2", part="attention", keep_last=0), [0, 1, 3, 5, 6]),
    ("Llama", 3, SkipLayers(layers=2, keep_last=0), [0, 1, 2, 3, 6]),  # the head's place is the output
    ("GPT-J", 2, SkipLayers(layers=0, part="attention", keep_first=0), [0, 1, 2]),  # half of a sum is left
    ("BERT", 2, SkipLayers(layers=1, keep_last=0), [0, 3]),
]


@pytest.mark.parametrize(("family", "layers", "step", "twins"), LEFT)
def test_counterparts_are_those_of_the_same_names(family: str, layers: int, step: Pass, twins: list[int]) -> None:
    dense = small(family, layers)
    own, theirs = segments(Pipeline([step]).run(clone_graph(dense), Context())), segments(dense)
    assert partners("distill", own, theirs, "") == twins
    for segment, number in zip(own[:-1], twins, strict=False):
        assert {site.name for site in segment.sites} <= {site.name for site in theirs[number].sites}


def test_what_has_no_counterpart_is_refused() -> None:
    llama, bert, albert = small("Llama"), small("BERT"), small("ALBERT")
    narrow, cut = small("Llama", 1, hidden_size=32), segments(llama)
    halves = cut_at(llama, [segment.exit for segment in cut[1:-1:2] if segment.exit is not None])
    fewer = Pipeline([SkipLayers(layers=1, keep_last=0)]).run(clone_graph(albert), Context())
    for own, theirs, message in (
        (segments(bert), cut, "distill: encoder.layer.0.attention.self.query is not in the dense model.*; do"),
        (halves, cut, "around model.layers.0.self_attn.q_proj, the residual stream .* live in other places"),
        (cut, halves, "around model.layers.0.mlp.gate_proj, the residual stream .* live in other places"),
        (segments(narrow), cut, "behind model.layers.0.self_attn.q_proj, the residual stream .* is 32 wide, .* 64; do"),
        (segments(fewer), segments(albert), "query is called 2 times in the dense model and 1 in the compressed one"),
    ):
        with pytest.raises(UsageError, match=message):
            partners("distill", own, theirs, "do")


def test_what_two_blocks_read_stays_and_a_plan_counts_one_block() -> None:
    tied = capture_once(make(*DECODERS["Llama, tied"], True))
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
        shared.plan(capture_once(make(*DECODERS["Llama, tied"], True)), Context(samples=SAMPLES))
