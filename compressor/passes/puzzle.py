"""Search an architecture: which parts of blocks stay, and how wide, under limits of time, memory and size.

    space -> weights of each alternative -> scores of single changes -> costs of each on the target
          -> integer programme, one scenario after the other -> the best of a pool

After Puzzle (Bercovich et al. 2024, arXiv 2411.19146).  Channels are sorted by importance once, each width is a prefix,
and what reads it is refitted, then trained.  The chosen graph is dense: let `distill` follow, and passes that pack.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.host.digests import digest
from compressor.numerics.sparsity.column_removal import Importance
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_untouched
from compressor.pipeline.sites import choose_format
from compressor.pipeline.structured.architecture import build, formats_of, naming
from compressor.pipeline.structured.architecture_formats import Problem, rounded_starts, state_problem
from compressor.pipeline.structured.architecture_scores import Scores, check_held_out
from compressor.pipeline.structured.architecture_search import Depth, Search, rank_removals, search
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.pipeline.structured.costs.foreseen import searched_samples, timed_graphs
from compressor.pipeline.structured.costs.memory import memory_counter
from compressor.search.joint import check_schemes, set_chosen
from compressor.search.knapsack import require_solver
from compressor.search.options import LimitOptions, SpaceOptions
from compressor.search.scenarios import scenarios
from compressor.search.space import Starts
from compressor.training.candidates import CandidateOptions, train_candidates
from compressor.training.settings import split, spread

_NAME = "puzzle"
_OF_CHOICE = {*(one.name for one in fields(LimitOptions)), "scheme", "schemes", "depth", "pool"}
"""Options that decide no weights of alternatives."""


@dataclass(frozen=True, kw_only=True)
class Puzzle(LimitOptions, SpaceOptions, CandidateOptions, Pass):
    """Choose what stands in the place of each attention, feed-forward network or block of convolutions, and build it.

    Each alternative is scored alone, by the divergence of the model's predictions on samples that are held out.  The
    least sum of scores within the limits is found exactly; it, other choices and all architectures that are the same
    in every layer are then scored as wholes, and the best of them is built.  Give at least one limit.

    Attributes:
        scheme: format that a later pass gives the blocks' linears, for times and bytes; none leaves them dense.
        schemes: further formats, such as leave out single weights too (``W8A16_2:4``): each alternative is one in each
            of them and in ``scheme``, scored as it is rounded; let `chosen_formats` follow, which packs.
        importance: how channels are sorted, as in `ffn_prune`.
        held_out: share of the samples that scores are measured on; the same as `distill` holds out by default.
        depth: how the sub-layers that go are ranked, one after the other, as in `skip_layers`: each number of them is a
            scenario of the programme, beside those that go by their scores; ``none`` has no such scenarios.
        pool: architectures of the programme that are scored as wholes, each two sub-layers from the others.
    """

    inexact = "decides as it runs which layers stay and how wide, on the samples"

    scheme: str | None = None
    schemes: tuple[str, ...] = ()
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
        _ = self._formats
        self.check_training(_NAME)

    @property
    def _formats(self) -> tuple[Format | None, list[Format]]:
        """Return the format of all linears, and those to choose among, if there are several."""
        fmt = None if self.scheme is None else choose_format(self.scheme)
        return fmt, check_schemes(_NAME, self.scheme, self.schemes)

    def _problem(self, graph: GraphModule) -> Problem:
        """Return the sub-layers, what may stand in the place of each, and the limits but for time's."""
        return state_problem(graph, _NAME, self, self, *self._formats)

    @property
    def runs_samples(self) -> bool:
        """Scores take samples through the graph."""
        return True

    def plans_sizes(self, graph: GraphModule) -> bool:
        """Return that the samples decide."""
        return False

    def forward_samples(self, graph: GraphModule, samples: int) -> float:
        """Return what sorting, training, ranking and scoring take."""
        space, count = self._problem(graph).joined, min(samples, self.samples or samples)
        return searched_samples(space, count, self.held_out, self.steps > 0, self.latency is not None)

    def timed_graphs(self, graph: GraphModule) -> int:
        """Return the graphs with single changes, and the wholes, where time is limited."""
        return 0 if self.latency is None else timed_graphs(graph, self._problem(graph))

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse other models than decoders and classifiers, an empty space, and limits that nothing of it meets."""
        require_solver()
        self._problem(graph)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Search, and build the architecture; notes state it block by block, and what was foreseen of it."""
        ids, given, memory = ctx.calibration(_NAME).ids, self._problem(graph), self.most_memory
        assert isinstance(ids, Tensor)  # of a decoder of text, or of images
        parts, space = given.parts, given.space
        if memory is not None:
            memory_counter(ctx, _NAME)  # refuses now, rather than once all is trained
        held, fitted = split(spread(ids, self.samples, _NAME), self.held_out, ctx.seed)
        with naming(_NAME):
            check_held_out(held)
        starts = sort_parts(graph, ctx, parts, space, fitted, self.importance)
        options = {name: value for name, value in asdict(self).items() if name not in _OF_CHOICE}
        if self.steps:
            key = digest(ctx.state, _NAME, options, ctx.calibration(_NAME).sha256, ctx.seed)
            starts = train_candidates(graph, ctx, _NAME, parts, space, starts, fitted, self.settings, key)
        few = fitted[: len(held)]
        scored: Starts = rounded_starts(graph, ctx, parts.layers, given.joined, starts, few) if self.schemes else starts
        turns = scenarios(given.joined, rank_removals(graph, ctx, _NAME, parts, space, few, self.depth))
        scores, fmt = Scores(graph, parts.layers, scored, held), self._formats[0]
        wanted = Search(
            _NAME, parts, given.joined, scored, scores, given.limits, self.latency, memory, fmt, self.budgets, turns,
            options,
        )  # fmt: skip
        picks = search(graph, ctx, wanted, self.pool)
        set_chosen(graph, formats_of(graph, parts.layers, picks))
        build(graph, ctx, _NAME, parts, [one.plain for one in picks], starts)
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan as if all stayed: the run decides."""
        ctx.notes.append(f"{_NAME}: planned as if all stayed; the run decides on the samples")
        if self.schemes:
            given = self._problem(graph)
            set_chosen(graph, formats_of(graph, given.parts.layers, [row[0] for row in given.joined]))
        return plan_untouched(graph)
