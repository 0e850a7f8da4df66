"""What running samples through a graph segment by segment takes: work and memory.

This follows :func:`compressor.calibration.calibrate.stream` and :mod:`compressor.calibration.segment_runner` step by
step, on costs in place of tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from compressor.calibration.segment_runner import ancestors
from compressor.formats.format import Format
from compressor.graph.costs import NodeCost, eager_work, node_costs
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import Site, group_by_input
from compressor.numerics.bfloat16 import is_coarse
from compressor.numerics.deterministic import half_product
from compressor.numerics.range_search import Work
from compressor.pipeline.site_plan import SitePlan

_VECTOR_BYTES = 60  # of element-wise traffic, an input of calibration.Inputs
_MICRO_BATCH_TOKENS = 2048  # the default of compressor.calibration.calibrate.stream


@dataclass(frozen=True)
class Streaming:
    """What one streaming takes.

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
    """A calibrated pass over a graph as it is before the pass.

    Args:
        plans: of the pass, all with the same gathering.
        samples, length: of the calibration; of a plain module, whose costs are those of its example, length is 0.
    """
    chosen = {plan.site: plan for plan in plans if plan.gathering is not None}
    gathering = next(plan.gathering for plan in chosen.values() if plan.gathering is not None)
    if gathering.gradients and not gathering.squares:
        return _plan_gradients(graph, list(chosen.values()), samples, length)
    coarse = is_coarse(Format.parse(plan.format) for plan in chosen.values() if plan.format)
    product = "bfloat16_flop" if gathering.squares and coarse else "matmul_flop"
    twofold = 2 if gathering.with_dense else 1
    batch = min(samples, max(1, _MICRO_BATCH_TOKENS // length)) if length else len(graph.meta["inputs"][0][0])
    dense = node_costs(graph, batch, length)
    current = dict(dense)
    runs = samples / batch
    work: dict[str, float] = defaultdict(float)
    again: dict[str, float] = defaultdict(float)
    working, weights, hidden, live, done = 0, 0, 0, 0, 0
    cut, passed = segments(graph), set[Node]()

    def run(nodes: Sequence[Node], passed: set[Node]) -> None:
        for costs in (dense, current)[2 - twofold :]:
            for amounts, ran in ((work, False), (again, True)):
                for unit, amount in eager_work(costs[node] for node in nodes if (node in passed) is ran).items():
                    amounts[product if unit == "matmul_flop" else unit] += runs * amount

    for index, segment in enumerate(cut):
        block = [site for site in (*segment.sites, *segment.packed) if site.name in chosen]
        if not block:
            continue
        for behind in cut[done:index]:
            run(behind.nodes, passed)
        done, passed = index, set()
        for behind in cut[: index + 1]:
            hidden = max(hidden, runs_bytes(behind, dense, runs))
        weights = max(weights, _weight_bytes(segment.nodes, dense))
        groups = group_by_input(block)
        rounds = [[group] for group in groups] if gathering.true_sequential else [groups]
        for round_ in rounds:
            needed = ancestors([group[0].input for group in round_], set(segment.nodes))
            nodes = [node for node in segment.nodes if node in needed]
            run(nodes, passed)
            if gathering.true_sequential:
                passed |= needed
                live = max(live, live_bytes(segment, passed, dense, runs))
            read = [_elements(dense[group[0].node], group[0]) for group in round_]  # in one run
            square = sum(group[0].in_features ** 2 for group in round_) if gathering.squares else 0
            products = 0.0  # with one half of a symmetric matrix, and all of the other
            for size, group in zip(read, round_, strict=True):
                products += size * group[0].in_features * (half_product(group[0].in_features) + 2 * (twofold - 1))
            work[product] += runs * products if gathering.squares else 0
            work["stream_byte"] += (12 * (twofold - 1) if gathering.squares else _VECTOR_BYTES) * runs * sum(read)
            statistics = 4 * twofold * square
            widest = 4 * max(read)
            running = max(peak_bytes(nodes, current), peak_bytes(nodes, dense) + widest if twofold == 2 else 0)
            quantising = 0
            for site in (site for group in round_ for site in group):
                plan = chosen[site.name]
                for unit, amount in plan.work.items():
                    work[unit] += amount
                quantising = max(quantising, plan.working_bytes)
                if plan.format:
                    current[site.node] = _packed(dense[site.node], plan)
            working = max(working, statistics + max(running + widest, quantising))
    found = Streaming(dict(work), twofold * hidden, working, weights, twofold * max(hidden, live), dict(again))
    return _one_after_another(_plan_backwards(graph, samples, length), found) if gathering.gradients else found


def _plan_backwards(graph: GraphModule, samples: int, length: int) -> Streaming:
    """Each sample forwards twice and backwards once, which is two products more for each of a linear's."""
    costs, cut = node_costs(graph, 1, length), segments(graph)
    runs = samples if length else samples / len(graph.meta["inputs"][0][0])
    work = {unit: 4 * runs * amount for unit, amount in eager_work(costs.values()).items()}
    hidden = sum(runs_bytes(segment, costs, runs) for segment in cut)
    kept = max(sum(costs[node].held_bytes + 12 * costs[node].weights for node in segment.nodes) for segment in cut)
    weights = max(_weight_bytes(segment.nodes, costs) for segment in cut)
    return Streaming(work, 2 * hidden, kept, weights, 2 * hidden)


def _plan_gradients(graph: GraphModule, plans: Sequence[SitePlan], samples: int, length: int) -> Streaming:
    """Squared gradients of weights, each used as soon as it is there."""
    found = _plan_backwards(graph, samples, length)
    work = Counter(found.work)
    for plan in plans:
        work["stream_byte"] += 12 * samples * plan.out_features * plan.in_features
        work.update(plan.work)
    working = found.working_bytes + max(plan.working_bytes for plan in plans)
    return dataclasses.replace(found, work=dict(work), working_bytes=working)


def _one_after_another(first: Streaming, second: Streaming) -> Streaming:
    return Streaming(
        dict(Counter(first.work) + Counter(second.work)),
        max(first.hidden_bytes, second.hidden_bytes),
        max(first.working_bytes, second.working_bytes),
        max(first.weight_bytes, second.weight_bytes),
        max(first.live_bytes, second.live_bytes),
        dict(Counter(first.again) + Counter(second.again)),
    )


def plan_forward(graph: GraphModule, windows: int, length: int) -> Streaming:
    """All windows through all segments, one window at a time, logits of all tokens included."""
    costs = node_costs(graph, 1, length)
    cut = segments(graph)
    work = {unit: windows * amount for unit, amount in eager_work(costs.values()).items()}
    hidden = max((runs_bytes(segment, costs, windows) for segment in cut), default=0)
    working = max(peak_bytes(segment.nodes, costs) for segment in cut)
    return Streaming(work, hidden, working, max(_weight_bytes(segment.nodes, costs) for segment in cut), hidden)


def runs_bytes(segment: Segment, costs: Mapping[Node, NodeCost], runs: float) -> int:
    """Bytes of what is live at the end of a segment, for all runs."""
    if segment.exit is None:
        return 0
    return int(runs * costs[_owner(segment.exit, costs)].held_bytes)


def _owner(node: Node, costs: Mapping[Node, NodeCost]) -> Node:
    """The node whose storage a view is of."""
    while (above := costs[node].owner) is not None and above in costs:
        node = above
    return node


def live_bytes(segment: Segment, passed: set[Node], costs: Mapping[Node, NodeCost], runs: float) -> int:
    """Bytes of what the rest of a segment reads of the nodes that have been run, and its entry, for all runs."""
    rest = [node for node in segment.nodes if node not in passed]
    read = {source for node in rest for source in node.all_input_nodes if source in passed or source is segment.entry}
    owners = {_owner(node, costs) for node in read}
    return int(runs * sum(costs[node].held_bytes for node in owners))


def peak_bytes(nodes: Sequence[Node], costs: Mapping[Node, NodeCost]) -> int:
    """The most storage that is live at once while nodes run in order, each value until its last user is done."""
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
    """Of a linear's input."""
    return int(cost.flops) // (2 * site.out_features)


def _weight_bytes(nodes: Iterable[Node], costs: Mapping[Node, NodeCost]) -> int:
    return sum(costs[node].weight_bytes for node in nodes)


def _packed(cost: NodeCost, plan: SitePlan) -> NodeCost:
    """The cost of a linear once it is packed."""
    working = max(cost.working_bytes, 4 * cost.weights)
    return dataclasses.replace(cost, format=plan.format, weight_bytes=plan.bytes_after, cast=0, working_bytes=working)
