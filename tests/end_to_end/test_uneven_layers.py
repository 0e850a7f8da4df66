"""Layers with unlike heads, widths and linears in their place: bundles compute what the graph does, in browsers too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, LENGTH, VOCAB, make
from torch.fx import GraphModule
from uneven_models import Uneven, bundle_of
from web_bundles import in_node

import compressor
from compressor.capture.capture import capture
from compressor.codegen.web.session import WebBundle
from compressor.graph.caches import empty_past
from compressor.graph.sites import linear_sites, packed_sites
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context

CHOICES = {
    "heads": ("heads:0.5", "width:0.5", "none", "linear", "as_is", "as_is"),
    "groups": ("kv_heads:1", "linear", "linear", "width:0.5", "as_is", "none"),
}
IDS = np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH))


def graph_of(choice: str) -> tuple[GraphModule, Context]:
    kind, sizes = DECODERS["Llama"]
    graph, ctx = capture(make(kind, {**sizes, "num_hidden_layers": 3}, True)), Context()
    for step in (Uneven(CHOICES[choice]), Rtn("W8A16", ignore=("lm_head",))):
        graph = step.run(graph, ctx)
    return graph, ctx


def expected(graph: GraphModule) -> Any:
    position = torch.arange(LENGTH)
    with torch.no_grad():
        return graph(torch.from_numpy(IDS), position, position, *empty_past(graph.meta["model"], 2))[0].numpy()


def error(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def in_steps(session: Any) -> Any:
    steps = [session.step(IDS[:, :5], np.arange(5)), *(session.step(IDS[:, [i]]) for i in range(5, LENGTH))]
    return np.concatenate(steps, axis=1)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_bundle_computes_what_the_graph_does(choice: str, tmp_path: Path) -> None:
    graph, ctx = graph_of(choice)
    assert sum(site.name.endswith(".mapped") for site in packed_sites(graph)) == CHOICES[choice].count("linear")
    assert [site.name for site in linear_sites(graph)] == ["lm_head"]
    bundle = compressor.load(bundle_of(graph, ctx, tmp_path / "bundle", {"x86": {"isa": "avx2"}}))
    assert error(in_steps(bundle.session(batch=2)), expected(graph)) < 1e-4


def test_browsers_compute_what_the_graph_does(
    tmp_path: Path, require_adapter: None, require_tool: Callable[..., Path]
) -> None:
    require_tool("wasm-ld")
    graph, ctx = graph_of("groups")
    wanted = expected(graph)
    folder = bundle_of(graph, ctx, tmp_path / "bundle", "webgpu")
    for engine in ("webgpu", "wasm"):
        assert error(in_steps(WebBundle(folder, engine).session(2, LENGTH)), wanted) < 1e-4, engine  # type: ignore[arg-type]
    found = in_node(
        folder,
        """
        const ids = [];
        for await (const id of model.generateIds(given, { maxTokens: 1 })) ids.push(id);
        return ids;""",
        IDS[0].tolist(),
    )
    assert found == [int(wanted[0, -1].argmax())]
