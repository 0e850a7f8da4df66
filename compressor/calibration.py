"""Samples through the graph: statistics of what each linear reads.

The graph runs segment by segment (:func:`compressor.graph.segments`) over all samples, so that beside the
memory-mapped weights only one segment's working set, its statistics and the hidden states between two segments
are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from compressor.errors import UsageError
from compressor.graph import ModelInfo, Segment, Site, group_by_input, segments, shared_nodes
from compressor.samples import Samples, load_evaluation, load_samples

__all__ = ["Hessian", "Samples", "Statistic", "load_evaluation", "load_samples", "stream"]


class Statistic(Protocol):
    """What is gathered about the input of one group of linears."""

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in the rows of one micro-batch, float32 [tokens, in_features].

        ``dense`` are the same rows in the graph as it was when the streaming began; ``x`` itself unless asked for.
        """


class Hessian:
    """H = 2 / n * X^T X over n tokens, float32 [in, in] (Frantar et al. 2022, section 3)."""

    def __init__(self, in_features: int) -> None:
        self.tokens = 0
        self._sum = torch.zeros(in_features, in_features)
        self._cross: Tensor | None = None

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in rows, float32 [tokens, in_features]."""
        self._sum.addmm_(x.t(), x)
        self.tokens += len(x)
        if dense is not x:
            self._cross = torch.zeros_like(self._sum) if self._cross is None else self._cross
            self._cross.addmm_((dense - x).t(), x)

    @property
    def value(self) -> Tensor:
        """The Hessian; all zeros if no token ever arrived."""
        return self._sum * (2 / max(1, self.tokens))

    @property
    def cross(self) -> Tensor | None:
        """2 / n * (X_dense - X)^T X, float32 [in, in]; None where the dense inputs were not asked for."""
        return None if self._cross is None else self._cross * (2 / max(1, self.tokens))


S = TypeVar("S", bound=Statistic)


def stream(
    graph: GraphModule,
    ids: Tensor,
    sites: Sequence[Site],
    make_statistic: Callable[[int], S],
    *,
    true_sequential: bool = True,
    with_dense: bool = False,
    micro_batch_tokens: int = 2048,
) -> Iterator[tuple[list[Site], S]]:
    """Run samples through the graph and yield each group of sites that share an input, with its statistic.

    Groups come in dataflow order.  The caller may replace the group's linears before it asks for the next one:
    what follows then sees their new outputs.  With ``true_sequential`` that holds for the next group already,
    whose statistic is gathered by running its segment again from the beginning; otherwise for the next segment.

    Peak memory: the hidden states between two segments for all samples (twice ``with_dense``), one segment's
    working set for one micro-batch, and one statistic (a segment's statistics without ``true_sequential``).

    Args:
        graph: a captured decoder or encoder.
        ids: int64 [samples, sequence].
        sites: the linears of interest.
        make_statistic: called with the width of a group's input.
        with_dense: also run the graph as it is now, and show the statistics its inputs beside the current ones.
        micro_batch_tokens: tokens that run at once, at least one sample.
    Raises:
        UsageError: the model does not read tokens, or the samples are longer than its positions.
    """
    batch = max(1, micro_batch_tokens // ids.shape[1])
    run = _Run(graph, ids, batch)
    dense = _Run(_frozen(graph), ids, batch) if with_dense else None
    dense_segments = segments(dense.graph) if dense else []
    names = {site.name for site in sites}
    last = max((i for i, s in enumerate(segments(graph)) if any(site.name in names for site in s.sites)), default=-1)
    for index in range(last + 1):
        # Replacing a linear does not move the cuts, but the nodes are new: look the segment up again.
        wanted = [site.name for site in segments(graph)[index].sites if site.name in names]
        while wanted:
            segment = segments(graph)[index]
            groups = group_by_input(site for site in segment.sites if site.name in wanted)
            groups = groups[:1] if true_sequential else groups
            statistics = [make_statistic(group[0].in_features) for group in groups]
            inputs = [group[0].input for group in groups]
            if dense:
                named = {site.name: site.input for site in dense_segments[index].sites}
                dense_inputs = [named[group[0].name] for group in groups]
            for i in range(len(run.ids)):
                rows = [_rows(x) for x in run.values(segment, i, inputs)]
                dense_rows = rows
                if dense:
                    dense_rows = [_rows(x) for x in dense.values(dense_segments[index], i, dense_inputs)]
                for statistic, x, y in zip(statistics, rows, dense_rows, strict=True):
                    statistic.add(x, y)
            wanted = [name for name in wanted if not any(name == site.name for group in groups for site in group)]
            while groups:  # pops, so that a statistic is freed when the caller is done with it
                yield groups.pop(0), statistics.pop(0)
        if index < last:
            run.advance(segments(graph)[index])
            if dense:
                dense.advance(dense_segments[index])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _frozen(graph: GraphModule) -> GraphModule:
    """The graph as it is now, whatever becomes of the original; parameters are shared."""
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    frozen = GraphModule(graph, nodes)
    frozen.meta = dict(graph.meta)
    return frozen


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

    def advance(self, segment: Segment) -> None:
        """Run every micro-batch to the end of the segment; its hidden states take the place of the last ones."""
        assert segment.exit is not None
        for i in range(len(self.ids)):
            (value,), place = self.values(segment, i, [segment.exit]), self.hidden[i]
            if place is None or place.shape != value.shape:
                self.hidden[i] = value.clone()
            else:
                place.copy_(value)  # in place: allocating anew leaves the heap full of holes

    @torch.no_grad()
    def values(self, segment: Segment, i: int, wanted: Sequence[Node]) -> list[Tensor]:
        """Run one micro-batch through a segment as far as the nodes of interest; their values."""
        needed = _ancestors(wanted, set(segment.nodes))
        nodes = [node for node in segment.nodes if node in needed]
        last_user = {source: node for node in nodes for source in node.all_input_nodes}
        env = dict(self._shared(self.ids[i]))
        env[self.ids_node] = self.ids[i]
        if segment.entry is not None:
            env[segment.entry] = self.hidden[i]
        found = {node: env[node] for node in wanted if node in env}
        self.interpreter.env = env
        for node in nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in env:
                    env[source] = self.interpreter.run_node(source)
            env[node] = self.interpreter.run_node(node)
            if node in wanted:
                found[node] = env[node]
            for used in (node, *node.all_input_nodes):
                if last_user.get(used, node) is node:
                    del env[used]
        return [found[node] for node in wanted]

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
