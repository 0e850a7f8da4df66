"""Search an architecture: which attentions and feed-forward networks stay, and how wide, under limits of time and size.

    space -> scores of single changes -> costs of each on the target -> integer programme -> the best of a pool

After Puzzle (Bercovich et al. 2024, arXiv 2411.19146).  Channels are sorted by importance once, each width is a prefix,
and what reads it is refitted.  The chosen graph is dense and smaller: let `distill` follow, and passes that pack.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.kinds.carried import KEPT
from compressor.graph.model import ModelInfo
from compressor.numerics.sparsity.column_removal import Importance
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_untouched
from compressor.pipeline.sites import choose_format
from compressor.pipeline.structured.architecture import Parts, amounts, build, find_parts, naming, sort_parts
from compressor.pipeline.structured.architecture_scores import Scores
from compressor.pipeline.structured.architecture_search import Search, search
from compressor.recipe.gates import parse_amount
from compressor.search.front import check_limits, lowered
from compressor.search.knapsack import require_solver
from compressor.search.programme import Limit, check_reachable
from compressor.search.space import Space, alternatives
from compressor.training.settings import split

_NAME = "puzzle"
_LIMITS = ("latency", "weight_bytes", "cache_bytes", "parameters")


@dataclass(frozen=True)
class Puzzle(Pass):
    """Choose what stands in the place of each attention and each feed-forward network, and build it.

    Each alternative is scored alone, by the divergence of the model's predictions on samples that are held out.  The
    least sum of scores within the limits is found exactly; it, other choices and all architectures that are the same
    in every layer are then scored as wholes, and the best of them is built.  Give at least one limit.

    Attributes:
        latency: of a decoder's step, as a share of the model's at the same format.
        weight_bytes: of all parameters, the blocks' linears in ``scheme``, others as they are; a number, or text such
            as ``4 MB``.
        cache_bytes: of keys and values of one token; a number.
        parameters: a number of them.
        attention: what may stand in the place of an attention beside itself: ``none``.
        ffn: the same of a feed-forward network: ``width:`` and a share of its channels, ``none``.
        scheme: format that a later pass gives the blocks' linears, for times and bytes; none leaves them dense.
        multiple: widths are rounded up to a multiple of this, which kernels like.
        importance: how channels are sorted, as in `ffn_prune`.
        held_out: share of the samples that scores are measured on; the same as `distill` holds out by default.
        keep_first: blocks at the beginning of which nothing goes as a whole.
        keep_last: the same at the end.
        pool: architectures of the programme that are scored as wholes, each two sub-layers from the others.
        budgets: further limits of the one measure, as shares of the model's; the report then has a front of them all.
    """

    inexact = "decides as it runs which layers stay and how wide, on the samples"

    latency: float | None = None
    weight_bytes: float | str | None = None
    cache_bytes: float | None = None
    parameters: float | None = None
    attention: tuple[str, ...] = ("none",)
    ffn: tuple[str, ...] = ("width:0.75", "width:0.5", "width:0.25", "none")
    scheme: str | None = None
    multiple: int = 32
    importance: Importance = "obs"
    held_out: float = 0.1
    keep_first: int = 1
    keep_last: int = 1
    pool: int = 3
    budgets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        given = (self.latency, self.weight_bytes, self.cache_bytes, self.parameters)
        check_limits(_NAME, dict(zip(_LIMITS, given, strict=True)), self.budgets)
        if min(self.keep_first, self.keep_last) < 0 or self.multiple < 1 or self.pool < 1:
            raise UsageError(f"{_NAME}: keep_first and keep_last are not below 0, multiple and pool not below 1")
        if not 0 < self.held_out < 1:
            raise UsageError(f"{_NAME}: held_out {self.held_out:g} is not a share of the samples between 0 and 1")
        if self.scheme is not None:
            choose_format(self.scheme)

    def _space(self, graph: GraphModule) -> tuple[Parts, Space, dict[str, Limit]]:
        """Return the sub-layers, what may stand in the place of each, and the limits but for time's."""
        fmt = None if self.scheme is None else choose_format(self.scheme)
        parts = find_parts(graph, _NAME, self.keep_first, self.keep_last)
        with naming(_NAME):
            space = alternatives(parts.layers, {"attention": self.attention, "ffn": self.ffn}, self.multiple)
        counted = amounts(graph, parts.layers, space, fmt)
        size = None if self.weight_bytes is None else parse_amount("weight_bytes", self.weight_bytes)
        given = {"weight_bytes": size, "cache_bytes": self.cache_bytes, "parameters": self.parameters}
        return parts, space, {name: Limit(*counted[name], most) for name, most in given.items() if most is not None}

    @property
    def runs_samples(self) -> bool:
        """Scores take samples through the graph."""
        return True

    def plans_sizes(self, graph: GraphModule) -> bool:
        """Return that the samples decide."""
        return False

    def sample_runs(self, graph: GraphModule) -> float:
        """Return the runs of all samples: one to sort, and half a run of those held out for each alternative."""
        _, space, _ = self._space(graph)
        return 1 - self.held_out + self.held_out * (1 + sum(len(row) - 1 for row in space) / 2)

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse other models than decoders, an empty space, and limits that no architecture of it meets."""
        self._checked(graph)

    def _checked(self, graph: GraphModule) -> tuple[Parts, Space, dict[str, Limit]]:
        """Return as :meth:`_space`, once nothing is to be refused."""
        info: ModelInfo = graph.meta["model"]
        if info.kind != "decoder":
            raise UsageError(f"{_NAME}: {info.name} is not a decoder of text alone, whose predictions scores compare")
        if any(node.target in KEPT for node in graph.graph.nodes):
            raise UsageError(f"{_NAME}: later layers run kept tokens alone; put it in front of swift_kv")
        require_solver()
        found = self._space(graph)
        with naming(_NAME):
            check_reachable(found[2] | lowered(found[2], self.budgets))
        return found

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Search, and build the architecture; notes state it block by block, and what was foreseen of it."""
        ids = ctx.calibration(_NAME).ids
        parts, space, limits = self._checked(graph)
        assert isinstance(ids, Tensor)  # of a decoder of text
        held, fitted = split(ids, self.held_out, ctx.seed)
        order = sort_parts(graph, ctx, parts, space, fitted, self.importance)
        fmt = None if self.scheme is None else choose_format(self.scheme)
        with naming(_NAME):
            scores = Scores(graph, parts.layers, order, held)
        given = Search(_NAME, parts, space, order, scores, limits, self.latency, fmt, self.budgets)
        build(graph, ctx, _NAME, parts, search(graph, ctx, given, self.pool), order)
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan as if all stayed: the run decides."""
        ctx.notes.append(f"{_NAME}: planned as if all stayed; the run decides on the samples")
        return plan_untouched(graph)
