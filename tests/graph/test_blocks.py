"""Blocks and branches: a graph without some computes what the model without those layers does, caches included."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from encoder_decoders import TEXT
from encoder_decoders import make as make_pair
from families import DECODERS, ENCODERS, LENGTH, RECURRENT, VOCAB, make
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.graph.blocks import Block, find_blocks, remove_branches
from compressor.graph.caches import attention_layers, empty_past
from compressor.graph.model import clone_graph, weight_bytes

LAYERS = 4
IDS = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB


@functools.cache
def built(name: str) -> nn.Module:
    """Make a model of four layers."""
    kind, sizes = (DECODERS | ENCODERS | RECURRENT)[name]
    key = next(key for key in ("n_layer", "num_hidden_layers", "n_layers") if key in sizes)
    return make(kind, {**sizes, key: LAYERS}, name not in ENCODERS)


@functools.cache
def _captured(name: str) -> GraphModule:
    return capture(built(name))


def captured(name: str) -> GraphModule:
    return clone_graph(_captured(name))


def layers_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds the list of layers, and its name there."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == LAYERS:
                return module, name
    raise AssertionError("no list of layers")


def shorter(name: str, gone: list[int]) -> nn.Module:
    """Return the oracle: the same model, its layers deleted from the ModuleList and numbered anew."""
    model = copy.deepcopy(built(name))
    holder, child = layers_of(model)
    kept = [layer for i, layer in enumerate(getattr(holder, child)) if i not in gone]
    for i, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = i
    setattr(holder, child, nn.ModuleList(kept))
    for key in ("num_hidden_layers", "n_layer"):
        if hasattr(model.config, key):
            setattr(model.config, key, len(kept))
    return model


def run(graph: GraphModule, ids: Tensor = IDS) -> Tensor:
    info, position = graph.meta["model"], torch.arange(ids.shape[1])
    with torch.no_grad():
        if info.kind == "encoder":
            found: Any = graph(ids, torch.ones(ids.shape))
        else:
            found = graph(ids, position, position, *empty_past(info, len(ids)))[0]
    return found  # type: ignore[no-any-return]


def expected(model: nn.Module, is_encoder: bool) -> Tensor:
    with torch.no_grad():
        out = model(input_ids=IDS, use_cache=False) if not is_encoder else model(input_ids=IDS)
    return out.last_hidden_state if is_encoder else out.logits  # type: ignore[no-any-return]


def branches(blocks: list[Block], numbers: list[int]) -> list[Any]:
    return [branch for number in numbers for branch in blocks[number].branches]


CASES = [
    ("Llama, tied", [1, 2]),
    ("Llama, tied", [0]),
    ("GPT-2", [1]),
    ("GPT-2", [3]),
    ("GPT-J", [2]),
    ("BERT", [1]),
    ("BERT", [3]),
]


@pytest.mark.parametrize(("name", "gone"), CASES, ids=str)
def test_without_a_block_is_the_model_with_that_layer_deleted(name: str, gone: list[int]) -> None:
    graph = captured(name)
    blocks = find_blocks(graph)
    assert len(blocks) == LAYERS and not any(block.reason for block in blocks)
    assert [[branch.part for branch in block.branches] for block in blocks] == [["attention", "ffn"]] * LAYERS
    remove_branches(graph, branches(blocks, gone))
    oracle = shorter(name, gone)
    torch.testing.assert_close(run(graph), expected(oracle, name in ENCODERS), rtol=1e-4, atol=1e-5)
    kept = {id(parameter): parameter for parameter in oracle.parameters()}
    unread = sum(p.numel() for n, p in oracle.named_parameters() if "pooler" in n)
    assert weight_bytes(graph) == 4 * (sum(p.numel() for p in kept.values()) - unread)
    assert len(find_blocks(graph)) == LAYERS - len(gone)
    if name not in ENCODERS:
        assert graph.meta["model"].layers == len(attention_layers(graph)) == LAYERS - len(gone)


def test_parts_that_are_added_at_once_go_one_by_one() -> None:
    """GPT-J adds attention and network to the stream together: without one the other is added alone."""
    model = copy.deepcopy(built("GPT-J"))
    for module, zeroed in ((model.transformer.h[1].mlp, "fc_out"), (model.transformer.h[2].attn, "out_proj")):
        for parameter in getattr(module, zeroed).parameters():
            nn.init.zeros_(parameter)
    graph = captured("GPT-J")
    blocks = find_blocks(graph)
    (_, network), (attention, _) = blocks[1].branches, blocks[2].branches
    assert network.terms and attention.terms
    remove_branches(graph, [network, attention])
    torch.testing.assert_close(run(graph), expected(model, False), rtol=1e-4, atol=1e-5)
    assert graph.meta["model"].layers == LAYERS - 1


def test_states_of_recurrent_layers_go_with_them() -> None:
    kind, sizes = RECURRENT["Qwen3-Next, dense"]
    graph = capture(make(kind, sizes, True))
    info = graph.meta["model"]
    linear, full = find_blocks(graph)
    assert [branch.part for block in (linear, full) for branch in block.branches] == ["attention", "ffn"] * 2
    for block, left in ((full, (0, len(info.states))), (linear, (1, 0))):
        smaller = clone_graph(graph)
        gone = next(each for each in find_blocks(smaller) if each.index == block.index)
        remove_branches(smaller, gone.branches)
        known = smaller.meta["model"]
        assert (known.layers, len(known.states)) == left
        assert torch.isfinite(run(smaller)).all()


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_an_encoder_decoder_has_two_streams_and_cross_attention_in_one(name: str) -> None:
    """BART's norms stand behind its sums, so that the encoder's last one is what the decoder reads."""
    kind, sizes = TEXT[name]
    sizes = sizes | {key: 3 for key in ("encoder_layers", "num_layers") if key in sizes}
    model = make_pair(kind, sizes)
    graph = capture(model)
    blocks = find_blocks(graph)
    assert [block.stream for block in blocks] == [0, 0, 0, 1, 1]
    crosses = [[branch.crosses for branch in block.branches] for block in blocks]
    assert crosses == [[False] * 2] * 3 + [[False, True, False]] * 2
    remove_branches(graph, branches(blocks, [1, 4]))
    for half, key, number in ((model.get_encoder(), "encoder", 1), (model.get_decoder(), "decoder", 1)):
        del getattr(half, "block" if name == "T5" else "layers")[number], key
    info, position, mask = graph.meta["model"], torch.arange(LENGTH), torch.ones(2, LENGTH)
    with torch.no_grad():
        found = graph(IDS, position, position, *empty_past(info, 2), IDS, mask)[0]
        wanted = model(input_ids=IDS, attention_mask=mask.long(), decoder_input_ids=IDS, use_cache=False).logits
    assert info.layers == 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
