"""Linears whose outputs are gates of recurrent states alone stay dense unless they are named."""

from __future__ import annotations

from functools import cache

import families
import pytest
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.kinds.gate_projections import gate_projections
from compressor.graph.model import clone_graph
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.sites import choose_sites

FMT = Format.parse("W4A16_G8")


@cache
def captured(family: str) -> GraphModule:
    return capture(families.make(*families.RECURRENT[family], True))


@pytest.mark.parametrize(
    ("family", "gates"),
    [
        ("Mamba", {"x_proj", "dt_proj"}),  # dt_proj is no module call, but a product with a weight
        ("Mamba 2", set()),  # its gates come from the linear that makes everything
        ("Qwen3-Next, dense", {"in_proj_ba"}),
    ],
)
def test_gates(family: str, gates: set[str]) -> None:
    graph = captured(family)
    assert {name.rpartition(".")[2] for name in gate_projections(graph)} == gates
    notes = [note for note in graph.meta["notes"] if "stay dense unless `targets` names them" in note]
    assert bool(notes) == bool(gates) and all(gate in notes[0] for gate in gates)
    by_class = {site.name.rpartition(".")[2] for site in choose_sites(graph, "rtn", FMT, "Linear", ())}
    assert not by_class & gates and len(by_class) > 1


def test_a_gate_that_is_named_is_packed() -> None:
    graph = clone_graph(captured("Mamba"))
    for targets, count in ((("Linear", "x_proj"), 2), ("re:.*", 4), ("MambaMixer", 0)):
        try:
            found = choose_sites(graph, "rtn", FMT, targets, ())
        except UsageError as error:
            assert not count and "name it in `targets`" in str(error)
            continue
        assert sum(site.name in gate_projections(graph) for site in found) == count
    notes = {plan.site: plan.note for plan in Rtn("W4A16_G8").plan(graph, Context())}
    assert "errors add up over all later tokens" in notes["backbone.layers.0.mixer.x_proj"]
    assert not notes["backbone.layers.0.mixer.in_proj"]
