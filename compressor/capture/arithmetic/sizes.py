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
from torch.utils._sympy.functions import FloorDiv

from compressor.graph.rules import why_not

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


class KnownBound:
    """The smaller or larger of two sizes, or of a size and a number, is the one that is known to be it."""

    name = "known bound"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match a minimum or maximum of a size and a number, or of two sizes."""
        return node if node.target in (torch.sym_min, torch.sym_max) and len(node.args) == 2 else None

    def check(self, match: fx.Node) -> str:
        """Ask for a range that lies on one side of the number, or for sizes that differ by a number."""
        return why_not((_decided(match) is None, "either may be the smaller one"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node | None:
        """Put the one or the other in its place; return None where that is the number."""
        found = _decided(match)
        for user in list(match.users):
            user.args = fx.node.map_arg(user.args, lambda node: found if node is match else node)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda node: found if node is match else node)
        graph.erase_node(match)
        return found if isinstance(found, fx.Node) else None


def _decided(node: fx.Node) -> Any:
    """Return what a minimum or maximum always is; None if that varies."""
    size, number = sorted(node.args, key=lambda arg: isinstance(arg, int))
    known: Any = size.meta["val"].node  # type: ignore[union-attr]
    smaller = node.target is torch.sym_min
    if isinstance(number, fx.Node):
        more = _plain(known.expr - number.meta["val"].node.expr)
        return None if not more.is_number else number if bool(more > 0) is smaller else size
    span = known.shape_env.bound_sympy(known.expr)
    if span.upper <= number:
        return size if smaller else number
    if span.lower >= number:
        return number if smaller else size
    return None


def _plain(expression: Any) -> Any:
    """Take whole multiples out of divisions: ``(n + 3) // 2`` becomes ``(n + 1) // 2 + 1``."""

    def taken_out(base: Any, divisor: Any) -> Any:
        number, rest = base.as_coeff_Add()
        if not (number.is_Integer and divisor.is_Integer):
            return FloorDiv(base, divisor)
        return FloorDiv(rest + number % divisor, divisor) + number // divisor

    return expression.replace(FloorDiv, taken_out)


class _SizesStayNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], torch.SymInt) and not kwargs:
            return args[0]
        return func(*args, **(kwargs or {}))
