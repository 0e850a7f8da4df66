"""One call of an operator, as the rules see it, and the steps that rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compressor.verify.independence.labels import SHARED, CannotProve, Entries, Label


@dataclass(frozen=True)
class Call:
    """One call of an operator on fake tensors."""

    args: dict[str, Any]  # by the schema's names, defaults filled in
    out: Any
    label_of: Callable[[Tensor], Label]
    batch: sympy.Expr

    def entries(self, name: str) -> Entries | None:
        """Return an operand's label, or None where the operand is shared or absent."""
        value = self.args.get(name)
        label = self.label_of(value) if isinstance(value, Tensor) else SHARED
        return label if isinstance(label, Entries) else None

    def only(self, name: str) -> Entries:
        """Return the label of operand ``name``, the only one that may depend on the entries' data.

        Raises:
            CannotProve: another operand depends on the entries' data too.
        """
        for other, value in self.args.items():
            if other == name:
                continue
            if any(self.label_of(leaf) != SHARED for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
                raise CannotProve(f"its operand {other!r} depends on the entries' data")
        found = self.entries(name)
        assert found is not None  # a rule is asked only where some operand has entries
        return found

    def dim(self, name: str = "dim", of: str = "self", extra: int = 0) -> int:
        """Return the dimension that an argument names, counted from the front; ``extra`` is added to the rank of
        ``of``.
        """
        rank: int = self.args[of].dim() + extra
        return int(self.args[name]) % max(rank, 1)


Rule: TypeAlias = Callable[[Call], Label | list[Label]]


def agree(labels: Sequence[Entries | None]) -> Entries:
    """Return the one label that all operands with entries have, in terms of the result's dimensions.

    Raises:
        CannotProve: the operands hold the entries along different dimensions or in different orders.
    """
    found = {label for label in labels if label is not None}
    if len(found) > 1:
        places = " and ".join(str(dim) for dim in sorted({label.dim for label in found}))
        raise CannotProve(
            f"operands hold the entries along different dimensions ({places})"
            if len({label.dim for label in found}) > 1
            else f"operands hold the entries in different orders along dimension {places}"
        )
    return found.pop()


def aligned(tensor: Any, label: Entries | None, rank: int) -> Entries | None:
    """Return a label after broadcasting its tensor to ``rank`` dimensions."""
    return None if label is None else label.at(label.dim + rank - tensor.dim())


def pointwise(call: Call) -> Label:
    """Label the result of an elementwise operator: each element depends on the elements at its own place."""
    rank = (call.out[0] if isinstance(call.out, (tuple, list)) else call.out).dim()
    if any(
        isinstance(leaf, Tensor) for value in call.args.values() if isinstance(value, (list, tuple)) for leaf in value
    ):
        raise CannotProve("it takes a list of tensors")
    return agree([aligned(value, call.entries(name), rank) for name, value in call.args.items()])


def avoid(label: Entries, touched: Sequence[int], what: str) -> Entries:
    """Return the label, or raise CannotProve if the operator combines elements along the entries' dimension."""
    if label.dim in touched:
        raise CannotProve(f"it {what} dimension {label.dim}, along which the entries lie")
    return label


def dims_of(call: Call, name: str) -> list[int]:
    """Return the dimensions that an argument names, counted from the front; None or an empty list means all."""
    rank = call.args["self"].dim()
    given = call.args.get(name)
    if given is None or given == []:
        return list(range(rank))
    return [int(dim) % max(rank, 1) for dim in (given if isinstance(given, (list, tuple)) else [given])]
