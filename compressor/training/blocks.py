"""Train one stretch of a graph after the other, so that the memory is that of one: a model of any size can be trained.

A stretch is a segment: between two of them only the residual stream is live.  It reads what the trained ones in front
of it put out, and learns to put out what the dense model's segment with the same linears does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.calibration.segment_runner import SegmentRunner
from compressor.errors import CompressorError
from compressor.graph.segments import Segment, segments
from compressor.pipeline.context import Context
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.losses import hidden_error
from compressor.training.teacher import output_error, partners
from compressor.training.trainable import Outputs, Reader, TrainableGraph


class TrainableBlock(TrainableGraph):
    """A segment some of whose weights are trained.  Samples are their numbers, int64 [B].

    Args:
        names: parameters to train, which nothing outside the segment reads.
        stream: one sample a batch, in front of the segment.
        device: where the segment runs.
    """

    def __init__(self, segment: Segment, names: Sequence[str], stream: SegmentRunner, device: Device) -> None:
        super().__init__(stream.graph, names, device=device)
        self._segment, self._stream = segment, stream

    def __call__(
        self, batch: Tensor, weights: Mapping[str, Tensor] | None = None, number: int | None = None
    ) -> Outputs:
        """Run samples through the segment, one by one; with gradients, where they are enabled."""
        stream, node = self._stream, last_node(self.graph, self._segment)
        stream.interpreter = Reader(self.graph, self.values() if weights is None else weights, (), self.device)
        found = [stream.run(self._segment, stream.environment(self._segment, i), [node])[0] for i in batch.tolist()]
        return Outputs(torch.cat(found), [])


class BlockWalk:
    """Two graphs, the one to train and the dense one, on their way from segment to segment.

    Where layers are gone, the dense graph passes them alone, from the state in front of them to that behind.
    Hidden states between two segments lie in memory, or on disk; a device holds one segment of each graph at a time.

    Raises:
        CompressorError: the pass does not run in a pipeline, which keeps the dense graph.
        UsageError: a segment has no counterpart in the dense graph (:func:`compressor.training.teacher.partners`).
    """

    def __init__(self, pass_name: str, graph: GraphModule, ctx: Context, ids: Tensor, device: Device) -> None:
        if ctx.dense is None:
            raise CompressorError(f"{pass_name}: runs in a pipeline, which keeps the dense graph for it")
        self._segments, self._cut = segments(graph), segments(ctx.dense)
        instead = "leave `by_block` out, which trains the model as a whole"
        self._partners, self._passed = partners(pass_name, self._segments, self._cut, instead), 0
        rows = torch.split(ids, 1)
        self._graph, self._device = graph, device
        self._stream, self._dense = SegmentRunner(graph, rows, ctx.spill), SegmentRunner(ctx.dense, rows, ctx.spill)
        self._dense.interpreter = Reader(ctx.dense, {}, (), device)

    def block(self, number: int, names: Sequence[str], temperature: float) -> tuple[TrainableBlock, Objective]:
        """Return a segment to train, and the distance of what it puts out to what the dense model has there."""
        self._bring_dense_to(self._partners[number])
        segment, dense, teacher = self._segments[number], self._cut[self._partners[number]], self._dense
        wanted, info = last_node(teacher.graph, dense), teacher.info

        def objective(batch: Tensor, outputs: Outputs, step: int) -> Tensor:
            expected = torch.cat([teacher.values(dense, i, [wanted])[0] for i in batch.tolist()])
            if segment.exit is None:
                return output_error(info, outputs.last, expected, temperature)
            return hidden_error([outputs.last], [expected])

        return TrainableBlock(segment, names, self._stream, self._device), objective

    def pass_by(self, number: int) -> None:
        """Run all samples on to the end of a segment, whose weights are those that stay."""
        segment = self._segments[number]
        self._device.release()  # what was trained has been replaced
        if segment.exit is not None:
            self._stream.interpreter = Reader(self._graph, {}, (), self._device)
            self._stream.advance(segment)
            self._device.release()

    def _bring_dense_to(self, number: int) -> None:
        """Run all samples through the dense graph as far as the beginning of one of its segments."""
        for segment in self._cut[self._passed : number]:
            self._dense.advance(segment)
            self._device.release()
        self._passed = number


def last_node(graph: GraphModule, segment: Segment) -> Node:
    """Return the node whose value leaves a segment."""
    output: Node = segment.exit or graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
    return output


def names_by_block(graph: GraphModule, names: Sequence[str]) -> list[list[str]]:
    """Return the parameters that each segment reads, but those that anything else reads too."""
    within = [set(cut.nodes) for cut in segments(graph)]
    readers: dict[str, set[Node]] = {name: set() for name in names}
    for node in graph.graph.find_nodes(op="get_attr"):
        readers.get(str(node.target), set()).update(node.users)
    return [[name for name in names if readers[name] <= nodes] for nodes in within]
