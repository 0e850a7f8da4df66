"""Price what running samples through a graph segment by segment takes: work and memory.

A calibrated pass is priced event by event, in the order in which a run executes them
(:mod:`compressor.calibration.steps`), on costs in place of tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from compressor.calibration.gradients import check_backwards
from compressor.calibration.segment_runner import ancestors
from compressor.calibration.steps import MICRO_BATCH_TOKENS, calibration_steps, linears
from compressor.formats.format import Format
from compressor.graph.costs import NodeCost, eager_work, node_costs
from compressor.graph.model import weight_bytes
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import Site
from compressor.numerics.products.bfloat16 import is_coarse
from compressor.numerics.products.deterministic import half_product
from compressor.numerics.range_search import Work
from compressor.pipeline.pipeline import TrainingNeeds
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan

_TRAINED_RUNS = 4  # as long as one: forwards; again, since operators keep no values; and backwards, twice the products
_VECTOR_BYTES = 60  # of element-wise traffic, an input of calibration.Inputs


@dataclass(frozen=True)
class Streaming:
    """Cost of running the samples through the graph once, segment by segment.

    Attributes:
        work: by unit.
        hidden_bytes: hidden states between two segments, of all samples, which may lie on disk.
        live_bytes: these, or the most that is live inside a segment between two runs, where all is held in memory.
        again: work that is done once more where it is not.
        working_bytes: the most that a segment's run, or a pass's arithmetic on its statistics, takes at once.
        weight_bytes: the most weights that one segment has.
    """

    work: Work
    hidden_bytes: int
    working_bytes: int
    weight_bytes: int
    live_bytes: int
    again: Work = field(default_factory=dict)


def plan_calibration(graph: GraphModule, plans: Sequence[SitePlan], samples: int, length: int) -> Streaming:
    """Price a calibrated pass over a graph as it is before the pass.

    The events are those of the run: both walk :func:`compressor.calibration.steps.calibration_steps`.

    Args:
        plans: of the pass; all calibrated ones have the same needs.
        samples, length: of the calibration; of a plain module, whose costs are those of its example, length is 0.
    """
    chosen = {plan.site: plan for plan in plans if plan.needs is not None}
    needs = next(plan.needs for plan in chosen.values() if plan.needs is not None)
    if needs.gradients and not needs.hessian:
        return _plan_gradients(graph, list(chosen.values()), samples, length)
    batch = min(samples, max(1, MICRO_BATCH_TOKENS // length)) if length else len(graph.meta["inputs"][0][0])
    if length and graph.meta["model"].hears:
        batch = 1  # lengths differ
    pricing = _Pricing(chosen, needs, node_costs(graph, batch, length), samples / batch)
    cut, done = segments(graph), 0
    for step in calibration_steps(graph, chosen, needs.true_sequential):
        for behind in cut[done : step.index]:
            pricing.run(behind.nodes)
        done = step.index
        pricing.enter(cut[: step.index + 1])
        sites = {site.name: site for site in linears(cut[step.index])}
        for round_ in step.rounds:
            pricing.show(cut[step.index], [[sites[name] for name in group] for group in round_])
    priced = pricing.result()
    return one_after_another(_plan_backwards(graph, samples, length), priced) if needs.gradients else priced


class _Pricing:
    """Add up what the events of a calibration take.

    Args:
        chosen: the plan of each linear of interest.
        needs: statistics that the pass needs.
        dense: costs of the graph before the pass, of one micro-batch.
        runs: micro-batches.
    """

    def __init__(
        self, chosen: Mapping[str, SitePlan], needs: CalibrationNeeds, dense: dict[Node, NodeCost], runs: float
    ) -> None:
        self._chosen, self._needs, self._dense, self._runs = chosen, needs, dense, runs
        self._current = dict(dense)  # with the linears that are packed by now
        self._graphs = 2 if needs.with_dense else 1
        coarse = is_coarse(Format.parse(plan.format) for plan in chosen.values() if plan.format)
        self._product = "bfloat16_flop" if needs.hessian and coarse else "matmul_flop"
        self._work: dict[str, float] = defaultdict(float)
        self._again: dict[str, float] = defaultdict(float)
        self._passed: set[Node] = set()  # of the segment, those that were run already
        self._working = self._weights = self._hidden = self._live = 0

    def run(self, nodes: Sequence[Node]) -> None:
        """Run nodes over all samples; those that were passed already run only where hidden states lie on disk."""
        for costs in (self._dense, self._current)[2 - self._graphs :]:
            for amounts, ran in ((self._work, False), (self._again, True)):
                work = eager_work(costs[node] for node in nodes if (node in self._passed) is ran)
                for unit, amount in work.items():
                    amounts[self._product if unit == "matmul_flop" else unit] += self._runs * amount

    def enter(self, cut: Sequence[Segment]) -> None:
        """Begin with the last of some segments."""
        self._passed = set()
        for segment in cut:
            self._hidden = max(self._hidden, runs_bytes(segment, self._dense, self._runs))
        self._weights = max(self._weights, _weight_bytes(cut[-1].nodes, self._dense))

    def show(self, segment: Segment, groups: Sequence[Sequence[Site]]) -> None:
        """Run to the inputs of some groups, gather their statistics, and quantise their linears."""
        needed = ancestors([group[0].input for group in groups], set(segment.nodes))
        nodes = [node for node in segment.nodes if node in needed]
        self.run(nodes)
        if self._needs.true_sequential:
            self._passed |= needed
            self._live = max(self._live, live_bytes(segment, self._passed, self._dense, self._runs))
        widest = 4 * max(_elements(self._dense[group[0].node], group[0]) for group in groups)
        statistics = self._gather(groups)
        running = peak_bytes(nodes, self._current)
        if self._graphs == 2:
            running = max(running, peak_bytes(nodes, self._dense) + widest)
        quantising = self._quantise([site for group in groups for site in group])
        self._working = max(self._working, statistics + max(running + widest, quantising))

    def _gather(self, groups: Sequence[Sequence[Site]]) -> int:
        """Add the work of the statistics of some groups; returns their bytes."""
        read = [_elements(self._dense[group[0].node], group[0]) for group in groups]  # in one run
        widths = [group[0].input_width for group in groups]
        if not self._needs.hessian:
            self._work["stream_byte"] += _VECTOR_BYTES * self._runs * sum(read)
            return 0
        elements = 0
        for group, size, width in zip(groups, read, widths, strict=True):
            site = group[0]
            if site.is_depthwise:  # a matrix for each channel, whole
                self._work[self._product] += 2 * self._graphs * self._runs * size * site.in_features
                elements += site.out_features * site.in_features**2
                continue
            halves = half_product(width) + 2 * (self._graphs - 1)  # of a symmetric matrix, and all of the other
            self._work[self._product] += self._runs * size * width * halves
            elements += width**2
        self._work["stream_byte"] += 12 * (self._graphs - 1) * self._runs * sum(read)
        return 4 * self._graphs * elements

    def _quantise(self, sites: Sequence[Site]) -> int:
        """Add the work of quantising linears; returns the most bytes that this takes at once."""
        for site in sites:
            plan = self._chosen[site.name]
            for unit, amount in plan.work.items():
                self._work[unit] += amount
            if plan.format:
                self._current[site.node] = _packed(self._dense[site.node], plan)
        return max((self._chosen[site.name].working_bytes for site in sites), default=0)

    def result(self) -> Streaming:
        """Return the sums."""
        graphs = self._graphs
        live = graphs * max(self._hidden, self._live)
        return Streaming(dict(self._work), graphs * self._hidden, self._working, self._weights, live, dict(self._again))


def _plan_backwards(graph: GraphModule, samples: int, length: int) -> Streaming:
    """Price each sample forwards twice and backwards once, which is two products more for each of a linear's.

    Raises:
        UsageError: gradients are not followed through this model.
    """
    check_backwards(graph.meta["model"])
    costs, cut = node_costs(graph, 1, length), segments(graph)
    runs = samples if length else samples / len(graph.meta["inputs"][0][0])
    work = {unit: 4 * runs * amount for unit, amount in eager_work(costs.values()).items()}
    hidden = sum(runs_bytes(segment, costs, runs) for segment in cut)
    kept = max(sum(costs[node].held_bytes + 12 * costs[node].weights for node in segment.nodes) for segment in cut)
    weights = max(_weight_bytes(segment.nodes, costs) for segment in cut)
    return Streaming(work, 2 * hidden, kept, weights, 2 * hidden)


def _plan_gradients(graph: GraphModule, plans: Sequence[SitePlan], samples: int, length: int) -> Streaming:
    """Price squared gradients of weights, each used as soon as it is there."""
    found = _plan_backwards(graph, samples, length)
    work = Counter(found.work)
    for plan in plans:
        work["stream_byte"] += 12 * samples * plan.out_features * plan.in_features
        work.update(plan.work)
    working = found.working_bytes + max(plan.working_bytes for plan in plans)
    return dataclasses.replace(found, work=dict(work), working_bytes=working)


def one_after_another(first: Streaming, second: Streaming) -> Streaming:
    """Return the cost of one after the other: work adds up, memory is that of the larger."""
    return Streaming(
        dict(Counter(first.work) + Counter(second.work)),
        max(first.hidden_bytes, second.hidden_bytes),
        max(first.working_bytes, second.working_bytes),
        max(first.weight_bytes, second.weight_bytes),
        max(first.live_bytes, second.live_bytes),
        dict(Counter(first.again) + Counter(second.again)),
    )


def plan_forward(graph: GraphModule, windows: int, length: int) -> Streaming:
    """Price all windows through all segments, one window at a time, logits of all tokens included."""
    costs = node_costs(graph, 1, length)
    cut = segments(graph)
    work = {unit: windows * amount for unit, amount in eager_work(costs.values()).items()}
    hidden = max((runs_bytes(segment, costs, windows) for segment in cut), default=0)
    working = max(peak_bytes(segment.nodes, costs) for segment in cut)
    return Streaming(work, hidden, working, max(_weight_bytes(segment.nodes, costs) for segment in cut), hidden)


def plan_training(graph: GraphModule, needs: TrainingNeeds, plans: Sequence[SitePlan], length: int) -> Streaming:
    """Price a training: each sample forwards, and backwards, which runs operators again and twice as much behind.

    A batch's values are all kept until gradients have passed, and have gradients themselves.  On a GPU, this machine's
    memory holds a state of the training at most, and nothing is known of the time.
    """
    held = max(plan.working_bytes for plan in plans)
    if needs.on_gpu:
        return Streaming({}, 0, held, weight_bytes(graph), 0)
    costs = node_costs(graph, needs.batch, length)
    runs = needs.samples / needs.batch * (_TRAINED_RUNS + needs.has_teacher)
    work = {unit: runs * amount for unit, amount in eager_work(costs.values()).items()}
    nodes = [node for segment in segments(graph) for node in segment.nodes]
    working = 2 * sum(costs[node].held_bytes for node in nodes) + held
    return Streaming(work, 0, working, weight_bytes(graph), 0)


def runs_bytes(segment: Segment, costs: Mapping[Node, NodeCost], runs: float) -> int:
    """Return the bytes that are live at the end of a segment, for all runs."""
    if segment.exit is None:
        return 0
    return int(runs * costs[_owner(segment.exit, costs)].held_bytes)


def _owner(node: Node, costs: Mapping[Node, NodeCost]) -> Node:
    """Return the node whose storage a view shows."""
    while (above := costs[node].owner) is not None and above in costs:
        node = above
    return node


def live_bytes(segment: Segment, passed: set[Node], costs: Mapping[Node, NodeCost], runs: float) -> int:
    """Return the bytes of those values, the entry included, that nodes still to run will read, for all runs."""
    rest = [node for node in segment.nodes if node not in passed]
    read = {source for node in rest for source in node.all_input_nodes if source in passed or source is segment.entry}
    owners = {_owner(node, costs) for node in read}
    return int(runs * sum(costs[node].held_bytes for node in owners))


def peak_bytes(nodes: Sequence[Node], costs: Mapping[Node, NodeCost]) -> int:
    """Return the most bytes that are live at once while nodes run in order, each value until its last user is done."""
    inside = {node: i for i, node in enumerate(nodes)}

    def owner(node: Node) -> Node:
        seen = node
        while (above := costs[seen].owner) is not None and above in inside:
            seen = above
        return seen

    last = {owner(node): i for node, i in inside.items()}
    for node, i in inside.items():
        for source in node.all_input_nodes:
            if source in inside:
                last[owner(source)] = i
    live = peak = 0
    dying: dict[int, list[Node]] = {}
    for node, i in last.items():
        dying.setdefault(i, []).append(node)
    for i, node in enumerate(nodes):
        live += costs[node].held_bytes
        peak = max(peak, live + costs[node].working_bytes)
        live -= sum(costs[gone].held_bytes for gone in dying.get(i, ()))
    return peak


def _elements(cost: NodeCost, site: Site) -> int:
    """Return the elements of a linear's input."""
    return int(cost.flops) // (2 * site.out_features)


def _weight_bytes(nodes: Iterable[Node], costs: Mapping[Node, NodeCost]) -> int:
    return sum(costs[node].weight_bytes for node in nodes)


def _packed(cost: NodeCost, plan: SitePlan) -> NodeCost:
    """Return the cost of a linear once it is packed."""
    working = max(cost.working_bytes, 4 * cost.weights)
    return dataclasses.replace(cost, format=plan.format, weight_bytes=plan.bytes_after, cast=0, working_bytes=working)
