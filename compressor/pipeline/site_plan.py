"""Predict, from a graph without weights, what a weight pass does to each linear, and how much work it takes.

Planning rewrites the graph as the pass would, with packed weights on the meta device, so that later passes see the
shapes and bytes that they will see in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule

from compressor.formats.format import Format
from compressor.formats.packing import meta_packed
from compressor.graph.kinds.gate_projections import WHY_DENSE, gate_projections
from compressor.graph.rewrite import replace_linear
from compressor.graph.sites import PACKED_FORM, ROUTER, Site, linear_sites, match_sites, weight_sites
from compressor.numerics.range_search import Work
from compressor.numerics.scale_search import scaled_work, scaled_working_bytes
from compressor.pipeline.sites import patterns, site_notes

_ZEROS = "planned zeros"  # key of a linear's node
_FACTORS, _ROTATED_BYTES = 48, 80  # of a rotation: columns of its factors, bytes moved per element of a weight


@dataclass(frozen=True)
class CalibrationNeeds:
    """Statistics that a pass needs of the calibration samples.

    Attributes:
        true_sequential, with_dense: arguments of :class:`compressor.calibration.calibrate.CalibrationRun`.
        hessian: whether the statistic is the Hessian, [in, in], rather than a few vectors [in].
        gradients: whether samples also run backwards (:func:`compressor.calibration.gradients.backwards`): to weight
            the rows of the Hessian, or in place of it if none is needed.
    """

    true_sequential: bool
    with_dense: bool
    hessian: bool = True
    gradients: bool = False


@dataclass(frozen=True)
class SitePlan:
    """Prediction of what one pass does to one linear.

    Attributes:
        site: module name.
        out_features, in_features: shape of the weight.
        format: name of the format that it will be stored in; empty if it is left alone.
        bytes_before, bytes_after: bytes of the stored weight, without the bias.
        note: why it is left alone, or anything unusual.
        work: the pass's arithmetic, by unit (:data:`compressor.plan.prices.UNITS`).
        working_bytes: memory of the pass's arithmetic beside the stored weight.
        needs: statistics of calibration samples that it needs; None for a pass without calibration.
    """

    site: str
    out_features: int
    in_features: int
    format: str
    bytes_before: int
    bytes_after: int
    note: str = ""
    work: Work = field(default_factory=dict)
    working_bytes: int = 0
    needs: CalibrationNeeds | None = None


def plan_sites(
    graph: GraphModule,
    formats: Mapping[str, Format],
    ignore: str | Sequence[str],
    work: Callable[[int, int, Format], Work],
    working_bytes: Callable[[int, int, Format], int],
    needs: CalibrationNeeds | None = None,
) -> list[SitePlan]:
    """Return one plan per dense linear, in dataflow order, and replace those with a format by packed ones on the meta
    device.

    Args:
        formats: formats of the linears that the pass compresses, by name.
        ignore: the pass's option, for the notes on the other linears.
        work, working_bytes: functions of (out_features, in_features, format), see :class:`SitePlan`.
    """
    ignored = {site.name for site in match_sites(weight_sites(graph), patterns(ignore))[0]}
    gates, plans = gate_projections(graph), []
    for site in weight_sites(graph):
        if site.node.target not in PACKED_FORM:  # packed with the first call of its module
            continue
        weight = graph.get_parameter(site.weight_name)
        shape = (site.out_features, site.in_features)
        before = weight.numel() * weight.element_size()
        if site.name not in formats:
            why = WHY_DENSE if site.name in gates else why_unmatched(site)
            why = f"stays dense: {'ignored' if site.name in ignored else why}"
            plans.append(SitePlan(site.name, *shape, "", before, before, why))
            continue
        fmt = formats[site.name]
        packed = meta_packed(*shape, fmt)
        notes = "; ".join(site_notes(site, packed, before))
        replace_linear(graph, site, packed)
        amounts = (dict(work(*shape, fmt)), working_bytes(*shape, fmt))  # dataclasses.asdict cannot copy a Counter
        plans.append(SitePlan(site.name, *shape, fmt.name, before, packed.nbytes, notes, *amounts, needs))
    return plans


def plan_untouched(graph: GraphModule) -> list[SitePlan]:
    """Return one plan per dense linear, in dataflow order, that says that it stays as it is."""
    plans = []
    for site in weight_sites(graph):
        weight = graph.get_parameter(site.weight_name)
        size = weight.numel() * weight.element_size()
        plans.append(SitePlan(site.name, site.out_features, site.in_features, "", size, size, "stays as it is"))
    return plans


def plan_zeros(graph: GraphModule, formats: Mapping[str, Format]) -> list[SitePlan]:
    """Return what :func:`plan_untouched` does, and note on the graph which linears will have zeros.

    Args:
        formats: formats whose zeros a pass leaves in dense weights, by name of the linear.
    """
    for site in weight_sites(graph):
        if site.name in formats:
            site.node.meta[_ZEROS] = formats[site.name].name
    return plan_untouched(graph)


def planned_zeros(site: Site) -> str:
    """Return the name of the format whose zeros an earlier pass will leave in a linear's dense weight; empty if none.

    Only a graph that passes have planned on tells.
    """
    return str(site.node.meta.get(_ZEROS, ""))


def why_unmatched(site: Site) -> str:
    """Say why no target matches a linear: patterns of classes leave routers alone."""
    if site.module_class == ROUTER:
        return f"a router, whose errors would choose other experts; only a target such as {site.name} matches it"
    return "depthwise, which rtn and gptq pack where targets match" if site.is_depthwise else "no target matches it"


def plan_dense_sites(
    graph: GraphModule, sites: Sequence[Site], needs: CalibrationNeeds, tries: int, fmt: Format
) -> list[SitePlan]:
    """Return one plan per linear that stays dense while its inputs are scaled; ``tries`` scales are tried by rounding
    to ``fmt``.
    """
    plans = []
    for site in sites:
        weight = graph.get_parameter(site.weight_name)
        shape = (site.out_features, site.in_features)
        before = weight.numel() * weight.element_size()
        note = "scaled, where the scale can be folded"
        work = dict(scaled_work(*shape, fmt, tries, chosen=False))
        kept = SitePlan(site.name, *shape, "", before, before, note, work, scaled_working_bytes(*shape, fmt), needs)
        plans.append(kept)
    return plans


def plan_rotated_sites(graph: GraphModule, before: Mapping[str, Tensor]) -> list[SitePlan]:
    """Return one plan per linear, all still dense; those whose weight differs from ``before`` were rotated."""
    plans = []
    for site in linear_sites(graph):
        old, new, shape = (
            before[site.name],
            graph.get_parameter(site.weight_name),
            (site.out_features, site.in_features),
        )
        sizes = (old.numel() * old.element_size(), new.numel() * new.element_size())
        if new is old:
            plans.append(SitePlan(site.name, *shape, "", *sizes, "stays as it is"))
            continue
        work = {"matmul64_flop": 2 * _FACTORS * new.numel(), "stream_byte": _ROTATED_BYTES * new.numel()}
        plans.append(SitePlan(site.name, *shape, "", *sizes, "rotated", work, 28 * new.numel()))
    return plans
