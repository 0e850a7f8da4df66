"""Labels for a tensor's dependence on the batch entries, and the arithmetic of symbolic sizes behind them."""

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
    """Independent of the entries' data: weights, positions, sizes."""


@dataclass(frozen=True)
class Entries:
    """Each element depends on one entry, which its place along one dimension determines.

    The dimension has ``outer * batch * inner`` places; place ``i`` belongs to entry ``i // inner % batch``.  Merged
    dimensions have factors above 1: ``[batch, heads, ...]`` viewed as ``[batch * heads, ...]`` has ``inner = heads``.
    """

    dim: int
    outer: sympy.Expr = ONE
    inner: sympy.Expr = ONE

    def at(self, dim: int) -> Entries:
        """Return the same label for another dimension."""
        return Entries(dim, self.outer, self.inner)


@dataclass(frozen=True)
class Mixed:
    """May depend on any entry; ``nodes`` names the nodes where entries first met."""

    nodes: frozenset[str]


Label: TypeAlias = Shared | Entries | Mixed
SHARED = Shared()


def size_of(value: Any) -> sympy.Expr:
    """Return a size as an expression: an int, or the symbols of a SymInt."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def sizes_of(tensor: Tensor) -> tuple[sympy.Expr, ...]:
    """Return a tensor's shape as expressions."""
    return tuple(size_of(size) for size in tensor.shape)


def same_size(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Return whether two sizes are equal for every value of their symbols."""
    return bool(a == b) or _expanded_difference(a, b) == 0


@lru_cache(maxsize=4096)
def _expanded_difference(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.expand(a - b)


@lru_cache(maxsize=4096)
def divide(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """Return ``a / b`` if it is a polynomial with integer coefficients, and thus an integer for every value of the
    symbols, else None.
    """
    if b == 0:
        return None
    try:
        quotient = sympy.cancel(a / b)
    except sympy.PolynomialError:
        return None
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def product(sizes: Iterable[sympy.Expr]) -> sympy.Expr:
    """Return the number of elements of a shape."""
    return sympy.Mul(*sizes)


def regroup(
    label: Entries, before: Sequence[sympy.Expr], after: Sequence[sympy.Expr], batch: sympy.Expr
) -> Entries | None:
    """Return where the entries lie after a row-major view, or None if no single dimension holds them.

    An element's row-major index names its entry: ``index // below % batch``, where ``below`` is the number of elements
    in one entry's step.  A view keeps that index, so a dimension of the new shape that counts exactly these steps holds
    the entries.  Sizes that are merely equal prove nothing.
    """
    below = product(before[label.dim + 1 :]) * label.inner
    for dim, size in enumerate(after):
        rest = product(after[dim + 1 :])
        inner, outer = divide(below, rest), divide(rest * size, batch * below)
        if inner is not None and outer is not None:
            return Entries(dim, outer, inner)
    return None
