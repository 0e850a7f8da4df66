"""The graph whose linears skip small inputs in drafts alone, and recipes that cannot have one."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from captures import capture_once
from tiny_models import DECODERS, build, quantized

from compressor.codegen.backend import make_backend
from compressor.codegen.lowering.entries import entries
from compressor.errors import RecipeError
from compressor.graph.caches import empty_past
from compressor.graph.kinds.sparse_drafts import drafts_sparse, limit_drafts, may_draft_sparse, sparse_graph
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import packed_sites
from compressor.passes.embedding import Embedding
from compressor.pipeline.context import Context
from compressor.plan.passes import mark_entries, plan_passes
from compressor.recipe.drafts import SparseSpec
from compressor.recipe.recipe import Recipe


def test_the_model_skips_nothing_and_its_drafts_obey_their_thresholds() -> None:
    dense = quantized(capture_once(build(DECODERS["llama"]())), "W8A16", "re:.*")
    graph, sites = clone_graph(dense), may_draft_sparse(dense)
    assert not drafts_sparse(graph) and len(sites) > 6
    limit_drafts(graph, {site.name: torch.full((site.in_features,), 0.3) for site in sites})
    assert drafts_sparse(graph) and not may_draft_sparse(graph)
    sparse, raised = sparse_graph(graph), clone_graph(graph)
    for name, _ in list(raised.named_parameters()):
        if name.endswith(".thresholds"):
            set_parameter(raised, name, torch.full_like(raised.get_parameter(name), 0.3))
    ids, position = torch.arange(5)[None], torch.arange(5)
    past = empty_past(graph.meta["model"], 1, 0)
    with torch.no_grad():
        before, whole, draft, expected = (
            each(ids, position, position, *past)[0] for each in (dense, graph, sparse, raised)
        )
    assert torch.allclose(before, whole, atol=1e-5) and torch.equal(draft, expected)
    assert not torch.allclose(draft, whole, atol=1e-2)
    stored = dict(graph.named_parameters())
    assert all(stored[name].data_ptr() == parameter.data_ptr() for name, parameter in sparse.named_parameters())
    thresholds = sum(4 * site.in_features for site in sites)
    assert weight_bytes(graph) == weight_bytes(sparse) + thresholds  # no weight is stored twice
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True)
    assert [entry.name for entry in entries(graph)] == ["verify", "sparse", "main"]


def test_a_head_that_is_the_table_drafts_with_all_inputs() -> None:
    """By columns it would be stored a second time."""
    graph = quantized(capture_once(build(DECODERS["llama"]())), "W8A16", "re:.*layers.0.mlp.*")
    graph = Embedding("W8A16").run(graph, Context())
    assert [site.name for site in packed_sites(graph)][-1] == "lm_head"
    assert [site.name.rpartition(".")[2] for site in may_draft_sparse(graph)] == ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"calibration": None}, "thresholds are chosen on calibration text; add `calibration:`"),
        ({"passes": [{"rtn": {"scheme": "W8A8", "targets": "re:.*"}}]}, "no linear's format skips inputs; give a pass"),
    ],
)
def test_what_cannot_draft_so_is_refused_with_the_line(changes: dict[str, Any], reason: str) -> None:
    graph, given = capture_once(build(DECODERS["llama"]())), {"kind": "sparse", "sparsity": 0.7}
    passes = [{"rtn": {"scheme": "W8A16", "targets": "re:.*"}}]
    text = {"text": "python_docs", "sequence_length": 16}
    data = {"calibration": text, "passes": passes, "speculate": given, **changes}
    recipe = Recipe.from_dict(data)
    assert recipe.speculate == SparseSpec(kind="sparse", sparsity=0.7) and recipe.drafts == "sparse"
    mark_entries(graph, recipe)
    with pytest.raises(RecipeError, match=re.escape(f"sparse: drafts leave small inputs out; {reason}")):
        plan_passes(graph, recipe, make_backend(recipe.target.build()))


@pytest.mark.parametrize(
    "wrong",
    [{"sparsity": 0}, {"sparsity": 0.99}, {"sparsity": "0.5"}, {"layer": 1}, {"tolerance": 1.1}, {"tolerance": -0.1}],
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        RecipeError, match=r"speculate: .*\{kind: sparse, sparsity: above 0, at most 0.95, tolerance: 0 to 1\}"
    ):
        Recipe.from_dict({"passes": [], "speculate": {"kind": "sparse", **wrong}})


@pytest.mark.parametrize("kind", ["exit", "lookup", "auto"])
def test_other_drafts_have_no_tolerance(kind: str) -> None:
    with pytest.raises(RecipeError, match=r"speculate: .*tolerance: 0 to 1\}, which alone may be lossy"):
        Recipe.from_dict({"passes": [], "speculate": {"kind": kind, "tolerance": 0.1}})
