"""AdaRound: learn for each weight whether it rounds up or down (Nagel et al. 2020, arXiv 2004.10568)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import Hessian
from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, pack, unpack
from compressor.numerics.learned_rounding import (
    ROUNDING_ROWS,
    ROUNDING_SWEEPS,
    descend,
    learn_rounding,
    neighbours,
    spread_values,
)
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.obs import match_dense
from compressor.numerics.products.bfloat16 import is_coarse
from compressor.numerics.products.deterministic import half_product, quadratic
from compressor.numerics.range_search import Observer, Work, chooser, observer_work
from compressor.pipeline.calibrated_sites import Quantized, output_loss, quantize_calibrated
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_format, choose_sites

_DAMPENING = 0.1  # times the mean of H's diagonal, added to it; 0.01 overfits the noise of 16,000 tokens


@dataclass(frozen=True)
class RoundingInfo:
    """Result of quantising one weight.

    Attributes:
        error: tr((W - Q) H (W - Q)^T) / tr(W H W^T), the relative squared error of the site's outputs.
        rtn_error: the relative squared error of round to nearest on min-max grids.
        method: ``adaptive_rounding``, or ``rtn`` if that had the smaller error and was kept.
        dead_columns: number of inputs that were zero in all samples; their weights are rounded to nearest.
    """

    error: float
    rtn_error: float
    method: str
    dead_columns: int


def adaptive_round(
    weight: Tensor, hessian: Tensor, fmt: Format, *, steps: int = 500, observer: Observer = "mse"
) -> tuple[PackedWeight, RoundingInfo]:
    """Round each weight up or down such that the linear's outputs change least.

    The rounding is learned on the paper's relaxation (:func:`compressor.numerics.learned_rounding.learn_rounding`).
    Then coordinate descent moves single weights to any code as long as the loss falls
    (:func:`compressor.numerics.learned_rounding.descend`).
    Grids stay as they were chosen. The result is never worse under ``hessian`` than round to nearest: if it would be,
    round to nearest is returned and the info says so.

    Args:
        weight: float [out, in].
        hessian: float32 [in, in], a positive multiple of X^T X.
        steps: steps of the optimiser.
        observer: how a group's grid is chosen: ``minmax``, ``mse`` or ``output`` (see
            :mod:`compressor.numerics.range_search`).
    Raises:
        CompressorError: weight or Hessian hold NaN or inf.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise CompressorError(
            "adaptive_rounding: the Hessian holds NaN or inf: the site's inputs overflow on these samples"
        )
    dead = torch.diagonal(hessian) <= 0
    W, H = weight.double(), hessian.to(torch.float64, copy=True)
    H[dead], H[:, dead] = 0.0, 0.0
    mean = torch.diagonal(H)[~dead].mean() if not bool(dead.all()) else torch.ones(())
    damped = H / mean
    damped.diagonal().add_(_DAMPENING)

    choose = chooser(observer, H, fmt)
    rtn, start = rtn_quantize(weight, fmt), rtn_quantize(weight, fmt, choose)
    nearest, scales, zeros = unpack(start)
    unit = start.parts.get("tensor_scale")
    scaled = W if unit is None else W / unit.double()
    low, high = neighbours(scaled, nearest, scales, zeros, fmt)
    floor, ceiling = (spread_values(codes, scales, zeros, fmt) for codes in (low, high))
    codes = torch.where(learn_rounding(scaled, damped, floor, ceiling, steps), high, low)
    codes = descend(scaled, damped, codes, scales, zeros, fmt)
    packed = pack(codes, scales, zeros, fmt, unit)
    loss, rtn_loss, norm = output_loss(W, packed, H), output_loss(W, rtn, H), float(quadratic(W, H))
    kept = loss <= rtn_loss
    info = RoundingInfo(
        error=min(loss, rtn_loss) / norm if norm > 0 else 0.0,
        rtn_error=rtn_loss / norm if norm > 0 else 0.0,
        method="adaptive_rounding" if kept else "rtn",
        dead_columns=int(dead.sum()),
    )
    return packed if kept else rtn, info


@dataclass(frozen=True)
class AdaptiveRounding(Pass):
    """Learn the rounding of the matched linears on calibration samples, one group of shared inputs after another.

    Attributes:
        scheme: format name, such as ``W4A16_G128``.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        group_size: columns per scale; 0 keeps the scheme's.
        steps: steps of the optimiser; time is proportional to them.
        observer: ``mse`` shrinks each grid's range as long as the squared error falls, ``output`` changes it as long as
            the error of the outputs falls, and likewise the activations' stored scale; ``minmax`` keeps the range.
        match_dense: aim at the dense model's outputs (GPTAQ's asymmetric calibration), so that each linear compensates
            the errors of those before it; otherwise at the outputs of the dense weight on the present inputs.  Doubles
            calibration's time and hidden states.
        task_guided: weight the samples' rows, by half, by how far the model's confident predictions move when the
            linear's outputs there do (:mod:`compressor.calibration.guided_rows`).  For decoders, and modules that
            predict classes.
    """

    costly_options: ClassVar[tuple[str, ...]] = ("match_dense",)
    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    group_size: int = 0
    steps: int = 500
    observer: Observer = "mse"
    match_dense: bool = True
    task_guided: bool = False

    def __post_init__(self) -> None:
        fmt = choose_format(self.scheme, self.group_size)
        if fmt.codebook or fmt.outlier_percent:
            raise UsageError(
                f"adaptive_rounding: scheme {self.scheme}: needs grids; use gptq for codebooks and outliers"
            )
        if self.steps < 1:
            raise UsageError(f"adaptive_rounding: steps {self.steps}: give at least 1; 500 do well")

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the site's outputs over the samples."""
        name = "adaptive_rounding"
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, name, fmt, self.targets, self.ignore)
        samples = ctx.calibration(name)
        with ctx.reporter.task(name, len(sites)) as task:
            blocks = Blocks(ctx, name, self, task, decides=samples.sha256, chained=True)
            formats = {site.name: fmt for site in sites}
            quantize_calibrated(
                graph,
                ctx,
                name,
                formats,
                blocks,
                self._quantize,
                match_dense=self.match_dense,
                observer=self.observer,
                task_guided=self.task_guided,
            )
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "adaptive_rounding", fmt, self.targets, self.ignore)
        matched = self.match_dense
        work = partial(adaptive_rounding_work, steps=self.steps, observer=self.observer, match_dense=matched)
        needs = CalibrationNeeds(true_sequential=True, with_dense=matched, gradients=self.task_guided)
        formats = {site.name: fmt for site in sites}
        return plan_sites(graph, formats, self.ignore, work, adaptive_rounding_working_bytes, needs)

    def _quantize(self, weight: Tensor, statistic: Hessian, fmt: Format) -> Quantized:
        hessian, cross = statistic.value, statistic.cross
        target = weight if cross is None else match_dense(weight, hessian, cross, rounded=is_coarse([fmt]))
        packed, info = adaptive_round(target, hessian, fmt, steps=self.steps, observer=self.observer)
        notes = []
        if info.method == "rtn":
            notes.append("rounded to nearest: learned rounding had no smaller error")
        if info.dead_columns:
            notes.append(f"{info.dead_columns} inputs are zero in all samples; their weights are rounded to nearest")
        return Quantized(packed, info.error, info.rtn_error, notes)


def adaptive_rounding_work(
    rows: int, columns: int, fmt: Format, *, steps: int, observer: Observer, match_dense: bool
) -> Work:
    """Return the work of :func:`compressor.passes.adaptive_rounding.adaptive_round`, by unit.

    A step of the optimiser is one product with the Hessian and some forty operators on pieces of the weight.  A sweep
    of the descent is two products, and per column the operations of a GPTQ column.
    """
    size = rows * columns
    chunks = -(-rows // ROUNDING_ROWS)
    work = observer_work(rows, columns, fmt, observer)
    work.update({
        "matmul_flop": (2 * steps + (6 if match_dense else 0)) * size * columns,
        "stream_byte": 400 * steps * size,
        "node": 6 * steps * chunks,
        "matmul64_flop": (3 * half_product(columns) + 4 * ROUNDING_SWEEPS) * size * columns,
        "factor64_flop": 1 / 3 * columns**3 if match_dense else 0,
        "rtn_element": 2 * size,
        "dequantize_element": 6 * size,
        "sweep_element": ROUNDING_SWEEPS * size,
        "sweep_column": ROUNDING_SWEEPS * columns,
    })  # fmt: skip
    return work


def adaptive_rounding_working_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Return the memory of the descent, without the calibration statistics.

    It holds the weight, its transpose, values and gradients in float64, a few of them twice, and the Hessian twice in
    float64 and a half in float32.
    """
    return (4 + 8 * 7 + 4) * rows * columns + 3 * fmt.packed_bytes(rows, columns) + (8 * 2 + 4) * columns**2
