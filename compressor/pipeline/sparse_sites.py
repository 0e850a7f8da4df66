"""Steps of passes that leave out blocks: check the format, prune on samples, compare at equal bytes, plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import Hessian
from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.formats.weights import GroupScales, Integers
from compressor.numerics.block_sparsity import round_all, round_kept
from compressor.numerics.obs import match_dense
from compressor.numerics.products.bfloat16 import is_coarse
from compressor.numerics.products.deterministic import half_product, quadratic
from compressor.numerics.range_search import Work, observer_work
from compressor.pipeline.calibrated_sites import Quantized, quantize_calibrated
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_sites

ChooseBlocks: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]
"""(weight float32 [out, in], Hessian float32 [in, in], columns to keep) -> int64 [tiles, kept], rising."""


@dataclass(frozen=True)
class Pruning:
    """What a pass does to every linear.

    Attributes:
        name: of the pass.
        scheme: name of a format that leaves out blocks.
        choose: which blocks a weight keeps.
        refit: whether what is kept is refitted to the outputs of the whole weight before it is rounded.
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal.
    """

    name: str
    scheme: str
    choose: ChooseBlocks
    refit: bool
    dampening_frac: float

    @property
    def format(self) -> Format:
        """The scheme's.

        Raises:
            UsageError: it leaves nothing out.
        """
        fmt = Format.parse(self.scheme)
        if fmt.extra(ColumnBlocks) is None:
            raise UsageError(
                f"{self.name}: scheme {self.scheme} leaves nothing out; say how much at its end, such as "
                f"{fmt.name}_B16x1@50: half of the blocks of 16 rows by 1 column"
            )
        return fmt

    def check(self) -> None:
        """Raise a UsageError where the format leaves nothing out or the dampening is none."""
        assert self.format
        if not 0 <= self.dampening_frac <= 1:
            raise UsageError(f"{self.name}: dampening_frac {self.dampening_frac} is not between 0 and 1")

    def sites(self, graph: GraphModule, targets: str | Sequence[str], ignore: str | Sequence[str]) -> dict[str, Format]:
        """Return the formats of the linears that are pruned."""
        found = choose_sites(graph, self.name, self.format.of_kept, targets, ignore)
        return {site.name: self.format for site in found}

    def run(
        self, graph: GraphModule, ctx: Context, step: Pass, targets: str | Sequence[str], ignore: str | Sequence[str]
    ) -> GraphModule:
        """Replace the linears one group of shared inputs after another, and say where fewer bits would do better."""
        formats, samples, begin = self.sites(graph, targets, ignore), ctx.calibration(self.name), len(ctx.records)
        with ctx.reporter.task(self.name, len(formats)) as task:
            blocks = Blocks(ctx, self.name, step, task, decides=samples.sha256, chained=True)
            quantize_calibrated(graph, ctx, self.name, formats, blocks, self._quantize)
        worse = sum(_BETTER in (record.note or "") for record in ctx.records[begin:])
        if worse:
            ctx.notes.append(
                f"{self.name}: {worse} of {len(formats)} linears would have smaller errors in a dense format of no "
                "more bytes (see the notes of the linears); at this sparsity fewer bits pay more than zeros"
            )
        graph.recompile()
        return graph

    def _quantize(self, weight: Tensor, statistic: Hessian, fmt: Format) -> Quantized:
        hessian, cross = statistic.value, statistic.cross
        if cross is not None:
            weight = match_dense(weight, hessian, cross, rounded=is_coarse([fmt.of_kept]))
        kept = self.choose(weight, hessian, fmt.stored_columns(weight.shape[1]))
        packed = round_kept(weight, hessian, kept, fmt, self.dampening_frac, refit=self.refit)
        norm = float(quadratic(weight.double(), hessian)) or 1.0
        error = float(quadratic(weight.double() - dequantize(packed), hessian)) / norm
        notes, dense = [], smaller_dense(fmt, *weight.shape)
        if dense is not None:
            rounded = round_all(weight, hessian, dense, self.dampening_frac)
            other = float(quadratic(weight.double() - dequantize(rounded), hessian)) / norm
            if other < error:
                notes.append(f"{_BETTER} {dense.name}, which takes no more bytes")
        return Quantized(packed, error, None, notes)

    def plan(self, graph: GraphModule, targets: str | Sequence[str], ignore: str | Sequence[str]) -> list[SitePlan]:
        """Predict what :meth:`run` will do, on a graph without weights."""
        formats = self.sites(graph, targets, ignore)
        return plan_sites(graph, formats, ignore, pruning_work, pruning_bytes, CalibrationNeeds(True, True))


_BETTER = "the error would be smaller in"


def smaller_dense(fmt: Format, rows: int, columns: int) -> Format | None:
    """Return the format of integers, with the same activations, with the most bits that takes no more bytes."""
    most = fmt.packed_bytes(rows, columns)
    candidates = [
        Format(Integers(bits), GroupScales(size), fmt.activations)
        for bits in (8, 7, 6, 5, 4, 3, 2)
        for size in (32, 64, 128)
    ]
    fitting = [dense for dense in candidates if dense.packed_bytes(rows, columns) <= most]
    return fitting[0] if fitting else None


def pruning_work(rows: int, columns: int, fmt: Format) -> Work:
    """Return the work of pruning a weight and of rounding it, whole and tile by tile."""
    kept, tiles = fmt.stored_columns(columns), -(-rows // 16)
    work = Counter(observer_work(rows, columns, fmt.of_kept, "mse"))
    work.update(
        {
            "factor64_flop": 4 / 3 * (2 * columns**3 + tiles * kept**3),
            "matmul64_flop": 2 * rows * columns * ((2 + 3 * half_product(columns)) * columns + 3 * kept),
            "matmul_flop": 6 * rows * columns * columns,
            "stream_byte": 8 * (8 * columns**2 + 12 * rows * columns + 6 * tiles * kept**2),
            "rtn_element": 2 * rows * columns,
            "dequantize_element": 3 * rows * columns,
            "sweep_element": 3 * rows * columns,
        }
    )
    return work


def pruning_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Return the bytes that pruning works in: the Hessian and its factor in float64, the weight and its copies."""
    kept = fmt.stored_columns(columns)
    return 8 * (4 * columns**2 + 4 * kept**2 + 6 * rows * columns)
