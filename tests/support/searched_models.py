"""Models, samples and spaces of the tests of an architecture search."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from captures import capture_once
from families import DECODERS, ENCODERS, VOCAB, make
from packed_models import random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.graph.caches import empty_past
from compressor.graph.model import clone_graph
from compressor.pipeline.context import Context
from compressor.pipeline.structured.architecture import find_parts
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.search.space import Alternative, alternatives

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
