"""Costs of operators with a state: read and written once a call, whatever the number of tokens."""

from __future__ import annotations

import families
import torch

from compressor.capture.capture import capture
from compressor.graph.costs import eager_work, node_costs
from compressor.graph.model import state_bytes

OPS = torch.ops.compressor


def test_states() -> None:
    graph = capture(families.make(*families.RECURRENT["Mamba"], True), weights=False)
    states = graph.meta["model"].states
    assert states == ((3, 128), (1, 8, 128)) * 2 and state_bytes(states) == 2 * 4 * (3 + 8) * 128
    short, long = (node_costs(graph, 1, length, 7) for length in (1, 10))
    for costs in (short, long):
        assert sum(cost.cache_bytes for cost in costs.values()) == state_bytes(states)
    (scan,) = {cost.flops for node, cost in short.items() if node.target is OPS.selective_scan.default}
    (longer,) = {cost.flops for node, cost in long.items() if node.target is OPS.selective_scan.default}
    assert scan == 6 * 8 * 128 and longer == 10 * scan
    (convolution,) = {cost.flops for node, cost in short.items() if node.target is OPS.causal_convolution.default}
    assert convolution == 2 * 4 * 128
    assert eager_work(long.values())["node"] > eager_work(short.values())["node"] + 9 * 2 * 2
