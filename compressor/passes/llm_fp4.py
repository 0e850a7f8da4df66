"""LLM-FP4: search exponent bits and ranges of floats of few bits (Liu et al. 2023, arXiv 2310.16836)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Inputs
from compressor.errors import CompressorError, UsageError
from compressor.formats.elements import Element
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.formats.rounded_activations import round_activations
from compressor.formats.weights import Floats
from compressor.graph.folding import ScaleTarget
from compressor.graph.sites import Site
from compressor.numerics.input_scales import range_cuts
from compressor.numerics.nearest import awq_quantize, rtn_quantize
from compressor.numerics.products.deterministic import total
from compressor.numerics.range_search import Work
from compressor.numerics.scale_search import KEPT_ROWS, scaled_work, search_scale
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.scaling import scale_groups
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_format, choose_sites, compress_site, error_context
from compressor.progress import Task

_STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROUNDS = 2
_CUTS = 12  # candidate ranges, a factor of 2^(1/4) apart


def layouts(bits: int, least_mantissa: int) -> list[Element]:
    """Return the float types of ``bits`` bits with at least ``least_mantissa`` mantissa bits, by rising exponent bits.

    Those of 4 bits are E1M2, E2M1 and E3M0.
    """
    splits = [(e, bits - 1 - e) for e in range(1, 6)]
    return [Element(f"E{e}M{m}", e, m) for e, m in splits if m >= least_mantissa]


def exponent_shifts(absmax: Tensor, strength: float) -> Tensor:
    """Return powers of two that equalise the channels' ranges: the exponent biases b of section 4.2, to the power
    ``strength``.

    Args:
        absmax: largest absolute inputs, float [in].
        strength: 0 leaves the channels as they are; 1, the paper's choice, equalises them to within a factor of two.
    Returns:
        float64 [in]; 1 for channels without input.
    """
    size = absmax.double()
    used = absmax > 0
    if not bool(used.any()):
        return torch.ones_like(size)
    exponent = torch.log2(torch.where(used, size, 1.0))
    return torch.where(used, torch.exp2(torch.round(strength * (exponent - exponent[used].mean()))), 1.0)


def llm_fp4_quantize(
    weight: Tensor, x: Tensor, mean_square: Tensor, absmax: float, fmt: Format
) -> tuple[PackedWeight, float, float]:
    """Search exponent bits and ranges of weight and activations, in turns, for the least error of the outputs.

    For each layout, each group of the weight gets the range with the least loss under the inputs' mean squares
    (:func:`compressor.numerics.range_search.search_grid`).

    Args:
        weight: float32 [out, in].
        x: rows that the linear reads, float32 [n, in].
        mean_square, absmax: of the inputs; float [in], and the largest of all.
        fmt: bits and granularity; the search begins at its exponent bits.
    Returns:
        The packed weight, its error ||X W^T - X' W'^T||^2 / ||X W^T||^2, and the error of round to nearest without any
        search; the former is never larger.
    Raises:
        CompressorError: weight or inputs hold NaN or inf.
    """
    if not bool(torch.isfinite(mean_square).all()):
        raise CompressorError("its inputs hold NaN or inf on the calibration samples; check the model and the samples")
    y = x @ weight.t()
    act = fmt.activations
    tries = [rtn_quantize(weight, fmt)]
    tries += [awq_quantize(weight, mean_square, replace(fmt, weights=Floats(e))) for e in layouts(fmt.bits, 0)]
    dense = [dequantize(packed) for packed in tries]
    best = 0
    seen = x
    scale = None

    def lost(rows: Tensor, index: int) -> float:
        return float(total((y - rows @ dense[index].t()).double().square()))

    if act is not None:
        own = act.element
        named_first = sorted(layouts(act.bits, 1), key=lambda element: element != own)
        tried = [replace(act, element=element) for element in named_first]
        sides = [(side, step) for side in tried for step in range_cuts(absmax, side, _CUTS)]
        act, scale = sides[0]
        seen = round_activations(x, act, scale)
    start = lost(seen, best)
    for _ in range(_ROUNDS if act is not None else 1):
        best = min(range(len(tries)), key=lambda index: lost(seen, index))
        if act is not None:
            act, scale = min(sides, key=lambda side: lost(round_activations(x, *side), best))
            seen = round_activations(x, act, scale)
    chosen = tries[best]
    norm = float(total(y.double().square())) or 1.0
    packed = chosen.with_parts(replace(chosen.format, activations=act)).with_input_scale(scale)
    return packed, lost(seen, best) / norm, start / norm


@dataclass(frozen=True)
class LlmFp4(Pass):
    """Search exponent bits and ranges of small floats, for weights and activations, by the outputs of each linear.

    With activations, channels are first equalised by powers of two, which are exact.  They are folded into the operator
    in front of the linears and into the weights' columns, like the paper's pre-shifted exponent biases.  Where they
    cannot be folded, channels stay as they are, and the run's report says why.

    Attributes:
        scheme: format name, such as ``FP4_E2M1_G128_AFP4_E2M1_STATIC``, or ``FP4_E2M1_G128`` for weights only; the
            search begins at its exponent bits.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        group_size: columns per scale; 0 keeps the scheme's.
    """

    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    group_size: int = 0

    def __post_init__(self) -> None:
        fmt = choose_format(self.scheme, self.group_size)
        act = fmt.activations
        if fmt.element is None or not fmt.element.is_float or fmt.scale_type != "F16":
            raise UsageError(
                f"llm_fp4: {self.scheme}: weights must be floats with float16 scales, such as FP4_E2M1_G128"
            )
        if act is not None and (act.element is None or act.granularity != "tensor"):
            raise UsageError(
                f"llm_fp4: {self.scheme}: activations must be floats with a calibrated scale: _AFP4_STATIC"
            )

    @property
    def schemes(self) -> list[str]:
        """Names of the formats that a linear may get."""
        fmt = choose_format(self.scheme, self.group_size)
        act = fmt.activations
        sides = [None] if act is None else [replace(act, element=element) for element in layouts(act.bits, 1)]
        return [replace(fmt, weights=Floats(e), activations=side).name for e in layouts(fmt.bits, 0) for side in sides]

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Shift channels, which preserves the graph's function, then replace every matched linear."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "llm_fp4", fmt, self.targets, self.ignore)
        samples = ctx.calibration("llm_fp4")
        with ctx.reporter.task("llm_fp4", (1 if fmt.activations is None else 2) * len(sites)) as task:
            if fmt.activations is not None:
                shift_channels(graph, ctx, sites, fmt, task)
            blocks = Blocks(ctx, "llm_fp4", self, task, decides=samples.sha256, chained=True)
            for group, inputs in CalibrationRun(
                graph, samples.ids, sites, Inputs, CalibrationOptions(store=blocks, spill=ctx.spill)
            ).groups():
                for site in group:
                    weight = graph.get_parameter(site.weight_name).detach().float()
                    absmax = float(inputs.absmax.max())
                    with error_context(site):
                        found = llm_fp4_quantize(weight, inputs.rows, inputs.mean_square, absmax, fmt)
                    packed, error, rtn = found
                    compress_site(graph, ctx, site, packed, "llm_fp4", error=error, error_of="output", rtn_error=rtn)
                    task.advance()
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear with the scheme's exponent bits, on a graph without weights."""
        fmt = choose_format(self.scheme, self.group_size)
        formats = {site.name: fmt for site in choose_sites(graph, "llm_fp4", fmt, self.targets, self.ignore)}
        needs = CalibrationNeeds(true_sequential=True, with_dense=False, hessian=False)
        return plan_sites(graph, formats, self.ignore, _work, _working_bytes, needs)


def shift_channels(graph: GraphModule, ctx: Context, sites: Sequence[Site], fmt: Format, task: Task) -> None:
    """Equalise the ranges of the channels that linears read, with the strength that loses least in ``fmt``.

    Scales are powers of two, so the graph computes the same bits as before.
    """

    def choose(inputs: Inputs, weights: Sequence[Tensor], target: ScaleTarget) -> Tensor:
        shifts = partial(exponent_shifts, inputs.absmax)
        return search_scale(inputs.rows, weights, fmt, _STRENGTHS, shifts, target.shared)

    scale_groups(graph, ctx, "llm_fp4", sites, task, choose)


def _work(rows: int, columns: int, fmt: Format) -> Work:
    size = rows * columns
    act = fmt.activations
    count = len(layouts(fmt.bits, 0))
    sides = 0 if act is None else _ROUNDS * (_CUTS * len(layouts(act.bits, 1)) + count)
    work = Counter({key: count * value for key, value in scaled_work(rows, columns, fmt, 0).items()})
    work.update({"matmul_flop": 2 * KEPT_ROWS * size * (2 + count + sides)})
    if act is not None:
        work.update(scaled_work(rows, columns, fmt, len(_STRENGTHS), chosen=False))
    return work


def _working_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Return the bytes of the weight and its candidates in float32, of their packed forms, and of one candidate's
    codes.
    """
    count = 1 + len(layouts(fmt.bits, 0))
    return (4 * (1 + count) + 9) * rows * columns + count * fmt.packed_bytes(rows, columns)
