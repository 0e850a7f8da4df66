"""What another pass makes of the weights, from which a training begins: on the samples that it trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor.graph.model import clone_graph
from compressor.graph.sites import Site, weight_sites
from compressor.host.digests import tensors_sha256
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.training.loop import split


@dataclass(frozen=True)
class Start:
    """Weights that a training begins with.

    Attributes:
        values: dense weights, with zeros where they are left out, by name of the parameter.
        notes: what the pass that made them says of each linear, by its name; empty texts where it says nothing.
    """

    values: Mapping[str, Tensor]
    notes: Mapping[str, str]


def pruned_start(
    name: str, graph: GraphModule, ctx: Context, sites: Sequence[Site], step: Pass, held_out: float
) -> Start:
    """Run a pass on a copy of the graph, and return the weights that it leaves; the graph stays as it is.

    It sees the samples that are trained on, and none of those that are held out: these judge what it made.

    Args:
        name: of the pass that trains, for notes.
        sites: linears that ``step`` prunes and leaves dense.
        held_out: share of the samples that are not trained on.
    """
    samples = ctx.calibration(name)
    assert isinstance(samples.ids, Tensor)
    judging, ids = split(samples.ids, held_out, ctx.seed)
    mine = dataclasses.replace(samples, ids=ids, sha256=tensors_sha256([("ids", ids)]))
    inner = dataclasses.replace(ctx, samples=mine, records=[], notes=[])
    made = step.run(clone_graph(graph), inner)
    ctx.blocks, ctx.reused = inner.blocks, inner.reused
    ctx.notes.append(
        f"{name}: begins with sparsegpt on {len(ids)} samples; the {len(judging)} held-out are not among them"
    )
    ctx.notes += [f"{name}: at the start: {note}" for note in inner.notes]
    weights = {site.name: made.get_parameter(site.weight_name).detach() for site in weight_sites(made)}
    notes = {record.site: _without_tie(record.note) for record in inner.records}
    return Start({site.weight_name: weights[site.name] for site in sites}, notes)


def add_notes(ctx: Context, begin: int, start: Start) -> None:
    """Put what is said of a start behind what the training says of each linear.

    Args:
        begin: number of records that there were before the training.
    """
    for number, record in enumerate(ctx.records[begin:], begin):
        if said := start.notes.get(record.site):
            note = "; ".join(filter(None, (record.note, f"at the start: {said}")))
            ctx.records[number] = dataclasses.replace(record, note=note)


def _without_tie(note: str) -> str:
    """Leave out that the copy's embedding stays as it is: what is trained is trained for the embedding as well."""
    return "; ".join(part for part in note.split("; ") if not part.startswith("tied: "))
