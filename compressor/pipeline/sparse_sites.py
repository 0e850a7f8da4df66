"""Steps of passes that leave out blocks: check the format, prune on samples, compare at equal bytes, plan."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import Hessian
from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.formats.weights import GroupScales, Integers
from compressor.numerics.obs import match_dense
from compressor.numerics.products.bfloat16 import is_coarse
from compressor.numerics.products.deterministic import half_product, quadratic
from compressor.numerics.range_search import Work, observer_work
from compressor.numerics.sparsity.block_sparsity import (
    dampened_factor,
    left_blocks,
    only_kept,
    round_columns,
    round_kept,
)
from compressor.pipeline.calibrated_sites import Quantized, enough_dampening, quantize_calibrated
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites, plan_untouched
from compressor.pipeline.sites import choose_sites

_BETTER = "the error would be smaller in"
_DENSE = "blocks become zero; it stays dense"


@dataclass(frozen=True)
class Inputs:
    """Moments of a linear's inputs.

    Attributes:
        hessian: float32 [in, in].
        factor: of its inverse, float64 [in, in] (:func:`compressor.numerics.sparsity.block_sparsity.dampened_factor`).
        dampening_frac: fraction of the mean diagonal that was added for that.
    """

    hessian: Tensor
    factor: Tensor
    dampening_frac: float


class BlockPruning(Pass):
    """What passes have in common that leave out blocks: all but the choice.  The options are those of each pass.

    Attributes:
        scheme: name of a format that leaves out blocks.
        targets, ignore: patterns of linears.
        refit: whether what is kept is refitted to the outputs of the whole weight before it is rounded.
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal.
        pack: whether the weights are stored in the format; otherwise they stay dense, with zeros.
        width: columns of the blocks that the pass leaves out.
        other: what leaves out blocks of another width, for messages.
    """

    width: ClassVar[Literal[1, 4]] = 1
    other: ClassVar[str] = "group_sparse leaves out blocks of 32x4"
    scheme: str
    targets: str | tuple[str, ...]
    ignore: str | tuple[str, ...]
    refit: bool
    dampening_frac: float
    pack: bool

    @abstractmethod
    def choose_blocks(self, weight: Tensor, inputs: Inputs, count: int) -> Tensor:
        """Return the columns that each tile keeps, rising: int64 [tiles, count].

        Args:
            weight: float32 [out, in].
            inputs: of the linear, as the samples have them.
            count: columns to keep.
        """

    def choosing_work(self, rows: int, columns: int, kept: int) -> Work:
        """Return the work of :meth:`choose_blocks`, beyond what all of these passes do."""
        return {}

    def __post_init__(self) -> None:
        fmt, wanted = Format.parse(self.scheme), ColumnBlocks(50, self.width)
        if (blocks := fmt.extra(ColumnBlocks)) is None:
            raise UsageError(
                f"{self._name}: scheme {self.scheme} leaves nothing out; say how much at its end, such as "
                f"{fmt.name}{wanted.suffix}: half of the blocks of {wanted.shape}"
            )
        if blocks.width != self.width:
            raise UsageError(f"{self._name}: scheme {self.scheme}: takes _B{wanted.shape}@...; {self.other}")
        if not 0 <= self.dampening_frac <= 1:
            raise UsageError(f"{self._name}: dampening_frac {self.dampening_frac} is not between 0 and 1")

    @property
    def _name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear, and say where fewer bits would do better.

        The records' errors are those of the sites' outputs over the samples.
        """
        formats, samples, begin = self._formats(graph), ctx.calibration(self._name), len(ctx.records)
        with ctx.reporter.task(self._name, len(formats)) as task:
            blocks = Blocks(ctx, self._name, self, task, decides=samples.sha256, chained=True)
            quantize_calibrated(graph, ctx, self._name, formats, blocks, self._quantize)
        worse = sum(_BETTER in (record.note or "") for record in ctx.records[begin:])
        if worse:
            ctx.notes.append(
                f"{self._name}: {worse} of {len(formats)} linears would have smaller errors in a dense format of no "
                "more bytes (see the notes of the linears); at this sparsity fewer bits pay more than zeros"
            )
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Predict what :meth:`run` will do, on a graph without weights."""
        needs, formats = CalibrationNeeds(True, True), self._formats(graph)
        if self.pack:
            return plan_sites(graph, formats, self.ignore, self._work, pruning_bytes, needs)
        plans = plan_untouched(graph)
        for number, plan in enumerate(plans):
            if (fmt := formats.get(plan.site)) is not None:
                shape = (plan.out_features, plan.in_features)
                work, working_bytes = dict(self._work(*shape, fmt)), pruning_bytes(*shape, fmt)
                plans[number] = replace(plan, note=_DENSE, work=work, working_bytes=working_bytes, needs=needs)
        return plans

    def _formats(self, graph: GraphModule) -> dict[str, Format]:
        """Return the formats of the linears that are pruned."""
        fmt = Format.parse(self.scheme)
        found = choose_sites(graph, self._name, fmt.of_kept, self.targets, self.ignore)
        return {site.name: fmt for site in found}

    def _work(self, rows: int, columns: int, fmt: Format) -> Work:
        return Counter(pruning_work(rows, columns, fmt)) + Counter(
            self.choosing_work(rows, columns, fmt.stored_columns(columns))
        )

    def _quantize(self, weight: Tensor, statistic: Hessian, fmt: Format) -> Quantized:
        hessian, cross, columns = statistic.value, statistic.cross, weight.shape[1]
        least, notes = enough_dampening(statistic.tokens, columns, self.dampening_frac)
        kept = left_blocks(weight, fmt.stored_columns(columns), ColumnBlocks(50, self.width))
        if cross is not None:
            weight = match_dense(weight, hessian, cross, rounded=is_coarse([fmt.of_kept]))
        factor, damp = dampened_factor(hessian, least)
        if kept is None:
            kept = self.choose_blocks(weight, Inputs(hessian, factor, damp), fmt.stored_columns(columns))
        stored: PackedWeight | Tensor
        if self.pack:
            stored, damp = round_kept(weight, hessian, kept, fmt, damp, refit=self.refit)
            values, dense = dequantize(stored), smaller_dense(fmt, *weight.shape)
        else:
            stored, damp = only_kept(weight, hessian, kept, damp, refit=self.refit)
            values, dense = stored, None
        if damp > least:
            notes.append(f"dampening raised to {damp:g}: the Hessian is not positive definite with {least:g}")
        if dead := int((torch.diagonal(hessian) <= 0).sum()):
            notes.append(f"{dead} inputs are zero in all samples")
        norm = float(quadratic(weight.double(), hessian)) or 1.0
        error = float(quadratic(weight.double() - values, hessian)) / norm
        if dense is not None:
            rounded = round_columns(weight.double(), hessian.double(), factor, dense)
            other = float(quadratic(weight.double() - dequantize(rounded), hessian)) / norm
            if other < error:
                notes.append(f"{_BETTER} {dense.name}, which takes no more bytes")
        return Quantized(stored, error, None, notes)


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
            "factor64_flop": 4 / 3 * (columns**3 + tiles * kept**3),
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
