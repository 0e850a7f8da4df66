"""Sizes that a node states in its arguments, once channels are gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import Node

from compressor.graph.dependencies.axes import Axes, Reading
from compressor.graph.dependencies.labels import Labels
from compressor.graph.provenance import describe

_ATEN = torch.ops.aten
_STATED = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.expand.default)


def left(axes: Axes, value: Tensor, gone: NDArray[np.bool_]) -> list[Any]:
    """Return the shape of a value without the channels that are gone."""
    return [n if labels is None else _count(labels, gone) for labels, n in zip(axes, value.shape, strict=True)]


def state_sizes(node: Node, reading: Reading, gone: NDArray[np.bool_]) -> None:
    """Put the sizes that are left into a node's arguments.

    Args:
        gone: for each label, whether its channel goes.
    """
    found = reading.axes[node]
    if isinstance(found, tuple):
        if node.target in (_ATEN.split.Tensor, _ATEN.split_with_sizes.default):
            _split(node, found, gone)
    elif node.target in _STATED:
        stated: Any = node.args[1]
        changed = {axis for axis, labels in enumerate(found) if labels is not None and gone[labels].any()}
        shape = left(found, node.meta["val"], gone)
        node.update_arg(1, [shape[axis] if axis in changed and n != -1 else n for axis, n in enumerate(stated)])
    elif node.target is _ATEN.slice.Tensor:
        _slice(node, reading, gone)
    elif node.target is _ATEN.pad.default:
        _pad(node, found, gone)


def _count(labels: Labels, gone: NDArray[np.bool_]) -> int:
    return int((~gone[labels]).sum())


def _split(node: Node, found: tuple[Axes, ...], gone: NDArray[np.bool_]) -> None:
    """State the size of each part: parts that were as large as one another may not be any more."""
    axis: Any = node.args[2] if len(node.args) > 2 else 0
    sizes = [left(axes, value, gone)[axis] for axes, value in zip(found, node.meta["val"], strict=True)]
    if sizes != [value.shape[axis] for value in node.meta["val"]]:
        node.target = _ATEN.split_with_sizes.default
        node.args = (node.args[0], sizes, axis)


def _slice(node: Node, reading: Reading, gone: NDArray[np.bool_]) -> None:
    """Move the begin and the end of a slice to where the same entries are now."""
    args: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    labels = reading.of(args[0])[args[1]]
    if labels is None or not gone[labels].any():
        return
    if args[4] != 1:
        raise ValueError(f"{describe(node)} takes every {args[4]}th channel of an axis that loses some")
    begin, end, _ = slice(args[2], args[3]).indices(len(labels))
    before = np.concatenate([[0], np.cumsum(~gone[labels])])
    node.args = (*args[:2], int(before[begin]), int(before[end]))


def _pad(node: Node, found: Axes, gone: NDArray[np.bool_]) -> None:
    amounts: Any = list(node.args[1])  # type: ignore[arg-type]
    for place in range(len(amounts) // 2):
        labels = found[-1 - place]
        before, after = amounts[2 * place : 2 * place + 2]
        if labels is None or min(before, after) < 0:
            continue
        amounts[2 * place] = _count(labels[:before], gone)
        amounts[2 * place + 1] = _count(labels[len(labels) - after :], gone)
    node.update_arg(1, amounts)
