"""Round to nearest: every weight to the nearest point of a min-max grid, without calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.formats import Format
from compressor.packing import PackedWeight, choose_grid, dequantize, pack, round_to_grid
from compressor.pipeline import Context
from compressor.sites import choose_format, choose_sites, compress_site, naming

ChooseGrid: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]


def rtn_quantize(weight: Tensor, fmt: Format, choose: ChooseGrid | None = None) -> PackedWeight:
    """Quantise a float [out, in] weight group by group to the nearest codes.

    Args:
        weight: float [out, in].
        fmt: how it is stored.
        choose: (weight float32 [out, columns of a group], which columns) -> scales float16 [out], zeros uint8 [out]
            or None; left out, the min-max grid.
    Raises:
        CompressorError: the weight holds NaN or inf, or a range that no float16 scale reaches.
    """
    size = fmt.columns(weight.shape[1])
    codes, scales, zeros = [], [], []
    for first in range(0, weight.shape[1], size):
        columns = slice(first, first + size)
        group = weight[:, columns].float()
        scale, zero = choose(group, columns) if choose else choose_grid(group, fmt)
        codes.append(round_to_grid(group, scale, zero, fmt))
        scales.append(scale)
        if zero is not None:
            zeros.append(zero)
    stacked_zeros = torch.stack(zeros, dim=1) if zeros else None
    return pack(torch.cat(codes, dim=1), torch.stack(scales, dim=1), stacked_zeros, fmt)


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
            for site in sites:
                weight = graph.get_parameter(site.weight_name).detach().float()
                with naming(site):
                    packed = rtn_quantize(weight, fmt)
                norm = weight.double().square().sum()
                loss = (weight.double() - dequantize(packed)).square().sum()
                compress_site(graph, ctx, site, packed, "rtn", error=float(loss / norm) if norm > 0 else 0.0)
                task.advance()
        return graph
