"""Architecture and formats in one search: its space, bytes and scores by plain references, up to a bundle that runs."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, LENGTH, VOCAB, make
from packed_models import random_samples
from torch import Tensor
from torch.fx import GraphModule
from uneven_models import bundle_of

import compressor
from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.graph.caches import empty_past
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import packed_weight, replace_linear, set_parameter
from compressor.graph.sites import linear_sites, packed_sites
from compressor.numerics.sparsity.n_of_m import stored_in
from compressor.passes.chosen_formats import ChosenFormats
from compressor.passes.puzzle import Puzzle
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.structured.architecture import amounts, built, find_parts, formats_of, masked
from compressor.pipeline.structured.architecture_formats import mean_squares, refused, rounded_starts
from compressor.pipeline.structured.architecture_scores import Scores
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.search.joint import chosen, has_one_format, joint, parts_of_pairs
from compressor.search.space import alternatives, uniform

SAMPLES = random_samples(VOCAB, 8)
FORMATS = [Format.parse(name) for name in ("W8A16", "W4A16_G32", "W8A16_2:4")]
WANTED = {"attention": ["kv_heads:1", "linear", "none"], "ffn": ["width:0.5", "none"]}


@functools.cache
def _captured() -> GraphModule:
    kind, sizes = DECODERS["Llama"]
    return capture(make(kind, {**sizes, "num_hidden_layers": 3}, True))


@torch.no_grad()
def logits(graph: GraphModule, ids: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1])
    found: Tensor = graph(ids, position, position, *empty_past(graph.meta["model"], len(ids)))[0]
    return found


def joined() -> tuple[GraphModule, Any, Any, Any, Any]:
    """Return a sorted graph, its sub-layers, their alternatives with and without formats, and starts."""
    graph = clone_graph(_captured())
    parts = find_parts(graph, "puzzle", 0, 0)
    space = alternatives(parts.layers, WANTED, 8)
    starts = sort_parts(graph, Context(), parts, space, SAMPLES.ids, "activation")
    return graph, parts, space, joint(parts.layers, space, FORMATS, functools.partial(refused, graph)), starts


def test_the_space_is_all_pairs() -> None:
    _, parts, space, both, _ = joined()
    for row, pairs in zip(space, both, strict=True):
        wanted = [f"{one.label} in {fmt.name}" for one in row if one.stays for fmt in FORMATS] + ["none"]
        assert [one.label for one in pairs] == wanted
    even = [[row[place] for row, place in zip(both, choice, strict=True)] for choice in uniform(parts.layers, both)]
    assert sum(map(has_one_format, even)) == len(FORMATS) * (3 * 2 + 3 + 2) + 1  # all stay, either goes, both go
    first = [one for one in space[0] if one.stays]
    (left,) = joint(
        parts.layers[:1], [first], FORMATS, lambda _, one, fmt: "x" if one.channels and fmt.bits == 4 else ""
    )
    assert len(left) == len(first) * len(FORMATS) - 1
    with pytest.raises(UsageError, match=r"layers.0: W8A16: it is odd"):
        joint(parts.layers, space, FORMATS, lambda *_: "it is odd")


def test_bytes_are_those_of_the_built_graph() -> None:
    graph, parts, _, both, _ = joined()
    rows, rest = amounts(graph, parts.layers, both, None)["weight_bytes"]
    places = [1, 5, 6, 3, 8, 1]  # all three formats, a linear, a narrow network
    picks = [row[place] for row, place in zip(both, places, strict=True)]
    result = built(graph, "puzzle", picks, None)
    assert len({packed_weight(result, site).format for site in packed_sites(result)}) == 3
    assert rest + sum(row[place] for row, place in zip(rows, places, strict=True)) == weight_bytes(result)


def test_scores_see_rounded_weights() -> None:
    """Against the graph with packed linears, and of a narrow network against rounding what is left of it."""
    graph, parts, space, both, starts = joined()
    rounded = rounded_starts(graph, Context(), parts.layers, both, starts, SAMPLES.ids)
    squares = mean_squares(graph, Context(), parts.layers, SAMPLES.ids)
    picks = [row[number % 3] for number, row in enumerate(both)]  # all as it is, in three formats
    packed, formats = clone_graph(graph), formats_of(graph, parts.layers, picks)
    assert len(set(formats.values())) == 3
    for site in linear_sites(packed):
        if site.name in formats:
            weight = packed.get_parameter(site.weight_name).detach().float()
            replace_linear(packed, site, stored_in(weight, squares[site.weight_name], formats[site.name]))
    packed.recompile()
    found = logits(masked(graph, parts.layers, picks, rounded), SAMPLES.ids)
    torch.testing.assert_close(found, logits(packed, SAMPLES.ids), rtol=0, atol=2e-5)
    name = "model.layers.0.mlp.down_proj.weight"
    start, narrow = starts[1][space[1][1].label], rounded[1][both[1][4].label]  # sorted: the first half stays
    expected = dequantize(stored_in(start.weights[name], squares[name][:32], FORMATS[1]))
    torch.testing.assert_close(narrow.weights[name], expected, rtol=0, atol=0)


def test_scores_of_pairs_follow_from_their_parts() -> None:
    """Each part is a change of its own; the sum is near what whole runs of the pairs give."""
    graph, parts, _, both, starts = joined()
    places = parts_of_pairs(both[1])
    assert places == {4: (3, 1), 5: (3, 2)}  # the narrow network in the second and third format
    without = [one for one in both[1] if one.label != "as_is in W4A16_G32"]
    assert parts_of_pairs(without) == {4: (2, 1)}  # nothing tells of a format that the whole sub-layer cannot have
    assert parts_of_pairs([one.plain for one in both[1][::3]]) == {}
    rounded = rounded_starts(graph, Context(), parts.layers, both, starts, SAMPLES.ids)
    scores = Scores(graph, parts.layers, rounded, SAMPLES.ids)
    bare = [row[0].plain for row in both]
    found = [scores.of([bare[0], one, *bare[2:]]).mean for one in both[1]]
    for place, (one, other) in places.items():
        assert found[place] == pytest.approx(found[one] + found[other] - found[0], rel=0.25)


def test_the_chosen_formats_are_in_the_bundle(tmp_path: Path) -> None:
    graph, ctx = clone_graph(_captured()), Context(samples=SAMPLES)
    for site in linear_sites(graph):  # as models are stored
        set_parameter(graph, site.weight_name, graph.get_parameter(site.weight_name).detach().half())
    inside = [site for site in linear_sites(graph) if site.name != "lm_head"]
    least = sum(FORMATS[1].packed_bytes(site.out_features, site.in_features) for site in inside)
    most = sum(FORMATS[0].packed_bytes(site.out_features, site.in_features) for site in inside)
    rest = weight_bytes(graph) - sum(2 * site.out_features * site.in_features for site in inside)
    options: dict[str, Any] = {"attention": ("kv_heads:1",), "ffn": ("width:0.5",), "depth": "none", "multiple": 8}
    step = Puzzle(
        weight_bytes=rest + (least + most) / 2, scheme="W8A16", schemes=("W4A16_G32",), held_out=0.5, **options
    )
    graph = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    formats = chosen(graph)
    assert {fmt.name for fmt in formats.values()} == {"W8A16", "W4A16_G32"}
    graph = Pipeline([ChosenFormats()], [VerifyStages()]).run(graph, ctx)
    assert {site.name: packed_weight(graph, site).format for site in packed_sites(graph)} == formats
    assert weight_bytes(graph) <= rest + (least + most) / 2
    told = "\n".join(ctx.notes)
    ours, theirs = (
        float(re.search(pattern, told)[1])  # type: ignore[index]
        for pattern in (r"\|\| architecture\) (\S+) ±", r"uniform ones within the limits reaches (\S+) ±")
    )
    assert 0 < ours <= theirs
    bundle = compressor.load(bundle_of(graph, ctx, tmp_path / "bundle", "x86"))
    ids = np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))
    expected = logits(graph, torch.from_numpy(ids)).numpy()
    found = bundle.session().step(ids, np.arange(LENGTH))
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schemes": ("W4A16_G32",)}, "say in `scheme` which format"),
        ({"scheme": "W8A16", "schemes": ("W4A16_G32", "W8A16")}, "give others than W8A16, each of them once"),
        ({"scheme": "W8A16", "schemes": ("W8A16_B16x1@50",)}, "W8A16_B16x1@50: give dense formats, or .*W8A16_2:4"),
        ({"scheme": "W8A16", "schemes": ("W8B",)}, "format 'W8B' is unknown"),
    ],
)
def test_refusals_of_formats(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Puzzle(parameters=1e6, **options)


def test_nothing_is_packed_that_nothing_chose() -> None:
    with pytest.raises(UsageError, match="put `puzzle` with `schemes` in front of it"):
        ChosenFormats().requires(_captured(), Context())
