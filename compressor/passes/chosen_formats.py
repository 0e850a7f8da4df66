"""Pack each linear in the format that a search chose for it.

puzzle  --architecture, and a format of each linear-->  distill, if any  -->  chosen_formats: GPTQ, or SparseGPT
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import Hessian
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.n_of_m import pattern_of
from compressor.passes.gptq import Gptq
from compressor.passes.sparsegpt import Sparsegpt
from compressor.pipeline.calibrated_sites import Quantized, quantize_calibrated
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.sites import summarise_formats
from compressor.search.joint import chosen

_NAME = "chosen_formats"


@dataclass(frozen=True)
class ChosenFormats(Pass):
    """Quantise each linear by GPTQ in the format that `puzzle` chose for it; SparseGPT where that leaves weights out.

    Attributes:
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal.
    """

    dampening_frac: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.dampening_frac <= 1:
            raise UsageError(f"{_NAME}: dampening_frac {self.dampening_frac} is not between 0 and 1")

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a graph whose formats nothing has chosen."""
        self._formats(graph)

    def _formats(self, graph: GraphModule) -> dict[str, Format]:
        """Return the formats of the linears that are still there and dense."""
        dense, found = {site.name for site in linear_sites(graph)}, chosen(graph)
        if not found:
            raise UsageError(f"{_NAME}: nothing has chosen formats: put `puzzle` with `schemes` in front of it")
        if packed := [name for name in found if name not in dense]:
            raise UsageError(f"{_NAME}: {packed[0]}: an earlier pass has packed or removed it; put {_NAME} first")
        return found

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every linear with a chosen format; a note states how many there are of each."""
        formats, samples = self._formats(graph), ctx.calibration(_NAME)
        sites = [site for site in linear_sites(graph) if site.name in formats]
        ctx.notes.append(summarise_formats(_NAME, sites, formats))
        plain = {name: fmt.name for name, fmt in formats.items()}
        with ctx.reporter.task(_NAME, len(sites)) as task:
            blocks = Blocks(ctx, _NAME, self, task, decides=[samples.sha256, plain], chained=True)
            quantize_calibrated(graph, ctx, _NAME, formats, blocks, self._quantize)
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan the formats that are chosen so far: before the run, that of the whole model."""
        formats = self._formats(graph)
        return Gptq(next(iter(formats.values())).name).plan_formats(graph, formats, ())

    def _quantize(self, weight: Tensor, statistic: Hessian, fmt: Format) -> Quantized:
        if pattern_of(fmt) is None:
            return Gptq(fmt.name, dampening_frac=self.dampening_frac).quantize(weight, statistic, fmt)
        return Sparsegpt(fmt.name, dampening_frac=self.dampening_frac).quantize(weight, statistic, fmt)
