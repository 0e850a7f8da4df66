"""Samples through the graph: statistics of what each linear reads.

The graph runs segment by segment (:func:`compressor.graph.segments`) over all samples, so that beside the
memory-mapped weights only one segment's working set, its statistics and the hidden states between two segments
are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from compressor.errors import UsageError
from compressor.graph import ModelInfo, Segment, Site, group_by_input, segments, shared_nodes
from compressor.samples import Samples, load_evaluation, load_samples

__all__ = ["Hessian", "Samples", "Statistic", "load_evaluation", "load_samples", "stream"]


class Statistic(Protocol):
    """What is gathered about the input of one group of linears."""

    def add(self, x: Tensor) -> None:
        """Take in the rows of one micro-batch, float32 [tokens, in_features]."""


class Hessian:
    """H = 2 / n * X^T X over n tokens, float32 [in, in] (Frantar et al. 2022, section 3)."""

    def __init__(self, in_features: int) -> None:
        self.tokens = 0
        self._sum = torch.zeros(in_features, in_features)

    def add(self, x: Tensor) -> None:
        """Take in rows, float32 [tokens, in_features]."""
        self._sum.addmm_(x.t(), x)
        self.tokens += len(x)

    @property
    def value(self) -> Tensor:
        """The Hessian; all zeros if no token ever arrived."""
        return self._sum * (2 / max(1, self.tokens))


S = TypeVar("S", bound=Statistic)


def stream(
    graph: GraphModule,
    ids: Tensor,
    sites: Sequence[Site],
    make_statistic: Callable[[int], S],
    *,
    true_sequential: bool = True,
    micro_batch_tokens: int = 2048,
) -> Iterator[tuple[list[Site], S]]:
    """Run samples through the graph and yield each group of sites that share an input, with its statistic.

    Groups come in dataflow order.  The caller may replace the group's linears before it asks for the next one:
    what follows then sees their new outputs.  With ``true_sequential`` that holds for the next group already,
    whose statistic is gathered by running its segment again from the beginning; otherwise for the next segment.

    Peak memory: the hidden states between two segments for all samples, one segment's working set for one
    micro-batch, and one statistic (a segment's statistics without ``true_sequential``).

    Args:
        graph: a captured decoder or encoder.
        ids: int64 [samples, sequence].
        sites: the linears of interest.
        make_statistic: called with the width of a group's input.
        micro_batch_tokens: tokens that run at once, at least one sample.
    Raises:
        UsageError: the model does not read tokens, or the samples are longer than its positions.
    """
    run = _Run(graph, ids, max(1, micro_batch_tokens // ids.shape[1]))
    names = {site.name for site in sites}
    last = max((i for i, segment in enumerate(segments(graph)) if names & _names(segment)), default=-1)
    for index in range(last + 1):
        # Replacing a linear does not move the cuts, but the nodes are new: look the segment up again.
        wanted = [site.name for site in segments(graph)[index].sites if site.name in names]
        while wanted:
            segment = segments(graph)[index]
            groups = group_by_input(site for site in segment.sites if site.name in wanted)
            groups = groups[:1] if true_sequential else groups
            statistics = [make_statistic(group[0].in_features) for group in groups]
            run.visit(segment, {g[0].input: _adder(s) for g, s in zip(groups, statistics, strict=True)})
            wanted = [name for name in wanted if not any(name == site.name for group in groups for site in group)]
            while groups:  # pops, so that a statistic is freed when the caller is done with it
                yield groups.pop(0), statistics.pop(0)
        if index < last:
            run.advance(segments(graph)[index])


def _names(segment: Segment) -> set[str]:
    return {site.name for site in segment.sites}


def _adder(statistic: Statistic) -> Callable[[Tensor], None]:
    return lambda x: statistic.add(x.reshape(-1, x.shape[-1]))


class _Run:
    """Micro-batches on their way through the graph."""

    def __init__(self, graph: GraphModule, ids: Tensor, batch: int) -> None:
        info: ModelInfo = graph.meta["model"]
        if info.kind == "module":
            raise UsageError(f"{info.name}: calibration runs text through decoders and encoders, not plain modules")
        if info.max_positions and ids.shape[1] > info.max_positions:
            raise UsageError(
                f"{info.name}: samples of {ids.shape[1]} tokens exceed the model's {info.max_positions} positions; "
                "set a shorter sequence_length"
            )
        self.interpreter = Interpreter(graph, garbage_collect_values=False)
        self.graph, self.info = graph, info
        self.ids_node = graph.graph.find_nodes(op="placeholder")[0]
        self.ids = torch.split(ids, batch)
        self.hidden: list[Tensor | None] = [None] * len(self.ids)
        self.shared: dict[int, dict[Node, Any]] = {}  # batch size -> inputs and token-independent values

    def visit(self, segment: Segment, visitors: Mapping[Node, Callable[[Tensor], None]]) -> None:
        """Run every micro-batch as far as the nodes of interest and show their values."""
        for i in range(len(self.ids)):
            self._execute(segment, i, visitors)

    def advance(self, segment: Segment) -> None:
        """Run every micro-batch to the end of the segment; its hidden states take the place of the last ones."""
        assert segment.exit is not None
        for i in range(len(self.ids)):

            def keep(x: Tensor, place: int = i) -> None:
                self.hidden[place] = x

            self._execute(segment, i, {segment.exit: keep})

    @torch.no_grad()
    def _execute(self, segment: Segment, i: int, visitors: Mapping[Node, Callable[[Tensor], None]]) -> None:
        needed = _ancestors(visitors, set(segment.nodes))
        nodes = [node for node in segment.nodes if node in needed]
        last_user = {source: node for node in nodes for source in node.all_input_nodes}
        env = dict(self._shared(self.ids[i]))
        env[self.ids_node] = self.ids[i]
        if segment.entry is not None:
            env[segment.entry] = self.hidden[i]
        self.interpreter.env = env
        for node in visitors:
            if node in env:
                visitors[node](env[node])
        for node in nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in env:
                    env[source] = self.interpreter.run_node(source)
            env[node] = self.interpreter.run_node(node)
            if node in visitors:
                visitors[node](env[node])
            for used in (node, *node.all_input_nodes):
                if last_user.get(used, node) is node:
                    del env[used]

    def _shared(self, ids: Tensor) -> dict[Node, Any]:
        if len(ids) not in self.shared:
            graph = self.graph
            env = dict(zip(graph.graph.find_nodes(op="placeholder"), _inputs(self.info, ids), strict=True))
            self.interpreter.env = env
            with torch.no_grad():
                for node in shared_nodes(graph):
                    env[node] = self.interpreter.run_node(node)
            # Parameters are read where they are used: a pass may replace them, and nothing should hold them.
            self.shared[len(ids)] = {node: value for node, value in env.items() if node.op != "get_attr"}
        return self.shared[len(ids)]


def _inputs(info: ModelInfo, ids: Tensor) -> list[Tensor]:
    """Flat inputs of the captured forward: a first run, all tokens kept, empty caches."""
    batch, length = ids.shape
    if info.kind == "encoder":
        return [ids, torch.ones(batch, length)]
    position = torch.arange(length)
    return [ids, position, position, *[torch.zeros(batch, info.kv_heads, 1, info.head_dim)] * (2 * info.layers)]


def _ancestors(targets: Iterable[Node], inside: set[Node]) -> set[Node]:
    """The nodes among ``inside`` that the targets are computed from, and those targets themselves."""
    found: set[Node] = set()
    ahead = [node for node in targets if node in inside]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead.extend(source for source in node.all_input_nodes if source in inside)
    return found
