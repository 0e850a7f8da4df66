"""Write the rest of a changed graph, from hidden states on, as a job of any process."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from compressor.calibration.programs import write_program
from compressor.calibration.segment_runner import SegmentRunner, ancestors
from compressor.graph.rewrite import held_tensor
from compressor.graph.segments import Segment


def write_suffix(stream: SegmentRunner, last: Segment) -> dict[str, Any]:
    """Write a suffix as plain data and tensors, by which ``run_program`` computes the model's outputs anywhere.

    Returns:
        ``program``: the calls; ``output``: the name of their result; ``held``: parameters by name; ``batches``: of each
        batch the other inputs by name.  ``run_program(program, {**held, **batch}, output)`` gives a batch's output.

    Args:
        stream: of the changed graph, with the hidden states in front of the segment.
        last: all of the graph behind them, without an exit.
    """
    graph = stream.graph
    output: Node = graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
    needed = ancestors([output], set(last.nodes))
    program, inputs = write_program([node for node in last.nodes if node in needed])
    held = {node: held_tensor(graph, str(node.target)) for node in inputs if node.op == "get_attr"}
    batches = [stream.environment(last, i) for i in range(len(stream.batches))]
    return {
        "program": program,
        "output": output.name,
        "held": {node.name: value for node, value in held.items()},
        "batches": [{node.name: env[node] for node in inputs if node not in held} for env in batches],
    }
