"""Heads in a decoder's graph: what they compute, that they leave the model as it is, and how they are cut from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from captures import capture_once
from tiny_models import DECODERS, build, quantized
from torch import Tensor
from torch.fx import GraphModule

from compressor.codegen.lowering.entries import entries
from compressor.errors import VerificationError
from compressor.graph.caches import empty_past
from compressor.graph.kinds.draft_heads import (
    CannotHead,
    add_heads,
    giving_hidden,
    head_weights,
    heads_graph,
    without_heads,
)
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.verify.independence.check import check_independence

HEADS, WIDTH = 3, 16
FIRST = "model.layers.0.self_attn.q_proj"
IDS = torch.randint(97, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plain() -> GraphModule:
    graph = capture_once(build(DECODERS["llama"]()))
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True)
    return graph


@pytest.fixture(scope="module")
def graph(plain: GraphModule) -> GraphModule:
    headed, generator = clone_graph(plain), torch.Generator().manual_seed(1)
    for name in add_heads(headed, HEADS, WIDTH):
        set_parameter(headed, name, torch.randn(headed.get_parameter(name).shape, generator=generator) / 5)
    return headed


def run(graph: GraphModule, ids: Tensor = IDS) -> tuple[Tensor, ...]:
    position = torch.arange(ids.shape[1])
    with torch.no_grad():
        found: tuple[Tensor, ...] = graph(ids, position, position, *empty_past(graph.meta["model"], len(ids)))
    return found


def test_heads_read_the_hidden_state_and_the_token_behind_it(plain: GraphModule, graph: GraphModule) -> None:
    logits, hidden, *_ = run(giving_hidden(graph))
    drafts = run(graph)[-1]
    assert drafts.shape == (2, 7, HEADS, 97)
    weights = {name: value.detach() for name, value in graph.named_parameters()}
    e = weights["model.embed_tokens.weight"][IDS.roll(-1, 1)]
    inner = torch.nn.functional.silu(torch.cat([hidden, e], -1) @ weights["draft_heads.up.weight"].T)
    last = weights[linear_sites(plain)[-1].weight_name]
    torch.testing.assert_close(hidden @ last.T, logits, rtol=1e-5, atol=1e-5)
    for head in range(HEADS):
        own = inner[..., head * WIDTH : (head + 1) * WIDTH] @ weights[f"draft_heads.{head}.down.weight"].T
        torch.testing.assert_close(drafts[:, :, head], own @ last.T, rtol=1e-5, atol=1e-5)
    alone = heads_graph(graph)(hidden[:1], IDS[:1].roll(-1, 1))
    torch.testing.assert_close(alone, run(graph, IDS[:1])[-1], rtol=1e-5, atol=1e-5)  # products of other shapes


def test_the_model_itself_stays_as_it_is(plain: GraphModule, graph: GraphModule) -> None:
    left = without_heads(graph)
    assert str(left.graph) == str(plain.graph) and left.meta["model"] == plain.meta["model"]
    assert without_heads(plain) is plain
    assert {name for name, _ in left.named_parameters()} == {name for name, _ in plain.named_parameters()}
    assert torch.equal(run(graph)[0], run(plain)[0]) and torch.equal(run(left)[0], run(plain)[0])
    assert len(run(left)) == len(run(plain)) == len(run(graph)) - 1
    heads, verify, main = entries(graph)
    assert [(e.name, e.returned) for e in (heads, verify, main)] == [("heads", None), ("verify", 2), ("main", 1)]
    own, wanted = ([node.format_node() for node in e.program.graph.nodes] for e in (main, entries(plain)[-1]))
    assert sorted(map(str, own)) == sorted(map(str, wanted)), "the order of parameters alone may differ"
    assert not {*heads.program.state_dict} - {*graph.state_dict()} and len(entries(plain)) == 2
    assert check_independence(graph).independent


def test_the_heads_linears_are_linears_as_all_others(graph: GraphModule) -> None:
    names = [site.name for site in linear_sites(graph)]
    assert names[-5:] == ["draft_heads.up", *(f"draft_heads.{i}.down" for i in range(HEADS)), "lm_head@2"]
    assert len(head_weights(graph)) == HEADS + 1
    packed = quantized(clone_graph(graph), "W8A8")
    held = {name for name, _ in packed.named_parameters()}
    assert {"draft_heads.up.codes", "draft_heads.2.down.codes", "lm_head.codes"} <= held and not head_weights(packed)
    assert (run(packed)[-1] - run(graph)[-1]).norm() < 0.1 * run(graph)[-1].norm()
    assert torch.equal(run(packed)[0], run(quantized(clone_graph(without_heads(graph)), "W8A8"))[0])


def test_what_gets_no_heads_is_named(plain: GraphModule, graph: GraphModule) -> None:
    encoder = clone_graph(plain)
    encoder.meta["model"] = dataclasses.replace(plain.meta["model"], kind="encoder")
    for given, reason in (
        (encoder, "is not a decoder"),
        (graph, "has heads already"),
        (quantized(clone_graph(plain), "W8A8"), "lm_head.* is packed already; put the pass in front"),
    ):
        with pytest.raises(CannotHead, match=reason):
            add_heads(clone_graph(given), HEADS, WIDTH)
    odd = clone_graph(graph)
    early, *_, up = (site.node for site in linear_sites(odd) if site.name in (FIRST, "draft_heads.up"))
    with odd.graph.inserting_before(up):  # what a pass could do: heads that read a second tensor of the model
        second = odd.graph.call_function(torch.ops.aten.neg.default, (early,))
        both = odd.graph.call_function(torch.ops.aten.cat.default, ([up.args[0], second], -1))
    second.meta, both.meta = dict(early.meta), dict(up.args[0].meta)  # type: ignore[union-attr]
    up.args = (both, *up.args[1:])
    with pytest.raises(CannotHead, match="not one tensor"):
        heads_graph(odd)
    with pytest.raises(VerificationError, match=r"no entry `heads`: heads read .* put draft_heads behind that pass"):
        entries(odd)
