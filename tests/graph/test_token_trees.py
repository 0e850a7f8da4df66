"""The graph that verifies drafted tokens against the decoder's own, and which models have none."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from captures import capture_once
from tiny_models import DECODERS, build
from token_trees import path_to, random_trees
from torch.fx import GraphModule

from compressor.codegen.lowering.entries import entries
from compressor.codegen.targets.cuda import Cuda
from compressor.codegen.targets.webgpu import Webgpu
from compressor.errors import RecipeError, UsageError, VerificationError
from compressor.graph.caches import empty_caches, empty_past
from compressor.graph.kinds.token_trees import tree_graph, why_no_trees
from compressor.graph.model import clone_graph
from compressor.plan.passes import mark_entries
from compressor.recipe.recipe import Recipe
from compressor.run.cuda import CudaBackend
from compressor.run.web import WebBackend


@pytest.fixture(scope="module")
def graph() -> GraphModule:
    return capture_once(build(DECODERS["mistral"]()))


def with_facts(graph: GraphModule, **facts: Any) -> GraphModule:
    changed = clone_graph(graph)
    changed.meta["model"] = dataclasses.replace(graph.meta["model"], **facts)
    return changed


def test_each_token_has_the_logits_of_its_own_path(graph: GraphModule) -> None:
    """Two sequences, nothing stored: the whole path of a token is in the call, and plain steps read it as a prompt."""
    _, parent, slot, row = trees = random_trees(random.Random(5), (0, 0), (6, 4))
    ids = torch.randint(97, (1, 10), generator=torch.Generator().manual_seed(0))
    caches = empty_caches(graph.meta["model"], 2, 8)
    position, *places = trees
    with torch.no_grad():
        logits = tree_graph(graph)(ids, position, torch.arange(10), *places, *caches)[0]
        for t in range(10):
            path = path_to(parent.tolist(), t)
            count = torch.arange(len(path))
            alone = graph(ids[:, path], count, count[-1:], *empty_past(graph.meta["model"], 1, 8))[0]
            assert (alone[0, 0] - logits[0, t]).abs().max() < 1e-5 * alone.abs().max()
    assert {int(slot[t]) for t in range(10)} == {0, 1} and len(set(row.tolist())) < 10


def test_the_second_program_shares_the_parameters(graph: GraphModule) -> None:
    assert [entry.name for entry in entries(graph)] == ["main"]
    verify, main = entries(with_facts(graph, speculates=True))
    assert (verify.name, main.name) == ("verify", "main") and verify.caches
    assert {*verify.program.state_dict} == {*main.program.state_dict}


def test_models_whose_tokens_cannot_be_verified_are_refused_with_the_line(graph: GraphModule) -> None:
    recipe = Recipe.from_dict({"passes": [], "speculate": "auto"})
    for facts, reason in (
        ({"kind": "seq2seq"}, "an encoder-decoder's tokens also attend to their own source"),
        ({"kind": "encoder"}, "only decoders continue tokens"),
        ({"states": ((2, 3),)}, "recurrent layers keep the state of the last token alone"),
    ):
        changed = with_facts(graph, **facts)
        with pytest.raises(RecipeError, match=rf"recipe: speculate: \w+: .*{reason}"):
            mark_entries(changed, recipe)
        assert changed.meta["model"].speculates is False
    with pytest.raises(VerificationError, match="no entry `verify`"):
        entries(with_facts(graph, states=((2, 3),), speculates=True))
    mark_entries(marked := clone_graph(graph), recipe)
    assert marked.meta["model"].speculates and not graph.meta["model"].speculates
    mark_entries(plain := clone_graph(graph), Recipe.from_dict({"passes": []}))
    assert plain.meta["model"] == graph.meta["model"]
    with pytest.raises(RecipeError, match="speculate: unknown kind of drafts 'tomorrow'"):
        Recipe.from_dict({"passes": [], "speculate": "tomorrow"})


def test_first_layers_that_draft_are_some_of_the_model_s(graph: GraphModule) -> None:
    two = capture_once(build(DECODERS["llama"]()))
    for drafts, first in (("exit", 1), ({"kind": "exit", "layer": 1}, 1), ("auto", None)):
        mark_entries(marked := clone_graph(two), Recipe.from_dict({"passes": [], "speculate": drafts}))
        assert marked.meta["model"].first_blocks == first
    more = Recipe.from_dict({"passes": [], "speculate": {"kind": "exit", "layer": 2}})
    with pytest.raises(RecipeError, match=r"recipe: speculate: .*it has 2 blocks, and a draft has at least one"):
        mark_entries(clone_graph(two), more)
    with pytest.raises(RecipeError, match="it has no two blocks that add to one residual stream"):
        mark_entries(clone_graph(graph), more)  # of one layer
    for wrong in ({"kind": "exit", "layer": 0}, {"kind": "self"}, {"layer": 1}, {"kind": "exit", "layer": "1"}):
        with pytest.raises(RecipeError, match=r"speculate: \{.*options are \{kind: exit, layer: 1 or more\}"):
            Recipe.from_dict({"passes": [], "speculate": wrong})


def test_what_reads_caches_or_positions_in_another_way_is_refused(graph: GraphModule) -> None:
    aten = torch.ops.aten
    for name, operator, reason in (
        ("k_cache_0", (aten.sum.default,), "reads the cache k_cache_0 outside attention"),
        ("position", (aten.select.int, 0, 0), "computes one value of all positions"),
    ):
        changed = clone_graph(graph)
        node = next(node for node in changed.graph.nodes if node.target == name)
        with changed.graph.inserting_before(changed.graph.output_node()):
            read = changed.graph.call_function(operator[0], (node, *operator[1:]))
        read.meta["val"] = operator[0](node.meta["val"], *operator[1:])
        assert reason in why_no_trees(changed)
    assert why_no_trees(graph) == ""


def test_targets_without_kernels_refuse_by_name(graph: GraphModule) -> None:
    marked = with_facts(graph, speculates=True)
    backend = CudaBackend(Cuda())
    backend.check(graph)
    with pytest.raises(UsageError, match=r"has no kernels for drafted tokens.*take the target x86"):
        backend.check(marked)
    WebBackend(Webgpu(wasm=False)).check(marked)
