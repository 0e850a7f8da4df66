"""Measure the values that a captured program computes."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.export import ExportedProgram


def fixed_sizes(program: ExportedProgram) -> frozenset[int]:
    """Return the numbers of elements of all inputs and values whose shape is fixed."""
    inputs = program.graph_signature.user_inputs
    nodes = [node for node in program.graph.nodes if node.op == "call_function" or node.name in inputs]
    values = [node.meta.get("val") for node in nodes]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    return frozenset(prod(shape) for shape in shapes if all(isinstance(n, int) for n in shape))


def entry_bytes(program: ExportedProgram, *, tokens: bool) -> int:
    """Return the bytes of a batch entry's largest value; 0 where not all inputs and outputs begin with the batch.

    Args:
        tokens: inputs are [batch, tokens], and it is one token that is meant.  What grows otherwise is left out.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    sizes = [_sizes(values.get(str(name))) for name in (*signature.user_inputs, *signature.user_outputs)]
    batch = next(iter(sizes[0]), 1) if sizes else 1
    if isinstance(batch, int) or any(not each or each[0] != batch for each in sizes):
        return 0
    entries = prod(sizes[0][: 1 + tokens])
    found = [0]
    for value in values.values():
        each: Any = prod(_sizes(value)) / entries
        if isinstance(value, torch.Tensor) and each.is_Integer:
            found.append(int(each) * value.element_size())
    return max(found)


def _sizes(value: Any) -> list[Any]:
    """Return a tensor's sizes, numbers or expressions; none of any other value."""
    sizes = getattr(value, "shape", ())
    return [n.node.expr if isinstance(n, torch.SymInt) else n for n in sizes]
