"""Bias correction: subtract the mean error that quantisation leaves in each output (Nagel et al. 2019)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.errors import CompressorError, UsageError
from compressor.formats.activations import Activations
from compressor.formats.packing import PIECE_ELEMENTS, PackedWeight, dequantize_rows
from compressor.formats.parts import PARTS
from compressor.formats.rounded_activations import round_activations
from compressor.graph.rewrite import packed_weight, set_bias
from compressor.graph.sites import Site, linear_sites, packed_sites, packed_weight_sites, ties
from compressor.host.tensor_files import release
from compressor.numerics.products.deterministic import column_sums
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan
from compressor.pipeline.sites import choose_sites


class Means:
    """Mean of each input channel over all tokens, float64 [in]: of the present inputs as linears round them, and of the
    dense graph's.

    Args:
        kinds: activation formats of the linears that read the inputs.
    """

    def __init__(self, in_features: int, kinds: Collection[Activations | None]) -> None:
        self.tokens = 0
        self._sums = {kind: torch.zeros(in_features, dtype=torch.float64) for kind in kinds}
        self._dense = torch.zeros(in_features, dtype=torch.float64)

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Add rows, float32 [tokens, in_features], and the dense graph's rows."""
        for kind, sums in self._sums.items():
            sums += column_sums(round_activations(x, kind))
        self._dense += column_sums(dense)
        self.tokens += len(x)

    def now(self, kind: Activations | None) -> Tensor:
        """Return the mean of the present inputs, rounded as ``kind`` says."""
        return self._sums[kind] / max(1, self.tokens)

    @property
    def dense(self) -> Tensor:
        """Mean of the inputs in the dense graph."""
        return self._dense / max(1, self.tokens)


def corrected_bias(
    weight: Tensor, bias: Tensor | None, packed: PackedWeight, dense_mean: Tensor, mean: Tensor
) -> Tensor:
    """Return the bias b with which Q x + b has the mean of W x_dense + bias: b = bias - (Q E[x] - W E[x_dense]).

    See Data-Free Quantization, section 4.2 (Nagel et al. 2019, arXiv 1906.04721); E[x] is measured on samples here.

    Args:
        weight, bias: of the dense linear, float [out, in] and float32 [out].
        packed: the stored weight, [out, in].
        dense_mean, mean: of the inputs, float64 [in].
    Returns:
        float32 [out].
    """
    result = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    for rows, values in dequantize_rows(packed):
        wanted, found = weight[rows].double() * dense_mean, values.double() * mean
        result[rows] += (wanted - found).sum(1)
    return result.float()


@dataclass(frozen=True)
class BiasCorrection(Pass):
    """Subtract the mean output error of packed linears from their biases, one group of shared inputs after another.

    Put it after the passes that quantise.  The error is measured against the model before the first of them, over the
    calibration samples; each linear sees those before it corrected.

    Attributes:
        add: also give a bias to linears without one: 4 bytes per output, and an addition in the kernel.
        targets: class names, module names or ``re:`` patterns of the packed linears to correct.
        ignore: patterns of linears to leave as they are.
    """

    needs_dense: ClassVar[bool] = True
    add: bool = False
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a graph without packed linears, or without a bias to correct."""
        self._choose(graph)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace biases, and with ``add`` also add them; weights stay as they are."""
        samples = ctx.calibration("bias_correction")
        chosen, left = self._choose(graph)
        dense = _comparable(graph, ctx)
        by_name = {site.name: site for site in linear_sites(dense)}
        chosen = [site for site in chosen if site.name in by_name]  # a rotation's matrix has no dense counterpart
        kinds = {packed_weight(graph, site).format.activations for site in chosen}
        added = sum(4 * site.out_features for site in chosen if site.bias_name is None)
        means = partial(Means, kinds=kinds)
        with ctx.reporter.task("bias_correction", len(chosen)) as task:
            for group, inputs in CalibrationRun(
                graph, samples.ids, chosen, means, CalibrationOptions(with_dense=dense, spill=ctx.spill)
            ).groups():
                for site in group:
                    was = by_name[site.name]
                    packed = packed_weight(graph, site)
                    weight = dense.get_parameter(was.weight_name).detach()
                    bias = None if was.bias_name is None else dense.get_parameter(was.bias_name).detach()
                    mean = inputs.now(packed.format.activations)
                    set_bias(graph, site, corrected_bias(weight, bias, packed, inputs.dense, mean))
                    release([weight])
                    task.advance()
        if added:
            ctx.notes.append(f"bias_correction: biases that were added take {added:,} bytes")
        if names := ", ".join(site.name for site in left):
            ctx.notes.append(
                "bias_correction: no bias of its own, or activations with a stored scale, not corrected: " + names
            )
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        chosen, _ = self._choose(graph)
        names = {site.name for site in chosen}
        plans = []
        for site in packed_sites(graph):
            size = packed_weight(graph, site).nbytes
            shape = (site.out_features, site.in_features)
            if site.name not in names:
                plans.append(SitePlan(site.name, *shape, "", size, size, "its bias stays as it is"))
                continue
            set_bias(graph, site, torch.empty(site.out_features, device="meta"))
            work = {"dequantize_element": shape[0] * shape[1], "stream_byte": 40 * shape[0] * shape[1]}
            needs = CalibrationNeeds(true_sequential=True, with_dense=True, hessian=False)
            working = 40 * min(shape[0] * shape[1], PIECE_ELEMENTS)
            plans.append(SitePlan(site.name, *shape, "", size, size, "its bias is corrected", work, working, needs))
        return plans

    def _choose(self, graph: GraphModule) -> tuple[list[Site], list[Site]]:
        """Return the linears to correct, and the matched ones that cannot be: no own bias, or activations with a stored
        scale.
        """
        if not packed_sites(graph):
            raise UsageError("bias_correction: no linear is packed; put it after the passes that quantise")
        matched = choose_sites(graph, "bias_correction", None, self.targets, self.ignore, packed_sites)
        shared = {name for name, users in ties(graph).items()}
        served = [
            site for site in matched
            if (self.add or site.bias_name) and site.bias_name not in shared
            and not packed_weight(graph, site).format.has_input_scale
        ]  # fmt: skip
        if not served:
            raise UsageError(
                "bias_correction: none of the linears that `targets` matches has a bias of its own; `add: true` gives "
                "them one"
            )
        return served, [site for site in matched if site not in served]


def _comparable(graph: GraphModule, ctx: Context) -> GraphModule:
    """Return the dense graph, after checking that its tensors still correspond to this graph's.

    Raises:
        CompressorError: there is no dense graph, or a parameter was changed since.
    """
    if ctx.dense is None:
        raise CompressorError("bias_correction: runs in a pipeline, which keeps the dense graph for it")
    packed = {f"{site.name}.{part}" for site in packed_weight_sites(graph) for part in (*PARTS, "bias")}
    own = packed | {site.bias_name for site in packed_weight_sites(graph)}
    before = dict(ctx.dense.named_parameters())
    for name, value in graph.named_parameters():
        if name not in own and before.get(name) is not value:
            raise CompressorError(
                f"bias_correction: {name} was changed after the first linear had been packed, so outputs cannot be "
                "compared with the dense model's; put passes that scale or rotate before all that quantise"
            )
    return ctx.dense
