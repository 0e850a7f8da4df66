"""Mixed precision: give each linear the format with which a budget costs the least loss, then quantise by GPTQ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner, run_outputs, split_samples
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.kinds.encoder_decoder import SampleInputs
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.sites import Site, linear_sites
from compressor.numerics.scale_search import scaled_work
from compressor.passes.gptq import Gptq
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.sensitivities import TOKENS, divergence, sensitivities
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.sites import choose_format, choose_sites, summarise_formats
from compressor.progress import Silent
from compressor.search.formats import BUDGETS, Budget, choose_formats, only_budget


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Measure how much rounding each linear changes the model's predictions, choose formats, and quantise by GPTQ.

    Every linear is rounded alone to the smallest scheme, and the divergence of the model's predictions is measured.
    Its divergence in the other schemes is extrapolated in proportion to the squared error of its own outputs.  The sum
    over all linears is minimised under the budget, exactly, by an integer programme; under a budget of divergence, the
    bytes are minimised.  Give exactly one budget.

    Attributes:
        bits: stored bits per weight, scales and padding included, on average over the matched linears.
        weight_bytes: bytes of all the model's parameters after this pass; a number, or text such as ``4 MB``.
        latency_ms: time of all the model's linears in a decoder's single step (an encoder's 128 tokens, one image),
            each the larger of its bytes at the memory's bandwidth and its operations at peak speed.  Both are measured
            on the machine that compresses, so the choice depends on it.
        kl_divergence: sum of the measured divergences, nats per token; decoders only.
        schemes: names of the formats to choose from.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
    """

    bits: float | None = None
    weight_bytes: float | str | None = None
    latency_ms: float | str | None = None
    kl_divergence: float | None = None
    schemes: tuple[str, ...] = ("W2A16_G64", "W3A16_G128", "W4A16_G128", "W6A16_G128", "W8A16")
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        formats = [choose_format(scheme) for scheme in self.schemes]
        if len(set(formats)) < 2 or len(set(formats)) < len(formats):
            raise UsageError(f"mixed_precision: schemes {', '.join(self.schemes)}: give at least two different ones")
        if self.budget.kind == "bits" and not 1 <= self.budget.limit <= 16:
            raise UsageError(f"mixed_precision: {self.budget} is not between 1 and 16")

    @property
    def budget(self) -> Budget:
        """The one budget that is given."""
        return only_budget("mixed_precision", {kind: getattr(self, kind) for kind in BUDGETS})

    @property
    def formats(self) -> list[Format]:
        """The schemes' formats, the smallest first."""
        return sorted(map(Format.parse, self.schemes), key=lambda fmt: (fmt.packed_bytes(4096, 4096), fmt.name))

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a budget of divergence for anything but decoders, and models of two outputs."""
        info: ModelInfo = graph.meta["model"]
        if info.labels_frames:
            raise UsageError(
                f"mixed_precision: {info.name} gives frames of sounds tokens, and sensitivities are of texts or "
                "pictures of one size; take gptq"
            )
        if info.pair is not None:
            raise UsageError(
                f"mixed_precision: {info.name} has two outputs, of pictures and of texts, and sensitivities are those "
                "of one; take gptq"
            )
        if self.budget.kind == "kl_divergence" and info.kind != "decoder":
            raise UsageError(
                f"mixed_precision: {self.budget}: {info.name} is not a decoder, and its sensitivities are not "
                "divergences of predictions; give bits, weight_bytes or latency_ms"
            )

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; a note states the bits per weight, and the number of linears per format.

        Under a budget of divergence, another note states the expected divergence and the measured one.
        """
        name = "mixed_precision"
        formats = self.formats
        budget = self.budget
        sites = choose_sites(graph, name, formats[-1], self.targets, self.ignore)
        samples = ctx.calibration(name)
        self.requires(graph, ctx)
        before = clone_graph(graph) if budget.kind == "kl_divergence" else None
        costs = sensitivities(graph, ctx, samples.ids, sites, formats)
        chosen = self._choose(graph, ctx, sites, [costs[site.name] for site in sites])
        ctx.notes.append(summarise_formats(name, sites, chosen))
        steps = Gptq(scheme=self.schemes[0])
        plain = {site: fmt.name for site, fmt in chosen.items()}
        with ctx.reporter.task(name, len(sites)) as task:
            blocks = Blocks(ctx, name, self, task, decides=[samples.sha256, plain], chained=True)
            steps.quantize_sites(graph, ctx, name, chosen, blocks)
        graph.recompile()
        if before is not None:
            expected = sum(costs[site.name][formats.index(chosen[site.name])] for site in sites)
            ctx.notes.append(_compare(before, graph, samples.ids, expected, budget))
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear as if all were equally sensitive, on a graph without weights.

        Under a budget of divergence the plan is an upper bound: every linear in the largest format.
        """
        sites = choose_sites(graph, "mixed_precision", self.formats[-1], self.targets, self.ignore)
        costs = [[site.out_features * 4.0**-fmt.bits for fmt in self.formats] for site in sites]
        weights = sum(site.out_features * site.in_features for site in linear_sites(graph))
        if self.budget.kind == "kl_divergence":
            largest = self.formats[-1]
            chosen = {site.name: largest for site in sites}
            ctx.notes.append(
                f"mixed_precision: {self.budget}: formats follow from divergences that the run measures; planned for "
                f"the largest, {largest.name}"
            )
        else:
            chosen = self._choose(graph, ctx, sites, costs)
        plans = Gptq(scheme=self.schemes[0]).plan_formats(graph, chosen, self.ignore)
        return [_with_sensitivity(plan, weights, self.formats) for plan in plans]

    def _choose(
        self, graph: GraphModule, ctx: Context, sites: Sequence[Site], costs: Sequence[Sequence[float]]
    ) -> dict[str, Format]:
        try:
            return choose_formats(graph, sites, self.formats, costs, self.budget, ctx.prices)
        except UsageError as error:
            raise UsageError(f"mixed_precision: {error}") from error


def _compare(before: GraphModule, after: GraphModule, ids: SampleInputs, expected: float, budget: Budget) -> str:
    """Format the sum of the linears' divergences and the measured divergence of the whole model."""
    few = split_samples(before, ids, TOKENS)[0]
    dense, rounded = (next(run_outputs(SegmentRunner(graph, [few]), Silent())) for graph in (before, after))
    measured = divergence(dense, rounded, before.meta["model"].generates)
    text = f"mixed_precision: {budget}: {expected:.3g} nats a token by adding up, {measured:.3g} measured in the end"
    return text if measured <= budget.limit else f"{text}: above the budget"


def _with_sensitivity(plan: SitePlan, weights: int, formats: Sequence[Format]) -> SitePlan:
    """Add to a linear's GPTQ plan the work of measuring its sensitivity: on average half the model's products."""
    if not plan.format:
        return plan
    work = Counter(plan.work)
    for fmt in formats:
        work.update(scaled_work(plan.out_features, plan.in_features, fmt, 0))
    work.update({"matmul_flop": TOKENS * weights})
    return replace(plan, work=dict(work))
