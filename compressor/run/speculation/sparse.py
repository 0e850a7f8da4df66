"""Give linears thresholds that only drafts obey, and say whether such drafts would pay.

packed linears -> thresholds, agreement on calibration text, times of the largest one's kernels -> forecast
"""

from __future__ import annotations

from compressor_runtime import available_cores
from compressor_runtime.speculation.cost import Forecast, forecast
from torch import Tensor
from torch.fx import GraphModule

from compressor.codegen.skipping_times import skipping_seconds
from compressor.codegen.tuning import WORKING_SET_BYTES
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.graph.kinds.sparse_drafts import SPARSE, limit_drafts, may_draft_sparse
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import packed_weight
from compressor.graph.sites import Site, packed_sites
from compressor.passes.activation_sparse import ActivationSparse, extend_record
from compressor.recipe.drafts import DEFAULT_SPARSITY, SparseSpec
from compressor.run.native import NativeBackend
from compressor.run.prepare import Prepared

_AUTO = "auto"
_TOKENS, _WINDOW = 1024, 256
"""Tokens of calibration samples on which agreement is measured, and those of a window."""
_VERIFIED = (2, 3, 4, 5)
"""Rows of verifications that are timed: one more than was drafted."""


def add_sparse_drafts(given: Prepared, graph: GraphModule) -> None:
    """Store linears in place such that drafts skip small inputs, where the recipe asks for it or where it would pay.

    ``auto`` takes such drafts if the kernels of this machine let them pay beside the format as it is; the choice is
    locked.  Asked for by name, they are made, and what is expected of them is noted.
    """
    kind, locked = given.recipe.drafts, given.lock.locked
    if kind not in (SPARSE, _AUTO):
        return
    sites = may_draft_sparse(graph)
    backend: object = given.backend  # browsers have no such drafts
    is_timed = isinstance(backend, NativeBackend) and backend.runs_here and backend.timed and not backend.launcher
    is_candidate = sites and given.context.samples is not None and is_timed
    if kind == _AUTO and (not is_candidate or (locked is not None and not locked["sparse_drafts"])):
        given.lock.facts["sparse_drafts"] = False
        return
    asked = given.recipe.speculate
    share = asked.sparsity if isinstance(asked, SparseSpec) else DEFAULT_SPARSITY
    with given.clock.stage("drafts", shown=False):
        trial = clone_graph(graph)
        step = ActivationSparse(share, targets=tuple(site.name for site in sites))
        found = list(step.limit(trial, given.context))
        thresholds = {site.name: packed_weight(trial, site).parts["thresholds"] for site, _, _ in found}
        agreement = _agreement(given, graph, trial)
        del trial
        expected = _expected(given, graph, max(sites, key=_size), share, agreement)
        verdict = f"acceptance {agreement:.2g}" if expected is None else f"{expected}"
        if kind == _AUTO:
            takes = expected is not None and expected.pays if locked is None else bool(locked["sparse_drafts"])
            given.lock.facts["sparse_drafts"] = takes
            given.context.notes.append(f"speculate: auto, {'with' if takes else 'without'} sparse: {verdict}")
            if not takes:
                return
        else:
            given.context.notes.append(f"speculate: sparse, {share:.0%} of the weights skipped: {verdict}")
        limit_drafts(graph, thresholds)
    stored = {site.name: packed_weight(graph, site) for site in packed_sites(graph)}
    for site, skipped, error in found:
        note = f"drafts skip {skipped:.1%} of its inputs, an error of {error:.2g}"
        extend_record(given.context, site.name, stored[site.name], note)


def _size(site: Site) -> int:
    return site.in_features * site.out_features


def _agreement(given: Prepared, graph: GraphModule, sparse: GraphModule) -> float:
    """Return how often the likeliest token is the whole model's, behind the right tokens of the calibration text."""
    samples = given.context.calibration("speculate: sparse")
    assert isinstance(samples.ids, Tensor)
    tokens, spill = samples.ids.flatten()[:_TOKENS], given.context.spill
    whole = GraphLogits(graph, spill=spill)
    found = measure_quality(GraphLogits(sparse, spill=spill), tokens, window=_WINDOW, stride=_WINDOW, dense=whole)
    assert found.top1_agreement is not None
    return found.top1_agreement


def _expected(given: Prepared, graph: GraphModule, site: Site, share: float, agreement: float) -> Forecast | None:
    """Return the gain to expect by the times of a linear's kernels; None where this machine does not run them.

    The rest of a step takes as long in a draft, so that more is not to be had.
    """
    backend = given.backend
    if not backend.runs_here or not backend.timed or backend.launcher:
        return None
    packed, working_set = packed_weight(graph, site), min(WORKING_SET_BYTES, weight_bytes(graph))
    threads = given.threads or available_cores()
    step, draft, verified = skipping_seconds(
        packed, share, _VERIFIED, given.recipe.target.build(), threads, working_set
    )
    return forecast(agreement, draft / step, [seconds / step for seconds in verified])
