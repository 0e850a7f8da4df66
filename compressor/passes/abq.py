"""ABQ-LLM's post-training quantisation at any number of bits (Zeng et al. 2024, arXiv 2408.08554), by search.

The paper learns, block by block, a balance vector (a scale for each input channel) and clipping factors for the
weights' ranges, such that the distribution of the outputs is preserved ("distribution correction").  Here both are
searched for each group of linears that share an input, by the error of their outputs with weights and activations
rounded.
GPTQ, in place of the paper's rounding to nearest, compensates the errors of rounding weights and activations.  Bit
balance is a format, ``BAL2A8`` (:mod:`compressor.formats.format`).

Left out are the compensation vectors of the first and last blocks' down_proj, since GPTQ corrects every linear within
the stored codes, and the loss on attention maps, since nothing is learned through the attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import Hessian, Inputs
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.formats.rounded_activations import round_activations
from compressor.graph.folding import ScaleTarget
from compressor.numerics.nearest import awq_quantize
from compressor.numerics.obs import gptq_work, gptq_working_bytes
from compressor.numerics.range_search import Work
from compressor.numerics.scale_search import output_error, scaled_work
from compressor.passes.gptq import Gptq
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.scaling import scale_groups
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_format, choose_sites

_STRENGTHS = tuple((alpha, beta) for alpha in (0.0, 0.25, 0.5, 0.75) for beta in (0.0, 0.25, 0.5))


def balance_scale(size: Tensor, weights: Sequence[Tensor], alpha: float, beta: float) -> Tensor:
    """Return s_j = size_j^alpha / max|W_j|^beta over all linears that read X, scaled so that max(s) min(s) = 1.

    Args:
        size: size of the inputs' channels, float [in].
        weights: float [out, in] each.
    Returns:
        float64 [in]; channels without inputs or weights get the mean of the others.
    """
    tops = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).double()
    used = (size > 0) & (tops > 0)
    if not bool(used.any()):
        return torch.ones_like(tops)
    scale = torch.where(used, size, 1.0).double().pow(alpha) / torch.where(used, tops, 1.0).pow(beta)
    scale = torch.where(used, scale, scale[used].mean())
    return scale / (scale.max() * scale.min()).sqrt()


def search_balance(fmt: Format, inputs: Inputs, weights: Sequence[Tensor], target: ScaleTarget) -> Tensor:
    """Return the scale, float64 [in], with the least error of the outputs, with ranges clipped and activations rounded.

    The candidates include scales of one, so the result is never worse than those on the kept rows.
    """

    def cut(weight: Tensor, scale: Tensor, fmt: Format) -> PackedWeight:
        return awq_quantize(weight, inputs.mean_square / scale.double().square(), fmt)

    sizes = (inputs.mean_abs,) if fmt.activations is None else (inputs.mean_abs, inputs.absmax)
    tries = [balance_scale(size, weights, *strengths) for size in sizes for strengths in _STRENGTHS]
    return min(tries, key=lambda s: output_error(inputs.rows, weights, target.shared(s).float(), fmt, cut))


class RoundedInputs(Hessian):
    """Hessian of the inputs as the packed linear reads them: rounded, so that GPTQ compensates that error, too.

    For a format with a stored scale the inputs are not rounded: that scale is chosen per site, and this statistic
    serves a group of sites.
    """

    def __init__(self, in_features: int, act: Activations | None) -> None:
        super().__init__(in_features)
        self._act = None if act is None or act.calibrated else act

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Add rows, float32 [tokens, in_features], and the dense graph's rows."""
        super().add(round_activations(x, self._act), dense)


@dataclass(frozen=True)
class Abq(Pass):
    """Balance channels between weights and activations, clip ranges, and quantise by GPTQ.

    The scale is folded into the operator in front of the linears: a norm, a linear, a factor of a product, the values
    of attention.  Where it cannot be folded, weights are quantised unscaled and the run's report says why.

    Attributes:
        scheme: format name, such as ``BIP2A8_G64``.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        group_size: columns per scale; 0 keeps the scheme's.
    """

    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    group_size: int = 0

    def __post_init__(self) -> None:
        choose_format(self.scheme, self.group_size)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Scale all groups of linears, which preserves the graph's function, then replace every matched linear."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "abq", fmt, self.targets, self.ignore)
        samples = ctx.calibration("abq")
        with ctx.reporter.task("abq", 2 * len(sites)) as task:
            scale_groups(graph, ctx, "abq", sites, task, partial(search_balance, fmt))
            blocks = Blocks(ctx, "abq", self, task, decides=samples.sha256, chained=True)
            formats = {site.name: fmt for site in sites}
            statistic = partial(RoundedInputs, act=fmt.activations)
            self._gptq.quantize_sites(graph, ctx, "abq", formats, blocks, statistic)
        graph.recompile()
        return graph

    @property
    def _gptq(self) -> Gptq:
        return Gptq(self.scheme, self.targets, self.ignore, self.group_size)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        fmt = choose_format(self.scheme, self.group_size)
        formats = {site.name: fmt for site in choose_sites(graph, "abq", fmt, self.targets, self.ignore)}
        needs = CalibrationNeeds(true_sequential=True, with_dense=True)
        return plan_sites(graph, formats, self.ignore, _work, gptq_working_bytes, needs)


def _work(rows: int, columns: int, fmt: Format) -> Work:
    tries = len(_STRENGTHS) * (1 if fmt.activations is None else 2)
    work = Counter({key: tries * value for key, value in scaled_work(rows, columns, fmt, 0).items()})
    work.update(scaled_work(rows, columns, fmt, tries, chosen=False))
    work.update(gptq_work(rows, columns, fmt, observer="mse", match_dense=True))
    return work
