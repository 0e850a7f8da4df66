"""The graph that reads upper planes only: the same parameters but the lower planes, and linears of other formats."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from captures import capture_once
from tiny_models import DECODERS, build, quantized

from compressor.codegen.backend import make_backend
from compressor.codegen.gpu.linear.products import supports as gpu_supports
from compressor.codegen.lowering.entries import entries
from compressor.codegen.web.kernels.packed_linear import supports as web_supports
from compressor.errors import RecipeError
from compressor.formats.format import Format
from compressor.graph.caches import empty_past
from compressor.graph.kinds.upper_planes import has_planes, upper_graph
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.plan.passes import mark_entries, plan_passes
from compressor.recipe.recipe import Recipe


def test_linears_read_the_upper_plane_and_nothing_else_changes() -> None:
    graph = quantized(capture_once(build(DECODERS["llama"]())), "W8A8_G32_P4")
    upper, floored = upper_graph(graph), clone_graph(graph)
    assert has_planes(graph) and not has_planes(upper)
    stored, read = dict(graph.named_parameters()), dict(upper.named_parameters())
    assert {name for name in stored if name not in read} == {name for name in stored if name.endswith(".lower")}
    assert all(read[name] is stored[name] for name in read)
    for name in stored:  # the same weights, the lower plane of each replaced by one in the middle, but for half a step
        if name.endswith(".lower"):
            set_parameter(floored, name, torch.full_like(stored[name], -0x77777778))  # 8 in every four bits
    ids, position = torch.arange(5)[None], torch.arange(5)
    past = empty_past(graph.meta["model"], 1, 0)
    with torch.no_grad():
        one, other = (each(ids, position, position, *past)[0] for each in (upper, floored))
    assert (one - other).abs().max() < 1e-5 * one.abs().max()
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True)
    assert [entry.name for entry in entries(graph)] == ["verify", "planes", "main"]


def test_what_cannot_draft_so_is_refused_by_name() -> None:
    passes = [{"rtn": {"scheme": "W8A8", "targets": "re:.*"}}]
    graph, recipe = (
        capture_once(build(DECODERS["llama"]())),
        Recipe.from_dict({"passes": passes, "speculate": "planes"}),
    )
    mark_entries(graph, recipe)
    with pytest.raises(RecipeError, match="speculate: no linear's codes lie in two planes; give a pass such a scheme"):
        plan_passes(graph, recipe, make_backend(recipe.target.build()))
    fmt = Format.parse("W8A8_P4")
    assert "_P4" in web_supports(fmt) and "_P4" in gpu_supports(fmt)
    assert fmt.packed_bytes(64, 64) == Format.parse("W8A8").packed_bytes(64, 64)
