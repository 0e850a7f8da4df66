"""GPTQ: quantise column by column; later columns compensate the error of earlier ones (Frantar et al. 2022, arXiv
2210.17323)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import ChannelHessian, Hessian
from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.outliers import largest
from compressor.formats.packing import PackedWeight, dequantize
from compressor.formats.planes import TwoPlanes
from compressor.graph.sites import weight_sites
from compressor.numerics.channels.obs import match_dense_channels, quantize_channels
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.obs import column_blocks, gptq_work, gptq_working_bytes, inverse_factor, match_dense, sweep
from compressor.numerics.planes import sweep_planes, upper_weight
from compressor.numerics.products.bfloat16 import is_coarse
from compressor.numerics.products.deterministic import quadratic, total
from compressor.numerics.range_search import ChooseGrid, Observer, chooser
from compressor.pipeline.calibrated_sites import Quantized, enough_dampening, output_loss, quantize_calibrated
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_format, choose_sites

_MOST_DAMPENING = 1e3
_EXACT_DAMPENING = 1e-6  # then the condition is at most 1e6 times the columns, and ||E||^2 exact but for 1e-5
_CLEAR = 0.99  # of the loss of round to nearest; what is above is computed once more by its definition


@dataclass(frozen=True)
class GptqInfo:
    """Facts about the quantisation of one weight.

    Attributes:
        error: tr((W - Q) H (W - Q)^T) / tr(W H W^T), the relative squared error of the site's outputs; of codes in two
            planes, that of the upper plane alone is added.
        rtn_error: the same for round to nearest.
        dampening_frac: the fraction of mean(diag H) that the diagonal was raised by.
        method: ``gptq``, or ``rtn`` where that had the smaller error and was kept.
        dead_columns: inputs that were zero in all samples; their weights are rounded to nearest.
    """

    error: float
    rtn_error: float
    dampening_frac: float
    method: str
    dead_columns: int


def gptq_quantize(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    *,
    actorder: bool = True,
    static_groups: bool = True,
    dampening_frac: float = 0.01,
    observer: Observer = "mse",
    blocksize: int = 128,
) -> tuple[PackedWeight, GptqInfo]:
    """Quantise column after column, spreading each column's error over the columns after it.

    All arithmetic is float64, but for the norm that errors are relative to.  The result is never worse under
    ``hessian`` than round to nearest: where it would be, the codes of round to nearest are returned and the info says
    so.

    Args:
        weight: float [out, in].
        hessian: float32 [in, in], a positive multiple of X^T X.
        actorder: quantise columns by falling diag(H).
        static_groups: take every group's grid from the original weight, before any column is quantised;
            otherwise from the compensated weight when the group begins.
        dampening_frac: fraction of mean(diag H) added to the diagonal; ten times more as long as the
            factorisation fails or the result is worse than round to nearest.
        observer: how a group's grid is chosen: ``minmax``, ``mse`` or ``output`` (see
            :mod:`compressor.numerics.range_search`).
        blocksize: columns between two updates of the whole remainder (speed only).
    Raises:
        UsageError: ``actorder`` without ``static_groups`` (columns of a group would have to lie apart, which
            the packed layout cannot express).
        CompressorError: weight or Hessian hold NaN or inf.
    """
    in_features = weight.shape[1]
    if actorder and not static_groups and fmt.groups(in_features) > 1:
        raise UsageError(
            "gptq: actorder needs static_groups: with grids chosen on the way, the columns of one group would lie "
            "apart and the stored weight would need an index; set static_groups, or actorder to false"
        )
    if not bool(torch.isfinite(hessian).all()):
        raise CompressorError("gptq: the Hessian holds NaN or inf: the site's inputs overflow on these samples")
    problem = _Problem.of(weight, hessian, fmt)
    order = torch.arange(in_features)
    if actorder:
        order = torch.argsort(torch.diagonal(problem.H), descending=True, stable=True)
    blocks = list(column_blocks(in_features, fmt.columns(in_features), blocksize))
    choose = chooser(observer, problem.H, fmt)
    start = rtn_quantize(weight, fmt, choose, problem.outliers)
    rtn = rtn_quantize(weight, fmt, outliers=problem.outliers)
    rtn_loss = problem.true_loss(rtn)
    found, loss, damp = problem.solve(start, order, blocks, None if static_groups else choose, dampening_frac, rtn_loss)
    norm = float(quadratic(weight.float(), problem.H))  # only for the record
    info = GptqInfo(
        error=loss / norm if norm > 0 else 0.0,
        rtn_error=rtn_loss / norm if norm > 0 else 0.0,
        dampening_frac=damp,
        method="rtn" if found is None else "gptq",
        dead_columns=int(problem.dead.sum()),
    )
    return found or rtn, info


@dataclass(frozen=True)
class _Problem:
    """Hold one linear's weight and Hessian in the paper's symbols.

    Attributes:
        W: float64 [out, in].
        H: float32 [in, in], a positive multiple of X^T X, with zeros for dead inputs.
        dead: bool [in], inputs that are always zero.
        mean: of the diagonal of H, over inputs that are not dead; 1 where all are.
        outliers: weights that are stored as floats, None where the format has none.
    """

    W: Tensor
    H: Tensor
    dead: Tensor
    mean: float
    outliers: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, hessian: Tensor, fmt: Format) -> _Problem:
        """Set dead inputs apart, and choose the outliers by |W| sqrt(diag H)."""
        dead, H = torch.diagonal(hessian) <= 0, hessian  # a copy in float64 would be the largest thing in memory
        if bool(dead.any()):
            H = hessian.clone()
            H[dead], H[:, dead] = 0.0, 0.0
        outliers = None
        if fmt.outlier_percent:
            outliers = largest(weight.abs() * torch.diagonal(H).sqrt(), fmt.outliers(*weight.shape))
        mean = float(torch.diagonal(H)[~dead].double().mean()) if not bool(dead.all()) else 1.0
        return cls(weight.double(), H, dead, mean, outliers)

    def solve(
        self,
        start: PackedWeight,
        order: Tensor,
        blocks: list[tuple[int, int]],
        choose: ChooseGrid | None,
        damp: float,
        rtn_loss: float,
    ) -> tuple[PackedWeight | None, float, float]:
        """Sweep over the columns, with ten times the dampening as long as that fails or loses against round to nearest.

        Returns:
            The weight (None where nothing beats round to nearest), its loss, and the last dampening.
        """
        while damp <= _MOST_DAMPENING:
            try:
                Hinv = inverse_factor(self.H, self.dead, order, self.mean, damp)
                if start.format.extra(TwoPlanes) is not None:
                    packed, squares = sweep_planes(self.W, Hinv, start, order, blocks)
                else:
                    packed, squares = sweep(self.W, Hinv, start, order, blocks, choose, self.outliers)
                loss = self.loss(packed, squares, damp, rtn_loss)
            except CompressorError:
                loss = math.inf  # not positive definite, or the compensation ran away
            if loss <= rtn_loss:
                return packed, loss, damp
            damp = damp * 10 if damp > 0 else 1e-6
        return None, rtn_loss, damp

    def loss(self, packed: PackedWeight, squares: float, damp: float, rtn_loss: float) -> float:
        """Return tr((W - Q) H (W - Q)^T); from the sweep's squared errors, where these are exact enough to decide.

        The sweep's errors are those under H + damp: the diagonal's share is taken off again.
        """
        loss = math.inf
        is_one = packed.format.extra(TwoPlanes) is None
        if damp >= _EXACT_DAMPENING and self.outliers is None and is_one:
            shift = self.mean * (damp + self.dead.double())  # of the diagonal
            loss = max(0.0, squares - float(total((self.W - dequantize(packed)).square() * shift)))
        return loss if loss < _CLEAR * rtn_loss else self.true_loss(packed)

    def true_loss(self, packed: PackedWeight) -> float:
        """Return tr((W - Q) H (W - Q)^T); of codes in two planes, that of the upper one added."""
        loss = output_loss(self.W, packed, self.H)
        if packed.format.extra(TwoPlanes) is None:
            return loss
        return loss + output_loss(self.W, upper_weight(packed), self.H)


@dataclass(frozen=True)
class Gptq(Pass):
    """Quantise the matched linears, depthwise convolutions too, one group of shared inputs after another, on samples.

    Codes in two planes (``W8A8_P4``) are chosen so that their upper halves alone have small errors too.

    Attributes:
        scheme: format name, such as ``W4A16_G128``.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        group_size: columns a scale; 0 keeps the scheme's.
        actorder: quantise the columns with the largest inputs first, on grids taken from the original weight.
        observer: ``mse`` shrinks each grid's range as long as the squared error falls, ``output`` changes it as long as
            the error of the outputs does, of the activations' stored scale as well; ``minmax`` leaves it.
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal; at least 0.1 where a linear has
            more inputs than there are tokens, which its record notes.
        match_dense: aim at the dense model's outputs, so that each linear makes up for the errors of those before
            it; otherwise at the outputs of the dense weight on the inputs as they now are.  Doubles the time and
            the hidden states of calibration.
        true_sequential: let each group of linears see the block's earlier linears quantised; otherwise only
            earlier blocks are.
    """

    costly_options: ClassVar[tuple[str, ...]] = ("match_dense",)
    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    group_size: int = 0
    actorder: bool = True
    observer: Observer = "mse"
    dampening_frac: float = 0.01
    match_dense: bool = True
    true_sequential: bool = True

    def __post_init__(self) -> None:
        choose_format(self.scheme, self.group_size)
        if not 0 <= self.dampening_frac <= 1:
            raise UsageError(f"gptq: dampening_frac {self.dampening_frac} is not between 0 and 1")

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the site's outputs over the samples."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "gptq", fmt, self.targets, self.ignore, weight_sites)
        samples = ctx.calibration("gptq")
        with ctx.reporter.task("gptq", len(sites)) as task:
            blocks = Blocks(ctx, "gptq", self, task, decides=samples.sha256, chained=True)
            self.quantize_sites(graph, ctx, "gptq", {site.name: fmt for site in sites}, blocks)
        graph.recompile()
        return graph

    def quantize_sites(
        self,
        graph: GraphModule,
        ctx: Context,
        pass_name: str,
        formats: Mapping[str, Format],
        blocks: Blocks,
        make_statistic: Callable[[int], Hessian] = Hessian,
    ) -> None:
        """Replace the linears that are named, each by one in its own format.

        Args:
            blocks: that of the pass.
            make_statistic: as for :func:`compressor.pipeline.calibrated_sites.quantize_calibrated`.
        """
        quantize_calibrated(
            graph,
            ctx,
            pass_name,
            formats,
            blocks,
            self.quantize,
            make_statistic=make_statistic,
            true_sequential=self.true_sequential,
            match_dense=self.match_dense,
            observer=self.observer,
        )

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Predict what :meth:`run` will do, on a graph without weights."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "gptq", fmt, self.targets, self.ignore, weight_sites)
        return self.plan_formats(graph, {site.name: fmt for site in sites}, self.ignore)

    def plan_formats(
        self, graph: GraphModule, formats: Mapping[str, Format], ignore: str | Sequence[str]
    ) -> list[SitePlan]:
        """Predict what :meth:`quantize_sites` will do with each linear, on a graph without weights."""
        matched = self.match_dense
        return plan_sites(
            graph,
            formats,
            ignore,
            partial(gptq_work, observer=self.observer, match_dense=matched),
            gptq_working_bytes,
            CalibrationNeeds(self.true_sequential, matched),
        )

    def quantize(self, weight: Tensor, statistic: Hessian | ChannelHessian, fmt: Format) -> Quantized:
        """Return a weight as it is stored in a format, by the statistics of its inputs."""
        if isinstance(statistic, ChannelHessian):
            return self._quantize_channels(weight, statistic, fmt)
        hessian, cross, tokens = statistic.value, statistic.cross, statistic.tokens
        dampening_frac, notes = enough_dampening(tokens, len(hessian), self.dampening_frac)
        if cross is not None:
            weight = match_dense(weight, hessian, cross, rounded=is_coarse([fmt]))
        packed, info = gptq_quantize(
            weight,
            hessian,
            fmt,
            actorder=self.actorder,
            static_groups=self.actorder,
            dampening_frac=dampening_frac,
            observer=self.observer,
        )
        if fmt.extra(TwoPlanes) is not None:
            notes.append("the error is the sum of that of the codes and that of their upper plane alone")
        if info.method == "rtn":
            notes.append("rounded to nearest: GPTQ had no smaller error")
        elif info.dampening_frac > dampening_frac:
            notes.append(f"dampening raised to {info.dampening_frac:g}")
        if info.dead_columns:
            notes.append(f"{info.dead_columns} inputs are zero in all samples; their weights are rounded to nearest")
        return Quantized(packed, info.error, info.rtn_error, notes)

    def _quantize_channels(self, weight: Tensor, statistic: ChannelHessian, fmt: Format) -> Quantized:
        """Quantise a depthwise weight, float32 [channels, taps], each channel with its own Hessian."""
        hessian, cross = statistic.value, statistic.cross
        if cross is not None:
            weight = match_dense_channels(weight, hessian, cross)
        damp, _ = enough_dampening(statistic.tokens, weight.shape[1], self.dampening_frac)
        packed, info = quantize_channels(
            weight, hessian, fmt, actorder=self.actorder, dampening_frac=damp, observer=self.observer
        )
        return Quantized(packed, info.error, info.rtn_error, info.notes)
