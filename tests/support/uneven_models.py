"""Decoders whose layers differ, as an architecture search leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from compressor.codegen.backend import make_backend
from compressor.export.bundle import write_bundle
from compressor.export.facts import run_facts
from compressor.pipeline.context import Context
from compressor.pipeline.structured.architecture import build, find_parts
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.recipe.recipe import Recipe
from compressor.search.space import alternatives


@dataclass(frozen=True)
class Uneven:
    """Build an architecture by name, as a pass: of each attention and each feed-forward network, in their order."""

    wanted: Sequence[str]

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        parts, named = find_parts(graph, "uneven", 0, 0), [one for one in self.wanted if one != "as_is"]
        attention = [one for one in named if not one.startswith("width")]
        feed_forward = [one for one in named if one.partition(":")[0] in ("width", "linear", "none")]
        space = alternatives(parts.layers, {"attention": attention, "ffn": feed_forward}, 8)
        ids = torch.randint(graph.meta["model"].vocab_size, (8, 12), generator=torch.Generator().manual_seed(0))
        starts = sort_parts(graph, ctx, parts, space, ids, "activation")
        labels = {"heads": "query heads ", "kv_heads": "kv heads ", "width": "width "}
        picks = []
        for row, text in zip(space, self.wanted, strict=True):
            label = labels.get(text.partition(":")[0], text)
            picks.append(next(one for one in row if one.label.startswith(label)))
        build(graph, ctx, "uneven", parts, picks, starts)
        return graph


def bundle_of(graph: GraphModule, ctx: Context, folder: Path, target: Any) -> Path:
    """Write a bundle of a compressed graph."""
    recipe = Recipe.from_dict({"model": "reference", "passes": [], "target": target, "tune": "off"})
    backend: Any = make_backend(recipe.target.build(), 1)
    backend.compile(graph, recipe.tune, None, lambda _isa: None)
    folder.mkdir()
    write_bundle(folder, backend.write(folder, graph, False), run_facts(graph, recipe, ctx, 0))
    return folder
