"""Wanda: prune what contributes least to the outputs, weights times the size of their inputs (Sun et al. 2023, arXiv
2306.11695)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor.numerics.block_sparsity import largest_blocks
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.sparse_sites import Pruning


@dataclass(frozen=True)
class Wanda(Pass):
    """Leave out the blocks of 16 rows by one column that contribute least to the outputs, and round the others by GPTQ.

    A block contributes the sum of ``|w| ** 2 * ||x|| ** 2`` over its weights.
    The 16 rows of a tile keep the same columns, and all tiles of a weight as many.  A linear that would have a smaller
    error in a dense format of no more bytes has a note that says so.

    Attributes:
        scheme: format name that ends with what is left out: ``W8A16_B16x1@70``.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        refit: refit what is kept to the outputs that the whole weight had, before it is rounded.
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal; ten times more as long as it is
            not positive definite.
    """

    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    refit: bool = True
    dampening_frac: float = 0.01

    def __post_init__(self) -> None:
        self._pruning.check()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the site's outputs over the samples."""
        return self._pruning.run(graph, ctx, self, self.targets, self.ignore)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Predict what :meth:`run` will do, on a graph without weights."""
        return self._pruning.plan(graph, self.targets, self.ignore)

    @property
    def _pruning(self) -> Pruning:
        return Pruning("wanda", self.scheme, self._choose, self.refit, self.dampening_frac)

    def _choose(self, weight: Tensor, hessian: Tensor, count: int) -> Tensor:
        return largest_blocks(weight, hessian, count)
