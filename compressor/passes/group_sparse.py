"""Fine-grained sparsity of convolutions: groups of 32 outputs by 4 inputs are left out (after SparseByteNN, Xu et al.
2023).

    conv.weight [out, in * taps]   becomes   codes of the groups that are kept, and a bit for each group
    every pair of tiles of 16 rows keeps as many groups; a group is the operand of one dot product of four bytes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.graph.sites import Site, weight_sites
from compressor.numerics.sparsity.block_sparsity import largest_blocks
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.sites import choose_sites
from compressor.pipeline.sparse_sites import Allocation, BlockPruning, Inputs

_WORD = 4  # channels of a group


@dataclass(frozen=True)
class GroupSparse(BlockPruning, Pass):
    """Leave out groups of 32 outputs by 4 inputs of convolutions, which their kernel skips, and round others by GPTQ.

    The 32 rows of a pair of tiles keep the same groups, and all pairs of a weight as many.  Depthwise convolutions, and
    those whose channels are not a multiple of four, are left to the passes behind this one.  A layer that would have a
    smaller error in a dense format of no more bytes has a note that says so.

    Attributes:
        scheme: format name that ends with what is left out: ``W8A8_STATIC_B32x4@30``.
        targets: class names, module names or ``re:`` patterns of the convolutions to compress.
        ignore: patterns of convolutions to leave dense.
        importance: what a group is kept for: ``activation``, the size of its contribution to the outputs (as Wanda), or
            ``magnitude``, that of its weights.
        refit: refit what is kept to the outputs that the whole weight had, before it is rounded.
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal; ten times more as long as it is
            not positive definite.
        pack: store the weights in the format of ``scheme``.  Without it they stay dense, with groups of zeros: for a
            training that keeps these, and this pass behind it with the same ``scheme``, which then packs.
        allocate: how much is left out of each layer: ``uniform`` takes the share that ``scheme`` names from each, the
            others at most as many bytes together.  ``owl`` leaves less out where more weights are outliers; ``budget``
            measures each layer at several shares, and an integer programme finds the least sum of their errors (needs
            ``compressor[search]``).
        owl_lambda: shares differ by at most twice that.
        owl_factor: an outlier contributes so many times the mean of its layer's weights.
        schemes: formats that ``budget`` chooses from beside ``scheme``; by default ``scheme`` with half to twice
            as many columns.
    """

    scheme: str = "W8A8_STATIC_B32x4@30"
    targets: str | tuple[str, ...] = "Conv2d"
    ignore: str | tuple[str, ...] = ()
    importance: Literal["activation", "magnitude"] = "activation"
    refit: bool = True
    dampening_frac: float = 0.01
    pack: bool = True
    allocate: Allocation = "uniform"
    owl_lambda: float = 0.08
    owl_factor: float = 5.0
    schemes: tuple[str, ...] = ()

    widths: ClassVar[tuple[Literal[1, 4, 64], ...]] = (4,)
    other: ClassVar[str] = "magnitude, wanda, sparsegpt and alps leave out blocks of 16x1 and 32x64"

    def choose_blocks(self, weight: Tensor, inputs: Inputs, count: int, blocks: ColumnBlocks) -> Tensor:
        """Return the columns that each tile keeps."""
        energy = inputs.hessian if self.importance == "activation" else None
        return largest_blocks(weight, energy, count, blocks)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every convolution that has groups, and say which of those that match have none."""
        left = self._choose(graph)[1]
        ctx.notes += [f"group_sparse: {name} stays as it is: {why}" for name, why in left.items()]
        return super().run(graph, ctx)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Predict what :meth:`run` will do, on a graph without weights."""
        left, plans = self._choose(graph)[1], super().plan(graph, ctx)
        return [replace(plan, note=f"stays dense: {left[plan.site]}") if plan.site in left else plan for plan in plans]

    def _formats(self, graph: GraphModule) -> dict[str, Format]:
        fmt = Format.parse(self.scheme)
        return {site.name: fmt for site in self._choose(graph)[0]}

    def _choose(self, graph: GraphModule) -> tuple[list[Site], dict[str, str]]:
        """Return the sites that have groups, and why others that match have none.

        Raises:
            UsageError: no site that matches has groups.
        """
        fmt = Format.parse(self.scheme)
        sites = choose_sites(graph, "group_sparse", fmt.of_kept, self.targets, self.ignore, weight_sites, "convolution")
        left = {site.name: why for site in sites if (why := _why_dense(site))}
        if len(left) == len(sites):
            raise UsageError(
                "group_sparse: nothing to compress: " + "; ".join(f"{name} {why}" for name, why in left.items())
            )
        return [site for site in sites if site.name not in left], left


def _why_dense(site: Site) -> str:
    """Say why a site has no groups; an empty text if it has."""
    if site.is_depthwise:
        return "depthwise: each output reads one channel, and there are no groups of four"
    args: Any = site.input.args
    is_of_patches = site.input.target is torch.ops.compressor.patches.default
    channels = site.in_features // (prod(args[1]) if is_of_patches else 1)
    return f"{channels} channels are not a multiple of {_WORD}" if channels % _WORD else ""
