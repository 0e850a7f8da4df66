"""Begin a training with the weights that another pass makes, from the samples that the training learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.model import clone_graph
from compressor.graph.sites import Site, weight_sites
from compressor.host.digests import tensors_sha256
from compressor.host.tensor_files import trim
from compressor.numerics.sparsity.n_of_m import left_entries, pattern_of
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, planned_zeros
from compressor.pipeline.sites import error_context
from compressor.registry import PASSES
from compressor.training.settings import split


def refuse_unfit(name: str, graph: GraphModule, sites: Sequence[Site], scheme: str) -> None:
    """Refuse linears whose rows are not whole groups, and those that an earlier pass leaves with zeros, or whose
    weights have the pattern as they came.

    Before the run a graph without weights tells what passes have planned.

    Args:
        name: of the pass that asks, for the message.
        scheme: format of the pass, which leaves out single weights.
    Raises:
        UsageError: names the linear.
    """
    fmt = Format.parse(scheme)
    pattern = pattern_of(fmt)
    assert pattern is not None
    for site in sites:
        with error_context(site):
            fmt.stored_columns(site.in_features)
        weight = graph.get_parameter(site.weight_name).detach()
        is_pruned = not weight.is_meta and left_entries(weight, pattern) is not None
        if zeros := planned_zeros(site) or (scheme if is_pruned else ""):
            raise UsageError(
                f"{name}: {site.name} has the zeros of {zeros} already, and which weights become zero is what is "
                "learned: put the pass in front of those that prune, or name the linear in `ignore`"
            )


@contextmanager
def pruned_start(
    name: str, graph: GraphModule, ctx: Context, sites: Sequence[Site], step: Pass, held_out: float
) -> Iterator[Mapping[str, Tensor]]:
    """Run a pass on a copy of the graph, and give the weights that it leaves, by name; the graph stays as it is.

    It sees the samples that are trained on, and none of those that are held out, which judge what it made.  What it
    says of a linear is added to the record that the training inside leaves of it.

    Args:
        name: of the pass that trains, for notes.
        sites: linears that ``step`` prunes and leaves dense.
        held_out: share of the samples that are not trained on.
    """
    samples, recorded = ctx.calibration(name), len(ctx.records)
    assert isinstance(samples.ids, Tensor)
    judging, ids = split(samples.ids, held_out, ctx.seed)
    mine = dataclasses.replace(samples, ids=ids, sha256=tensors_sha256([("ids", ids)]))
    inner = dataclasses.replace(ctx, samples=mine, records=[], notes=[])
    made = step.run(clone_graph(graph), inner)
    ctx.blocks, ctx.reused = inner.blocks, inner.reused
    begun = f"{name}: begins with {PASSES.name_of(step)} on {len(ids)} samples"
    ctx.notes += [f"{begun}, without the {len(judging)} that are held out", *inner.notes]
    trim()  # a training takes large blocks of its own, beside the gaps that statistics left
    weights = {site.name: made.get_parameter(site.weight_name).detach() for site in weight_sites(made)}
    yield {site.weight_name: weights[site.name] for site in sites}
    said = {record.site: _without_tie(record.note) for record in inner.records}
    for number, record in enumerate(ctx.records[recorded:], recorded):
        if note := said.get(record.site):
            joined = "; ".join(filter(None, (record.note, f"at the start: {note}")))
            ctx.records[number] = dataclasses.replace(record, note=joined)


def plans_with_start(before: Sequence[SitePlan], plans: Sequence[SitePlan]) -> list[SitePlan]:
    """Return plans of a training with the samples, work and memory that its start takes of each linear.

    Args:
        before: of the start; empty where it takes none.
        plans: of the training.
    """
    takes, found = {plan.site: plan for plan in before if plan.needs is not None}, []
    for plan in plans:
        if (first := takes.get(plan.site)) is not None:
            most = max(plan.working_bytes, first.working_bytes)
            plan = dataclasses.replace(plan, work=first.work, needs=first.needs, working_bytes=most)
        found.append(plan)
    return found


def _without_tie(note: str) -> str:
    """Leave out that an embedding keeps its weight, which is so on the copy: the training says what becomes of it."""
    return "; ".join(part for part in note.split("; ") if not part.startswith("tied: "))
