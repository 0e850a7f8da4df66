"""Blocks and branches: a graph without some computes what the model without those layers does, caches included."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
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
    """A model of four layers, or as many as its kind has in a list of their own."""
    kind, sizes = (DECODERS | ENCODERS | RECURRENT)[name]
    key = next(key for key in ("n_layer", "num_hidden_layers", "n_layers") if key in sizes)
    return make(kind, {**sizes, key: LAYERS}, name not in ENCODERS)


@functools.cache
def _captured(name: str) -> GraphModule:
    return capture(built(name))


def captured(name: str) -> GraphModule:
    return clone_graph(_captured(name))


def layers_of(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the list of layers, and its name there."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == LAYERS:
                return module, name
    raise AssertionError("no list of layers")


def shorter(name: str, gone: list[int]) -> nn.Module:
    """The same model, its layers deleted from the ModuleList and numbered anew: the oracle."""
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


@pytest.mark.parametrize("gone", [[1], [1, 2], [0], [3]], ids=str)
@pytest.mark.parametrize("name", ["Llama, tied", "GPT-2", "GPT-J", "BERT"])
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
