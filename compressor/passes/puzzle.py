"""Search an architecture: which attentions and feed-forward networks stay, and how wide, under limits of time and size.

    space -> weights of each alternative -> scores of single changes -> costs of each on the target
          -> integer programme, one scenario after the other -> the best of a pool

After Puzzle (Bercovich et al. 2024, arXiv 2411.19146).  Channels are sorted by importance once, each width is a prefix,
and what reads it is refitted, then trained.  The chosen graph is dense and smaller: let `distill` follow, and passes
that pack.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.kinds.carried import KEPT
from compressor.graph.model import ModelInfo
from compressor.host.digests import digest
from compressor.numerics.sparsity.column_removal import Importance
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_untouched
from compressor.pipeline.sites import choose_format
from compressor.pipeline.structured.architecture import Parts, amounts, build, find_parts, naming
from compressor.pipeline.structured.architecture_scores import Scores, check_held_out
from compressor.pipeline.structured.architecture_search import Depth, Search, rank_removals, search
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.search.front import lowered
from compressor.search.knapsack import require_solver
from compressor.search.options import LimitOptions, SpaceOptions
from compressor.search.programme import Limit, check_reachable
from compressor.search.scenarios import scenarios
from compressor.search.space import Space, alternatives
from compressor.training.candidates import CandidateOptions, train_candidates
from compressor.training.settings import split

_NAME = "puzzle"
_OF_CHOICE = {*(one.name for one in fields(LimitOptions)), "scheme", "depth", "pool"}
"""Options that decide no weights of alternatives."""


@dataclass(frozen=True, kw_only=True)
class Puzzle(LimitOptions, SpaceOptions, CandidateOptions, Pass):
    """Choose what stands in the place of each attention and each feed-forward network, and build it.

    Each alternative is scored alone, by the divergence of the model's predictions on samples that are held out.  The
    least sum of scores within the limits is found exactly; it, other choices and all architectures that are the same
    in every layer are then scored as wholes, and the best of them is built.  Give at least one limit.

    Attributes:
        scheme: format that a later pass gives the blocks' linears, for times and bytes; none leaves them dense.
        importance: how channels are sorted, as in `ffn_prune`.
        held_out: share of the samples that scores are measured on; the same as `distill` holds out by default.
        depth: how the sub-layers that go are ranked, one after the other, as in `skip_layers`: each number of them is a
            scenario of the programme, beside those that go by their scores; ``none`` has no such scenarios.
        pool: architectures of the programme that are scored as wholes, each two sub-layers from the others.
    """

    inexact = "decides as it runs which layers stay and how wide, on the samples"

    scheme: str | None = None
    importance: Importance = "obs"
    held_out: float = 0.1
    depth: Depth = "perplexity"
    pool: int = 3

    def __post_init__(self) -> None:
        self.check(_NAME)
        self.check_space(_NAME)
        if self.pool < 1:
            raise UsageError(f"{_NAME}: pool {self.pool} is below 1")
        if not 0 < self.held_out < 1:
            raise UsageError(f"{_NAME}: held_out {self.held_out:g} is not a share of the samples between 0 and 1")
        if self.scheme is not None:
            choose_format(self.scheme)
        self.check_training(_NAME)

    def _space(self, graph: GraphModule) -> tuple[Parts, Space, dict[str, Limit]]:
        """Return the sub-layers, what may stand in the place of each, and the limits but for time's."""
        fmt = None if self.scheme is None else choose_format(self.scheme)
        parts = find_parts(graph, _NAME, self.keep_first, self.keep_last)
        with naming(_NAME):
            space = alternatives(parts.layers, self.wanted, self.multiple)
        counted = amounts(graph, parts.layers, space, fmt)
        return parts, space, {name: Limit(*counted[name], most) for name, most in self.most().items()}

    @property
    def runs_samples(self) -> bool:
        """Scores take samples through the graph."""
        return True

    def plans_sizes(self, graph: GraphModule) -> bool:
        """Return that the samples decide."""
        return False

    def sample_runs(self, graph: GraphModule) -> float:
        """Return the runs of all samples: to sort, to train, and half a run of those held out for each alternative."""
        _, space, _ = self._space(graph)
        fitted = (1 - self.held_out) * (2 if self.steps else 1)
        return fitted + self.held_out * (1 + sum(len(row) - 1 for row in space) / 2)

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
        with naming(_NAME):
            check_held_out(held)
        starts, fmt = sort_parts(graph, ctx, parts, space, fitted, self.importance), None
        options = {name: value for name, value in asdict(self).items() if name not in _OF_CHOICE}
        if self.steps:
            key = digest(ctx.state, _NAME, options, ctx.calibration(_NAME).sha256, ctx.seed)
            starts = train_candidates(graph, ctx, _NAME, parts, space, starts, fitted, self.settings, key)
        if self.scheme is not None:
            fmt = choose_format(self.scheme)
        scores = Scores(graph, parts.layers, starts, held)
        ranked = rank_removals(graph, ctx, _NAME, parts, space, fitted[: len(held)], self.depth)
        turns = scenarios(space, ranked)
        given = Search(_NAME, parts, space, starts, scores, limits, self.latency, fmt, self.budgets, turns, options)
        build(graph, ctx, _NAME, parts, search(graph, ctx, given, self.pool), starts)
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan as if all stayed: the run decides."""
        ctx.notes.append(f"{_NAME}: planned as if all stayed; the run decides on the samples")
        return plan_untouched(graph)
