"""Batches of tokens or images on their way through a graph, one segment after another.

All batches pass a segment before the next one is read, so that of a model of any size only one segment's weights are
in memory, beside the hidden states between two segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from compressor.errors import UsageError
from compressor.graph.caches import empty_caches, empty_states
from compressor.graph.kinds.carried import carried_node
from compressor.graph.kinds.encoder_decoder import (
    Batch,
    Pair,
    SampleInputs,
    source_inputs,
    source_node,
    tokens_of,
)
from compressor.graph.model import ModelInfo
from compressor.graph.segments import Segment, segments, shared_nodes
from compressor.graph.sites import is_parameter
from compressor.host.tensor_files import Spill, release, trim
from compressor.numerics.products.bfloat16 import bfloat16_products
from compressor.progress import Reporter


class SegmentRunner:
    """Batches of samples, and the hidden states of each between two segments.

    Args:
        graph: a captured model; its linears may be replaced meanwhile.
        batches: int64 [samples, sequence] each; of a plain module, its inputs, float32 [samples, ...]; of a model of
            speech, a sound with its tokens; of pictures with texts, both.
        spill: where the hidden states lie; None keeps them in memory.
        rounded: products in :meth:`run_to` and :meth:`values` may round their factors to bfloat16
            (:mod:`compressor.numerics.products.bfloat16`).
    Raises:
        UsageError: a batch is longer than the model's positions.
    """

    def __init__(
        self, graph: GraphModule, batches: Sequence[Batch], spill: Spill | None = None, rounded: bool = False
    ) -> None:
        info: ModelInfo = graph.meta["model"]
        longest = max(tokens_of(batch).shape[1] for batch in batches)
        of_source = 0 if info.encoder_source is None or info.hears else info.encoder_source.max_positions
        positions = min((count for count in (info.max_positions, of_source) if count), default=0)
        if positions and longest > positions:
            raise UsageError(
                f"{info.name}: samples of {longest} tokens exceed the model's {positions} positions; "
                "set a shorter sequence_length"
            )
        self.graph, self.info, self.batches, self.spill = graph, info, batches, spill
        self.rounded = rounded
        self.interpreter = Interpreter(graph, garbage_collect_values=False)
        inputs = graph.graph.find_nodes(op="placeholder")
        self.ids_node, self.source_node = inputs[0], source_node(graph)
        if info.pair is not None:
            self.source_node, self.ids_node = inputs[:2]
        self.hidden: list[Tensor | None] = [None] * len(batches)
        self.memory: list[Tensor | None] = [None] * len(batches)  # what is carried past layers, once it is computed
        self._live: list[dict[Node, Any]] = [{} for _ in batches]  # inside a segment, where :meth:`run_to` got to
        self._passed: set[Node] = set()
        self.shared: dict[tuple[int, ...], dict[Node, Any]] = {}  # input shapes -> inputs, token-independent values

    def advance(
        self,
        segment: Segment,
        also: Sequence[Node] = (),
        take: Callable[[int, list[Tensor]], Tensor] | None = None,
    ) -> None:
        """Run every batch on to the end of the segment; its hidden states take the place of the last ones.

        Args:
            also: further nodes of the segment that are of interest.
            take: called with the number of each batch and the values of the segment's exit and of these nodes, while
                :attr:`hidden` still has what is in front of the segment; returns what goes on in the exit's place.
        """
        assert segment.exit is not None
        beside = carried_node(self.graph)
        carried = [beside] if beside in segment.nodes else []
        for i, (value, *more) in enumerate(self.run_to(segment, [segment.exit, *also, *carried])):
            taken = value if take is None else take(i, [value, *more[: len(also)]])
            self._keep(self.hidden, i, taken)
            if carried:
                self._keep(self.memory, i, taken if beside is segment.exit else more[-1])
            self._live[i] = {}
        self._passed = set()
        self.release(segment)

    def skip(self, segment: Segment) -> None:
        """Leave a segment out: what is live behind it is what is live in front of it."""
        if segment.exit is carried_node(self.graph):
            for i, value in enumerate(self.hidden):
                assert value is not None
                self._keep(self.memory, i, value)

    def fork(self) -> SegmentRunner:
        """Return another runner that is as far as this one, on its own way from there."""
        other = SegmentRunner(self.graph, self.batches, self.spill, self.rounded)
        other.shared, other.memory = self.shared, list(self.memory)
        for i, value in enumerate(self.hidden):
            if value is not None:
                other._keep(other.hidden, i, value)
        return other

    def _keep(self, places: list[Tensor | None], i: int, value: Tensor) -> None:
        """Store a batch's value in its place."""
        place = places[i]
        if place is None or place.shape != value.shape:
            place = places[i] = self.spill.empty(value.shape) if self.spill else torch.empty_like(value, device="cpu")
        place.copy_(value)  # in place: allocating anew leaves the heap full of holes
        if self.spill:
            release([place])

    def run_to(self, segment: Segment, wanted: Sequence[Node], later: Sequence[Node] = ()) -> Iterator[list[Tensor]]:
        """Run one batch after another as far as the nodes of interest, from where the last call left it; their values.

        What has been computed is not computed again until :meth:`advance`: meanwhile linears may be replaced that
        have not been run, and nothing else.

        Args:
            later: nodes of the same segment that later calls will want.
        """
        beside = carried_node(self.graph)
        later = [*later, beside] if beside in segment.nodes else later  # :meth:`advance` will want it
        for i in range(len(self.batches)):
            env = {**self.environment(segment, i), **self._live[i]}
            given = set(env)
            with torch.no_grad(), bfloat16_products(self.rounded):
                found = self.run(segment, env, wanted, later, self._passed)
            self._live[i] = {
                node: value
                for node, value in env.items()
                if node.op != "get_attr" and (node not in given or node in self._live[i])
            }
            yield found
        self._passed |= ancestors(wanted, set(segment.nodes))

    def release(self, segment: Segment) -> None:
        """Give back the memory of the segment's mapped weights."""
        read = {source for node in segment.nodes for source in node.all_input_nodes}
        names = {str(source.target) for source in read if is_parameter(self.graph, source)}
        release(self.graph.get_parameter(name) for name in names)
        trim()

    @torch.no_grad()
    def values(self, segment: Segment, i: int, wanted: Sequence[Node]) -> list[Tensor]:
        """Run one batch through a segment up to ``wanted``, and return the values of those nodes."""
        env = self.environment(segment, i)
        with bfloat16_products(self.rounded):
            return self.run(segment, env, wanted)

    def environment(self, segment: Segment, i: int) -> dict[Node, Any]:
        """Return the values that a segment's nodes read for one batch, without parameters."""
        batch = self.batches[i]
        env = {**self._shared(batch), self.ids_node: tokens_of(batch)}
        if self.source_node is not None:
            env[self.source_node] = batch.source if isinstance(batch, Pair) else batch
        memory, carried = carried_node(self.graph), self.memory[i]
        if memory is not None and carried is not None and memory not in segment.nodes:
            env[memory] = carried
        if segment.entry is not None:
            env[segment.entry] = self.hidden[i]
        return env

    def run(
        self,
        segment: Segment,
        env: dict[Node, Any],
        wanted: Sequence[Node],
        later: Sequence[Node] = (),
        passed: Collection[Node] = (),
    ) -> list[Tensor]:
        """Run the segment up to ``wanted`` and return those values; free every other value after its last use.

        Args:
            later: nodes that a later call will want.
            passed: nodes that an earlier call has run; ``env`` holds those of their values that are still read.
        """
        inside = set(segment.nodes).difference(passed)
        needed = ancestors(wanted, inside)
        nodes = [node for node in segment.nodes if node in needed]
        last_user = {source: node for node in nodes for source in node.all_input_nodes}
        # Nodes that are run later may stand in front of some that are run now.
        kept = {source for node in ancestors(later, inside) - needed for source in node.all_input_nodes}.union(later)
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
                if last_user.get(used, node) is node and used not in kept:
                    del env[used]
        return [found[node] for node in wanted]

    def _shared(self, batch: Batch) -> dict[Node, Any]:
        shape = (*tokens_of(batch).shape, *(batch.source.shape if isinstance(batch, Pair) else ()))
        if shape not in self.shared:
            graph = self.graph
            env = dict(zip(graph.graph.find_nodes(op="placeholder"), flat_inputs(self.info, batch), strict=True))
            self.interpreter.env = env
            with torch.no_grad():
                for node in shared_nodes(graph):
                    env[node] = self.interpreter.run_node(node)
            # Parameters are read where they are used: a pass may replace them, and nothing should hold them.
            self.shared[shape] = {node: value for node, value in env.items() if node.op != "get_attr"}
        return self.shared[shape]


def split_samples(graph: GraphModule, samples: SampleInputs, tokens: int) -> Sequence[Batch]:
    """Split samples into batches of about ``tokens`` tokens or pixels, each of at least one sample.

    A plain module that was captured with a fixed batch gets batches of that size.  Sounds, whose lengths differ, run
    one by one.

    Args:
        samples: as for :class:`SegmentRunner`, all in one.
    Raises:
        UsageError: the samples are not what the model reads, or no whole number of fixed batches.
    """
    info: ModelInfo = graph.meta["model"]
    if info.pair is not None and isinstance(samples, Tensor):
        raise UsageError(f"{info.name}: reads pictures with texts; give samples of both")
    if not isinstance(samples, Tensor):
        return samples
    if info.labels_frames:
        raise UsageError(f"{info.name}: reads sounds; calibrate on `audio:`")
    if (info.kind == "module") != samples.is_floating_point():
        reads = "a plain module, which reads no tokens: calibrate on `images:`"
        raise UsageError(f"{info.name}: is {reads if info.kind == 'module' else 'a model of text, not of images'}")
    if info.kind != "module":
        return torch.split(samples, max(1, tokens // samples.shape[1]))
    inputs = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")]
    if len(inputs) != 1 or not _fits(inputs[0], samples):
        shapes = " and ".join(str(list(shape)) for shape in inputs)
        raise UsageError(f"{info.name}: reads {shapes}, and the samples are {list(samples.shape)}")
    fixed = inputs[0][0]
    if not isinstance(fixed, int):
        return torch.split(samples, max(1, tokens // math.prod(samples.shape[2:])))
    if len(samples) % fixed:
        raise UsageError(
            f"{info.name}: was captured with a batch of {fixed}, and {len(samples)} samples are not a multiple of "
            "that; take another number, or give dynamic_shapes with the example"
        )
    return torch.split(samples, fixed)


def _fits(shape: Sequence[Any], samples: Tensor) -> bool:
    """Return whether samples have that shape, apart from the batch; a symbolic size fits any."""
    sizes = list(zip(shape, samples.shape, strict=False))[1:]
    return len(shape) == samples.dim() and all(not isinstance(size, int) or size == given for size, given in sizes)


def run_outputs(stream: SegmentRunner, reporter: Reporter, first: int = 0) -> Iterator[Tensor]:
    """Yield a captured model's outputs batch by batch: a decoder's logits of all tokens, float32 [batch, sequence,
    vocabulary], or an encoder's hidden states.

    Nothing runs before the first is asked for; by then all batches have come as far as the last segment.

    Args:
        stream: whose hidden states are those in front of the segment ``first``.
    """
    *before, last = segments(stream.graph)[first:]
    with reporter.task("dense model", len(before)) as task:
        for segment in before:
            stream.advance(segment)
            task.advance()
    output = stream.graph.graph.output_node().args[0][0]  # type: ignore[index]
    for i in range(len(stream.batches)):
        yield stream.values(last, i, [output])[0]  # type: ignore[list-item]
    stream.release(last)


def flat_inputs(info: ModelInfo, given: Batch) -> list[Tensor]:
    """Return the flat inputs of the captured forward for a first run: all tokens kept, empty caches."""
    ids = tokens_of(given)
    if isinstance(given, Pair) and info.pair is not None:
        return [given.source, ids, torch.ones(ids.shape, dtype=torch.float32)]
    if info.kind == "module":
        return [ids]
    batch, length = ids.shape
    if info.kind == "encoder":
        return [ids, torch.ones(batch, length, dtype=torch.float32)]
    position = torch.arange(length)
    past = [*empty_caches(info, batch), *empty_states(info, batch)]
    return [ids, position, position, *past, *source_inputs(info, given)]


def ancestors(targets: Iterable[Node], inside: set[Node]) -> set[Node]:
    """Return the nodes of ``inside`` that the targets depend on, and those targets that are inside."""
    found: set[Node] = set()
    ahead = [node for node in targets if node in inside]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead.extend(source for source in node.all_input_nodes if source in inside)
    return found
