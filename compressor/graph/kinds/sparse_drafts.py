"""Make the graph that drafts from few inputs: linears that read all of them leave out those that are small.

    packed_linear(x, [codes, scales, thresholds], bias, "W8A16_SKIP")            becomes
    packed_linear(x, [codes, scales, draft_thresholds], bias, "W8A16_SKIP")

The model's own thresholds are zero, so that it leaves nothing out.  Parameters are shared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import UsageError
from compressor.formats.extras import SkippedInputs
from compressor.formats.packing import skip_inputs
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import packed_weight, replace_packed, set_parameter
from compressor.graph.sites import EXPERT, Site, packed_sites

SPARSE = "sparse"
"""Name of the entry that drafts from few inputs, and of the kind of drafts."""
_LIMITS = "draft_thresholds"
"""Key of the graph's meta data, thresholds of a linear -> those of its drafts; and what the latter are called."""


def may_draft_sparse(graph: GraphModule) -> list[Site]:
    """Return the packed linears whose formats can skip inputs and do not yet.

    A head that shares its weight with the table of embeddings is none: by columns it would be stored a second time.
    """
    sites = [site for site in packed_sites(graph) if site.module_class != EXPERT and not _is_shared(site)]
    return [site for site in sites if _may_skip(graph, site)]


def limit_drafts(graph: GraphModule, thresholds: Mapping[str, Tensor]) -> None:
    """Store linears by columns in place, with thresholds that only drafts obey.

    Args:
        thresholds: name of a linear that :func:`may_draft_sparse` lists -> float32 [in].
    """
    limits: dict[str, str] = {}
    for site in packed_sites(graph):
        if (limit := thresholds.get(site.name)) is None:
            continue
        replace_packed(graph, site, skip_inputs(packed_weight(graph, site), torch.zeros_like(limit)))
        own = str(site.node.args[1][-1].target)  # type: ignore[index, union-attr]
        limits[own] = f"{own.rpartition('.')[0]}.{_LIMITS}"
        set_parameter(graph, limits[own], limit)
    graph.meta[_LIMITS] = limits
    graph.recompile()


def drafts_sparse(graph: GraphModule) -> bool:
    """Tell whether some linears have thresholds that only drafts obey."""
    return bool(graph.meta.get(_LIMITS))


def sparse_graph(graph: GraphModule) -> GraphModule:
    """Return the graph whose linears obey the thresholds of drafts, which shares the parameters."""
    limits: Mapping[str, str] = graph.meta[_LIMITS]
    sparse = clone_graph(graph)
    for node in sparse.graph.find_nodes(op="get_attr"):
        if (limit := limits.get(str(node.target))) is not None:
            set_parameter(sparse, limit, graph.get_parameter(limit))
            node.target = limit
    return clone_graph(sparse)  # without the thresholds that are not read


def _is_shared(site: Site) -> bool:
    codes: Node = site.node.args[1][0]  # type: ignore[index, assignment]
    return any(user.target is torch.ops.compressor.packed_embedding.default for user in codes.users)


def _may_skip(graph: GraphModule, site: Site) -> bool:
    fmt = packed_weight(graph, site).format
    try:
        return fmt.extra(SkippedInputs) is None and bool(fmt.with_extra(SkippedInputs()))
    except UsageError:
        return False
