"""Labels of the axes of the tensors of a graph, as far as it has been read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import Node

from compressor.graph.dependencies.labels import Labels, LabelSet

Axes: TypeAlias = "list[Labels | None]"
"""Labels of the entries of each axis; None where nothing can be taken away: batch, tokens, places in an image."""


class Reading:
    """Labels of the axes of the tensors that have been read so far.

    Args:
        by_query: whether query heads may go while the keys and values that they share stay; else a head of keys and
            values goes with all query heads that read it.
        in_places: whether channels only change places, so that none of them is missing from a sum.
    Attributes:
        heads: of each attention, the labels of its query heads, and how many heads of keys they share.
    """

    def __init__(self, by_query: bool = False, in_places: bool = False) -> None:
        self.labels, self.by_query, self._in_places = LabelSet(), by_query, in_places
        self.axes: dict[Node, Axes | tuple[Axes, ...]] = {}
        self.heads: list[tuple[Labels, int]] = []

    def of(self, value: Any) -> Axes:
        """Return the axes of an input; none of a number."""
        found = self.axes.get(value, []) if isinstance(value, Node) else []
        return found if isinstance(found, list) else []

    def keep(self, axes: Sequence[Labels | None], reason: str) -> None:
        """Say that all channels of some axes have to stay."""
        for labels in axes:
            if labels is not None:
                self.labels.keep(labels, reason)

    def keep_sum(self, axes: Sequence[Labels | None], reason: str) -> None:
        """Say that all channels of some axes have to stay, since something is taken over all of them, in any order."""
        if not self._in_places:
            self.keep(axes, reason)

    def meet(self, several: Sequence[Labels | None], reason: str) -> Labels | None:
        """Join the labels of axes that meet, and return them; where one has none, the others stay for that reason."""
        known = [labels for labels in several if labels is not None]
        for labels in known[1:]:
            self.labels.join(known[0], labels)
        if len(known) < len(several):
            self.keep(known, reason)
        return known[0] if known else None


Rule: TypeAlias = "Callable[[Node, Reading], Axes | tuple[Axes, ...]]"
"""Returns the axes of a node's value, or of its values; joins labels, and says which have to stay."""


def shape_of(node: Node) -> list[int]:
    """Return a tensor's shape; symbolic sizes as the sizes that the graph was captured with."""
    value: Tensor = node.meta["val"]
    return [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]


def is_fixed(size: Any) -> bool:
    """Tell whether a size is a number above one."""
    return isinstance(size, int) and size > 1
