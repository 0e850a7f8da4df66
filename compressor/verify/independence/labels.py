"""What is known of a tensor's dependence on the batch entries, and the arithmetic of symbolic sizes behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor

ONE = sympy.Integer(1)


class CannotProve(Exception):
    """Entries meet, or cannot be shown to stay apart; the message says why, in words."""


@dataclass(frozen=True)
class Shared:
    """The same whatever the entries hold: weights, positions, sizes."""


@dataclass(frozen=True)
class Entries:
    """Each element depends on one entry: the one that its place along a dimension says.

    The dimension has ``outer * batch * inner`` places; place ``i`` belongs to entry ``i // inner % batch``.  Merged
    dimensions have factors above 1: ``[batch, heads, ...]`` viewed as ``[batch * heads, ...]`` has ``inner = heads``.
    """

    dim: int
    outer: sympy.Expr = ONE
    inner: sympy.Expr = ONE

    def at(self, dim: int) -> Entries:
        """The same places along another dimension."""
        return Entries(dim, self.outer, self.inner)


@dataclass(frozen=True)
class Mixed:
    """May depend on any entry; ``nodes`` are where entries first met."""

    nodes: frozenset[str]


Label: TypeAlias = Shared | Entries | Mixed
SHARED = Shared()


def size_of(value: Any) -> sympy.Expr:
    """A size as an expression: an int, or the symbols of a SymInt."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def sizes_of(tensor: Tensor) -> tuple[sympy.Expr, ...]:
    """A tensor's shape as expressions."""
    return tuple(size_of(size) for size in tensor.shape)


def same_size(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    return bool(a == b) or _expanded_difference(a, b) == 0


@lru_cache(maxsize=4096)
def _expanded_difference(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.expand(a - b)


@lru_cache(maxsize=4096)
def divide(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """``a / b`` when that is a polynomial with whole coefficients, so whole for every value of the symbols."""
    if b == 0:
        return None
    try:
        quotient = sympy.cancel(a / b)
    except sympy.PolynomialError:
        return None
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def product(sizes: Iterable[sympy.Expr]) -> sympy.Expr:
    """The number of elements of a shape."""
    return sympy.Mul(*sizes)


def regroup(
    label: Entries, before: Sequence[sympy.Expr], after: Sequence[sympy.Expr], batch: sympy.Expr
) -> Entries | None:
    """Where the entries lie after a view in row-major order; None where no one dimension holds them.

    An element's row-major index names its entry: ``index // below % batch``, with ``below`` the elements under one
    entry's step.  That index is what a view keeps, so a dimension of the new shape that counts exactly these steps
    holds the entries.  Nothing is concluded from sizes that are merely equal.
    """
    below = product(before[label.dim + 1 :]) * label.inner
    for dim, size in enumerate(after):
        rest = product(after[dim + 1 :])
        inner, outer = divide(below, rest), divide(rest * size, batch * below)
        if inner is not None and outer is not None:
            return Entries(dim, outer, inner)
    return None
