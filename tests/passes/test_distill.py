"""distill: its loss by definition, what it brings back after pruning, zeros that stay until they are packed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, make
from packed_models import random_samples
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.errors import CompressorError, UsageError
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import packed_weight
from compressor.graph.sites import linear_sites, packed_sites
from compressor.numerics.sparsity.block_sparsity import of_tiles
from compressor.passes.distill import Distill
from compressor.passes.ffn_prune import FfnPrune
from compressor.passes.magnitude import Magnitude
from compressor.passes.rtn import Rtn
from compressor.passes.skip_layers import SkipLayers
from compressor.passes.sparsegpt import Sparsegpt
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.training.teacher import with_teacher

SAMPLES = random_samples(97, 16)
SCHEME = "W8A16_B16x1@50"
QUICK = Distill(steps=20, batch=4, learning_rate=2e-3, evaluate_every=5, held_out=0.25)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


def run(graph: GraphModule, *steps: Pass) -> tuple[GraphModule, Context]:
    ctx = Context(samples=SAMPLES)
    return Pipeline(steps, [VerifyStages()]).run(clone_graph(graph), ctx), ctx


def losses(ctx: Context) -> tuple[float, float]:
    (note,) = (note for note in ctx.notes if note.startswith("distill"))
    begun, best = (float(note.split(word)[0].split()[-1]) for word in (" at the start", " after step"))
    return begun, best


def test_the_loss_is_the_divergence_of_both_models_predictions(llama: GraphModule) -> None:
    pruned, _ = run(llama, Sparsegpt(SCHEME, pack=False))
    student, objective = with_teacher("distill", pruned, Context(dense=llama), [], 2.0, 0.5)
    logits, streams = [], []
    for graph in (llama, pruned):
        model, _ = with_teacher("distill", graph, Context(dense=llama), [], 2.0, 0.5)
        outputs = model(SAMPLES.ids[:2])
        logits.append(torch.softmax(outputs.last / 2, -1))
        streams.append(outputs.hidden)
    expected = 4 * (logits[0] * (logits[0] / logits[1]).log()).sum(-1).mean()
    assert len(streams[0]) == 4  # behind each attention and each feed-forward network
    for dense, now in zip(*streams, strict=True):
        expected += 0.5 * ((now - dense).norm(dim=-1) / dense.norm(dim=-1)).square().mean() / 4
    torch.testing.assert_close(objective(SAMPLES.ids[:2], student(SAMPLES.ids[:2]), 0), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_it_brings_back_what_pruning_lost_and_zeros_are_packed(llama: GraphModule, hidden: float) -> None:
    step = Distill(**{**vars(QUICK), "hidden": hidden})
    trained, ctx = run(llama, Magnitude(SCHEME, pack=False, refit=False), step)
    begun, best = losses(ctx)
    assert best < 0.95 * begun
    left = {}
    for site in linear_sites(trained):
        blocks = of_tiles(trained.get_parameter(site.weight_name).detach().abs()) > 0
        assert bool((blocks.sum(1) == 32).all()), "half of 64 columns in each tile"
        left[site.name] = blocks
    packed, ctx = run(trained, Magnitude(SCHEME))
    for site in packed_sites(packed):
        blocks = of_tiles(dequantize(packed_weight(packed, site)).abs()) > 0
        assert not bool((blocks & ~left[site.name]).any())
    assert max(record.error for record in ctx.records) < 1e-3, "only rounding to eight bits is left to lose"


def test_hidden_states_are_compared_where_channels_are_gone(llama: GraphModule) -> None:
    pruned, _ = run(llama, FfnPrune(ratio=0.5))
    student, objective = with_teacher("distill", pruned, Context(dense=llama), [], 1.0, 1.0)
    with torch.no_grad():
        assert 0 < float(objective(SAMPLES.ids[:2], student(SAMPLES.ids[:2]), 0)) < 1


class NoAttention(nn.Module):
    """Adds nothing to the residual stream."""

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


@torch.no_grad()
def states(model: Any, blocks: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a Llama's logits and its residual stream behind each attention and each feed-forward network.

    Args:
        blocks: numbers of its blocks in the dense model.
    """
    found: dict[str, Tensor] = {}
    for i, layer in zip(blocks, model.model.layers, strict=True):
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, inputs, i=i: found.update({f"{i}.attention": inputs[0]})
        )
        layer.register_forward_hook(lambda _, __, output, i=i: found.update({f"{i}.ffn": output}))
    return model(SAMPLES.ids[:2], use_cache=False).logits, found


def test_states_are_compared_by_name_where_layers_are_gone() -> None:
    """Against the modules of transformers, without block 1 and the attention of block 2; all states are as wide."""
    kind, sizes = DECODERS["Llama"]
    dense: Any = make(kind, {**sizes, "num_hidden_layers": 4}, True)
    captured = capture_once(dense)
    fewer = copy.deepcopy(dense)
    fewer.model.layers[2].self_attn = NoAttention()
    del fewer.model.layers[1]
    steps = (SkipLayers(layers=1), SkipLayers(layers=1, part="attention"))  # numbers of the blocks that are left
    graph, _ = run(captured, *steps)
    student, objective = with_teacher("distill", graph, Context(dense=captured), [], 1.0, 0.5)
    (own_logits, own), (logits, theirs) = states(fewer, [0, 2, 3]), states(dense, [0, 1, 2, 3])
    places = ["0.attention", "0.ffn", "2.ffn", "3.attention", "3.ffn"]
    expected = (logits.softmax(-1) * (logits.log_softmax(-1) - own_logits.log_softmax(-1))).sum(-1).mean()
    for place in places:
        expected += 0.5 * ((own[place] - theirs[place]).norm(dim=-1) / theirs[place].norm(dim=-1)).square().mean() / 5
    torch.testing.assert_close(objective(SAMPLES.ids[:2], student(SAMPLES.ids[:2]), 0), expected, rtol=1e-4, atol=0)
    _, ctx = run(captured, *steps, Distill(**{**vars(QUICK), "hidden": 1.0}))
    begun, best = losses(ctx)
    assert best < 0.95 * begun


def test_the_dense_model_has_nothing_to_learn(llama: GraphModule) -> None:
    graph, ctx = run(llama, Distill(steps=2))
    assert ": it stays" in ctx.notes[0]
    before = dict(llama.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in graph.named_parameters())


def test_an_encoder_learns_hidden_states() -> None:
    graph = capture_once(make(*ENCODERS["BERT"], False))
    _, ctx = run(graph, FfnPrune(ratio=0.5, refit=False, targets="intermediate.dense"), QUICK)
    begun, best = losses(ctx)
    assert best < begun


def test_bad_input(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="distill: temperature 0 is not above 0"):
        Distill(temperature=0.0)
    with pytest.raises(UsageError, match="distill: hidden -1 is not a weight"):
        Distill(hidden=-1.0)
    with pytest.raises(UsageError, match="an earlier pass has packed every linear"):
        Distill().requires(Rtn("W8A16").run(clone_graph(llama), Context()), Context())
    with pytest.raises(CompressorError, match="distill: runs in a pipeline"):
        Distill().run(clone_graph(llama), Context(samples=SAMPLES))
