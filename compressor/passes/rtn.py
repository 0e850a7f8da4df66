"""Round to nearest: every weight to the nearest point of a min-max grid, without calibration.

Only a format with a stored scale of the activations needs calibration samples, for that scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.formats.format import Format
from compressor.formats.outliers import add_outliers, largest
from compressor.formats.packing import PackedWeight, dequantize_rows, pack
from compressor.graph.sites import Site
from compressor.host.tensor_files import release
from compressor.numerics.deterministic import total
from compressor.numerics.grids import choose_grid, round_to_grid, tensor_scale
from compressor.numerics.range_search import ChooseGrid
from compressor.pipeline.input_scales import calibrate_inputs, gathering_for
from compressor.pipeline.pipeline import Context, Task
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import SitePlan, plan_sites, rtn_work, rtn_working_bytes
from compressor.pipeline.sites import by_segment, choose_format, choose_sites, compress_site, naming

_NONE: Mapping[str, Tensor] = MappingProxyType({})


def rtn_quantize(
    weight: Tensor, fmt: Format, choose: ChooseGrid | None = None, outliers: Tensor | None = None
) -> PackedWeight:
    """Quantise a float [out, in] weight group by group to the nearest codes.

    Args:
        weight: float [out, in].
        fmt: how it is stored.
        choose: (weight float32 [out, columns of a group], which columns) -> scales [out] that the format can store,
            zeros uint8 [out] or None; left out, the min-max grid.  The weight is divided by the tensor's scale.
        outliers: where the weights are, bool [out, in], that the format stores as floats; left out, the largest.
    Raises:
        CompressorError: the weight holds NaN or inf, or a range that no float16 scale reaches.
    """
    if fmt.outlier_percent:
        where = largest(weight.abs(), fmt.outliers(*weight.shape)) if outliers is None else outliers
        rest = rtn_quantize(weight.float().masked_fill(where, 0.0), fmt.coded, choose)
        return add_outliers(rest, weight, where, fmt.outlier_percent)
    size = fmt.columns(weight.shape[1])
    codes, scales, zeros, unit = [], [], [], tensor_scale(weight, fmt)
    for first in range(0, weight.shape[1], size):
        columns = slice(first, first + size)
        group = weight[:, columns].float() if unit is None else weight[:, columns].float() / unit
        scale, zero = choose(group, columns) if choose else choose_grid(group, fmt)
        codes.append(round_to_grid(group, scale, zero, fmt))
        scales.append(scale)
        if zero is not None:
            zeros.append(zero)
    stacked_zeros = torch.stack(zeros, dim=1) if zeros else None
    return pack(torch.cat(codes, dim=1), torch.stack(scales, dim=1), stacked_zeros, fmt, unit)


def weight_error(weight: Tensor, packed: PackedWeight) -> float:
    """||W - Q||^2 / ||W||^2, in float64."""
    loss = norm = 0.0
    for rows, values in dequantize_rows(packed):
        dense = weight[rows].double()
        loss, norm = loss + float(total((dense - values).square())), norm + float(total(dense.square()))
    return loss / norm if norm > 0 else 0.0


def round_sites(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    sites: Sequence[Site],
    task: Task,
    quantize: Callable[[Site, Tensor], PackedWeight],
    input_scales: Mapping[str, Tensor] = _NONE,
) -> None:
    """Replace linears one after another, each recorded with the error of its weight.

    Args:
        quantize: (site, weight float32 [out, in]) -> what it is stored as.
        input_scales: of :func:`compressor.pipeline.input_scales.calibrate_inputs`.
    """
    for site in sites:
        stored = graph.get_parameter(site.weight_name).detach()
        weight = stored.float()
        with naming(site):
            packed = quantize(site, weight).fed_with(input_scales.get(site.name))
        compress_site(graph, ctx, site, packed, pass_name, error=weight_error(weight, packed))
        release([stored])
        task.advance()


@dataclass(frozen=True)
class Rtn:
    """Round the weights of the matched linears to the nearest point of their grids.

    Attributes:
        scheme: format name, such as ``W4A16_G128``.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        group_size: columns a scale; 0 keeps the scheme's.
    """

    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    group_size: int = 0

    def __post_init__(self) -> None:
        choose_format(self.scheme, self.group_size)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the weight (||W - Q||^2 / ||W||^2)."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "rtn", fmt, self.targets, self.ignore)
        with ctx.reporter.task("rtn", len(sites)) as task:
            scales = calibrate_inputs(graph, ctx, "rtn", {site.name: fmt for site in sites})
            learnt_from = ctx.calibration("rtn").sha256 if scales else None
            blocks = Blocks(ctx, "rtn", self, task, decides=learnt_from, chained=False)
            for block in by_segment(graph, sites):
                if blocks.restore(graph, block):
                    continue
                round_sites(graph, ctx, "rtn", block, task, lambda _, weight: rtn_quantize(weight, fmt), scales)
                blocks.keep(graph, block)
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """What :meth:`run` will do, on a graph without weights."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "rtn", fmt, self.targets, self.ignore)
        return plan_sites(
            graph, {site.name: fmt for site in sites}, self.ignore, rtn_work, rtn_working_bytes, gathering_for(fmt)
        )
