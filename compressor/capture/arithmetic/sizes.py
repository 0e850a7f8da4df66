"""Keep sizes numbers where a model's code makes tensors of them.

torch.tensor(x.shape[1])        becomes      x.shape[1]

A graph cannot read a number back out of such a tensor, for a slice or a shape, though the number was known before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

READS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
"""Operators that read a number out of a tensor."""


def reads_numbers(graph: fx.Graph) -> bool:
    """Return whether a graph reads a number out of a tensor."""
    return any(node.target in READS for node in graph.nodes)


@contextmanager
def sizes_stay_numbers(module: nn.Module) -> Iterator[None]:
    """Let a module's code have a size itself in place of a tensor that holds it, while it is called inside."""
    forward, own = module.forward, "forward" in vars(module)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _SizesStayNumbers():  # in here, since the export has a mode of its own that makes the tensor
            return forward(*args, **kwargs)

    vars(module)["forward"] = run
    try:
        yield
    finally:
        vars(module)["forward"] = forward
        if not own:
            del vars(module)["forward"]


class _SizesStayNumbers(TorchFunctionMode):

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], torch.SymInt) and not kwargs:
            return args[0]
        return func(*args, **(kwargs or {}))
