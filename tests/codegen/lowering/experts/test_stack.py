"""Stacked experts compute bit by bit what they did one by one, whatever they are stored in."""

from __future__ import annotations

import pytest
import torch
from families import DECODERS, VOCAB, make
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.lowering.experts.stack import as_lowered, has_experts, stack_experts
from compressor.codegen.web.converters.converter import why_unsupported
from compressor.errors import CompressorError
from compressor.export.facts import weight_bytes_per_token
from compressor.graph.caches import empty_caches
from compressor.graph.model import clone_graph, weight_bytes
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context

OPS = torch.ops.compressor
BASE = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def dense() -> GraphModule:
    cls, options = DECODERS["Qwen 3, experts"]
    return capture(make(cls, {**options, "num_hidden_layers": 1}, True))


def logits(graph: GraphModule) -> Tensor:
    ids, info = torch.arange(3, 21).reshape(2, 9) % VOCAB, graph.meta["model"]
    caches = empty_caches(info, 2, 9)
    out: Tensor = graph(ids, torch.arange(9), torch.arange(9), caches[: info.layers], caches[info.layers :])[0]
    return out


def packed(dense: GraphModule, *schemes: tuple[str, str]) -> GraphModule:
    graph = clone_graph(dense)
    for scheme, target in schemes:
        Rtn(scheme, targets=target).run(graph, Context())
    return graph


def test_all_in_one_format(dense: GraphModule) -> None:
    graph = packed(dense, ("W4A16_G32", "Expert"))
    before, stored, names = logits(graph), weight_bytes(graph), dict(graph.named_parameters())
    stack_experts(graph)
    assert torch.equal(logits(graph), before) and weight_bytes(graph) == stored and not has_experts(graph)
    codes = graph.get_parameter(f"{BASE}.down_proj.codes")
    assert torch.equal(codes[2], names[f"{BASE}.down_proj.2.codes"])
    assert not [name for name, _ in graph.named_parameters() if ".down_proj.2." in name]


def test_several_formats_and_dense_ones(dense: GraphModule) -> None:
    graph = packed(dense, ("W4A16_G32", "re:.*(gate_up_proj.[02]|down_proj.1)$"), ("W8A8", "re:.*gate_up_proj.3$"))
    before = logits(graph)
    stack_experts(graph)
    assert torch.equal(logits(graph), before)
    routed = [str(node.target) for node in graph.graph.nodes if "routed" in str(node.target)]
    assert len(routed) == 5 and sum("packed" in target for target in routed) == 3


def test_a_token_reads_its_own_experts(dense: GraphModule) -> None:
    graph = packed(dense, ("W4A16_G32", "Expert"))
    stack_experts(graph)
    parameters = dict(graph.named_parameters())
    of_experts = sum(p.nbytes for name, p in parameters.items() if ".experts." in name)
    table = parameters["model.embed_tokens.weight"]
    rest = sum(p.nbytes for name, p in parameters.items() if ".experts." not in name) - table.nbytes
    assert weight_bytes_per_token(graph) == of_experts * 2 // 4 + rest + table.nbytes // len(table)


def test_the_graph_that_targets_are_asked_about_is_a_copy(dense: GraphModule) -> None:
    lowered = as_lowered(dense)
    assert has_experts(dense) and not has_experts(lowered)
    assert as_lowered(lowered) is lowered
    assert not why_unsupported(dense)
    assert "no kernels for single weights" in why_unsupported(packed(dense, ("W4A16_G32_S0.5", "Expert")))


def test_what_a_pass_left_in_the_place_of_a_linear_is_refused(dense: GraphModule) -> None:
    graph = clone_graph(dense)
    (join, *_) = graph.graph.find_nodes(op="call_function", target=OPS.join_experts.default)
    linear = join.args[1][1]
    with graph.graph.inserting_after(linear):
        half = graph.graph.call_function(torch.ops.aten.mul.Tensor, (linear, 0.5))
    linear.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    with pytest.raises(CompressorError, match="in the place of an expert"):
        stack_experts(graph)
