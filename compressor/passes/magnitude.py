"""Prune the blocks with the smallest weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compressor.formats.extras import ColumnBlocks
from compressor.numerics.sparsity.block_sparsity import largest_blocks
from compressor.numerics.sparsity.n_of_m import Pattern, largest_entries
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.sparse_sites import Allocation, BlockPruning, Inputs


@dataclass(frozen=True)
class Magnitude(BlockPruning, Pass):
    """Leave out the blocks of 16 rows by one column with the smallest weights, and round the others by GPTQ.

    A yardstick: `wanda`, `sparsegpt` and `alps` look at the inputs as well.
    The 16 rows of a tile keep the same columns, and all tiles of a weight as many.  A linear that would have a smaller
    error in a dense format of no more bytes has a note that says so.

    Attributes:
        scheme: format name that ends with what is left out: blocks (``W8A16_B16x1@70``, or ``W8A8_B32x64@80``, which
            AMX skips), single weights (``W8A16_B1x1@70``), or all but N of M (``W8A16_2:4`` keeps two of every four
            weights of a row).
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        refit: refit what is kept to the outputs that the whole weight had, before it is rounded.
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal; ten times more as long as it is
            not positive definite.
        pack: store the weights in the format of ``scheme``.  Without it they stay dense, with blocks of zeros: for a
            training that keeps these, and one of these passes behind it with the same ``scheme``, which then packs.
        allocate: how much is left out of each linear: ``uniform`` takes the share that ``scheme`` names from each, the
            others at most as many bytes together.  ``owl`` leaves less out where more weights are outliers; ``budget``
            measures each linear at several shares, and an integer programme finds the least sum of their errors (needs
            ``compressor[search]``).
        owl_lambda: shares differ by at most twice that.
        owl_factor: an outlier contributes so many times the mean of its linear's weights.
        schemes: formats that ``budget`` chooses from beside ``scheme``; by default ``scheme`` with half to twice
            as many columns.
    """

    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    refit: bool = True
    dampening_frac: float = 0.01
    pack: bool = True
    allocate: Allocation = "uniform"
    owl_lambda: float = 0.08
    owl_factor: float = 5.0
    schemes: tuple[str, ...] = ()

    def choose_blocks(self, weight: Tensor, inputs: Inputs, count: int, blocks: ColumnBlocks) -> Tensor:
        """Return the columns that each tile keeps."""
        return largest_blocks(weight, None, count, blocks)

    def choose_entries(self, weight: Tensor, inputs: Inputs, pattern: Pattern) -> Tensor:
        """Return which single weights are kept."""
        return largest_entries(weight, None, pattern)
