"""FineQuant: choose each weight's group size: smaller groups as long as the error saved is worth the extra scales.

It needs no data (Kim et al. 2023, arXiv 2308.09723).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.formats.weights import LARGEST_GROUP, ChannelScales
from compressor.numerics.nearest import rtn_quantize, rtn_work, rtn_working_bytes, weight_error
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import SitePlan, plan_sites
from compressor.pipeline.sites import by_segment, choose_format, choose_sites, round_sites, summarise_formats

_ROWS = 64  # rows of the random weight that planning uses


def granularities(smallest: Format, columns: int) -> list[Format]:
    """Return formats with one scale per row, then with groups of the powers of two below ``columns``, in falling order.

    Args:
        smallest: the format whose group size ends the list.
    """
    sizes = [1 << power for power in range(LARGEST_GROUP.bit_length())]
    groups = [size for size in reversed(sizes) if smallest.group_size <= size < columns]
    finer = [smallest.with_group_size(size) for size in groups]
    return [dataclasses.replace(smallest, scales=ChannelScales()), *finer]


def finequant_quantize(weight: Tensor, smallest: Format, threshold: float = 1.0) -> PackedWeight:
    """Round to nearest with one scale per row, then halve the weight's group size as long as that pays.

    Halving pays if the bits of precision gained, log2(error before / error after) / 2 of the squared errors, are at
    least ``threshold`` times the extra bits stored per weight.  (One more bit per code halves the error, too, so a
    threshold of 1 stops where a wider code would make better use of the bytes.)

    Args:
        weight: float [out, in].
        smallest: the format at which halving ends.
    Raises:
        CompressorError: the weight holds NaN or inf, or a range that no scale can represent.
    """
    coarse, *finer = granularities(smallest, weight.shape[1])
    packed = rtn_quantize(weight, coarse)
    error = weight_error(weight, packed)
    for fmt in finer:
        halved = rtn_quantize(weight, fmt)
        less = weight_error(weight, halved)
        cost = 8 * (halved.nbytes - packed.nbytes) / weight.numel()
        won = 0.5 * math.log2(error / less) if less > 0 else math.inf
        if error == 0 or won < threshold * cost:
            break
        packed, error = halved, less
    return packed


@dataclass(frozen=True)
class Finequant(Pass):
    """Round the weights of the matched linears to nearest, each with the group size that suits it.

    Attributes:
        scheme: format name with groups, such as ``W4A16_G32``; its group size is the smallest.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        threshold: bits of precision that halving the groups must gain per extra bit stored; more means larger groups.
    """

    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    threshold: float = 1.0

    def __post_init__(self) -> None:
        fmt = choose_format(self.scheme)
        size = fmt.group_size
        if fmt.scale_type != "F16" or size & (size - 1) or fmt.strategy != "group":
            raise UsageError(
                f"finequant: scheme {self.scheme}: groups are halved down to the scheme's; give one with groups of a "
                "power of two columns, such as W4A16_G32 (those of MX and NVFP4 are fixed: use rtn)"
            )
        if not (self.threshold >= 0 and math.isfinite(self.threshold)):
            raise UsageError(f"finequant: threshold {self.threshold:g}: give 0 or more; 1 is usual")

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names of the formats to choose from."""
        return tuple(fmt.name for fmt in granularities(choose_format(self.scheme), LARGEST_GROUP))

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; records have its format, a note counts the linears per format."""
        smallest = choose_format(self.scheme)
        limit = self.threshold
        sites = choose_sites(graph, "finequant", self._coarse, self.targets, self.ignore)
        with ctx.reporter.task("finequant", len(sites)) as task:
            blocks = Blocks(ctx, "finequant", self, task, chained=False)
            for block in by_segment(graph, sites):
                if blocks.restore(graph, block):
                    continue
                round_sites(graph, ctx, "finequant", block, task, lambda _, w: finequant_quantize(w, smallest, limit))
                blocks.keep(graph, block)
        names = {site.name for site in sites}
        chosen = {record.site: Format.parse(record.format) for record in ctx.records if record.site in names}
        ctx.notes.append(summarise_formats("finequant", sites, chosen))
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear as for normally distributed weights, on a graph without weights."""
        smallest = choose_format(self.scheme)
        sites = choose_sites(graph, "finequant", self._coarse, self.targets, self.ignore)
        formats = {site.name: self._expected(site.in_features) for site in sites}

        def work(rows: int, columns: int, fmt: Format) -> dict[str, float]:
            tried = granularities(smallest, columns)
            count = min(tried.index(fmt) + 2, len(tried))
            return {unit: count * amount for unit, amount in rtn_work(rows, columns, fmt).items()}

        plans = plan_sites(graph, formats, self.ignore, work, rtn_working_bytes)
        note = "groups as for normally distributed weights"
        return [dataclasses.replace(p, note="; ".join(filter(None, (p.note, note)))) if p.format else p for p in plans]

    @property
    def _coarse(self) -> Format:
        return granularities(choose_format(self.scheme), 1)[0]

    def _expected(self, columns: int) -> Format:
        weight = torch.randn(_ROWS, columns, generator=torch.Generator().manual_seed(0))
        return finequant_quantize(weight, choose_format(self.scheme), self.threshold).format
