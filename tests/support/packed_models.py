"""Quantise a captured model by GPTQ on random tokens, and give transformers' model the weights that result."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule
from torch.nn.functional import linear

from compressor.data.text import Samples, tokens_sha256
from compressor.graph.rewrite import set_parameter
from compressor.passes.gptq import Gptq
from compressor.pipeline.context import Context

SCHEME = "W4A16_G32"
_PACKED = torch.ops.compressor.packed_linear.default
_ROUTED = torch.ops.compressor.packed_routed_linear.default


def random_samples(vocab_size: int, length: int) -> Samples:
    """Return tokens to calibrate on."""
    ids = torch.from_numpy(np.random.default_rng(2).integers(3, vocab_size, (8, length)))
    return Samples(ids, ids.flatten(), tokens_sha256(ids), "random tokens")


def drop_weights(graph: GraphModule) -> None:
    """Put the parameters of a graph on the meta device, as a plan sees them."""
    for name, parameter in list(graph.named_parameters()):
        set_parameter(graph, name, parameter.detach().to("meta"))


def heads_of(model: Any) -> list[str]:
    """Return the names of a model's head, which is often tied to its table."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head and head is not None]


def by_gptq(graph: GraphModule, heads: list[str], samples: Samples) -> GraphModule:
    """Quantise all linears but the heads."""
    return Gptq(SCHEME, targets="re:.*", ignore=tuple(heads)).run(graph, Context(samples=samples))


def take_packed_weights(model: Any, graph: Any) -> None:
    """Give the model the weights that the packed ones of a graph stand for; its experts are stacked.

    A linear that is read again and again, and is packed for each call, takes its weights in turn.
    """
    modules, calls = dict(model.named_modules()), dict[Any, list[torch.Tensor]]()
    for node in graph.graph.find_nodes(op="call_function", target=_ROUTED):
        _take_packed_experts(model, graph, node)
    for node in graph.graph.nodes:
        if node.target is not _PACKED:
            continue
        parts = [graph.get_parameter(part.target) for part in node.args[1]]
        columns = node.args[4]
        dense = _PACKED(torch.eye(columns), parts, None, *node.args[3:])  # [in, out]
        module = modules[node.args[1][0].target.rpartition(".")[0].partition("@")[0]]  # @2: read again, shared
        is_turned = type(module).__name__ == "Conv1D"
        with torch.no_grad():
            module.weight.copy_((dense if is_turned else dense.t()).reshape(module.weight.shape))
        calls.setdefault(module, []).append(module.weight.detach().clone())
    for module, weights in calls.items():
        if len(weights) > 1:
            turns = cycle(weights)
            module.forward = lambda x, turns=turns, bias=module.bias: linear(x, next(turns).to(x.dtype), bias)


def _take_packed_experts(model: Any, graph: Any, node: Any) -> None:
    parts = [graph.get_parameter(part.target) for part in node.args[2]]
    name = node.args[2][0].target.rpartition(".")[0]
    is_turned = getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", True)  # Llama 4 states nothing
    for expert, held in enumerate(model.get_parameter(name)):
        dense = _PACKED(torch.eye(node.args[5]), [part[expert] for part in parts], None, *node.args[4:])  # [in, out]
        with torch.no_grad():
            held.copy_(dense if is_turned else dense.t())


def exact(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits, or hidden states, of transformers' model in float64 (float32 where it mixes types)."""
    model.set_experts_implementation("eager")  # others lack float64
    given = {} if mask is None else {"attention_mask": mask.long()}
    with torch.no_grad():
        try:
            out = model.double()(ids, **given)
        except RuntimeError:
            out = model.float()(ids, **given)
    found: torch.Tensor = out.logits if mask is None else out.last_hidden_state
    return found
