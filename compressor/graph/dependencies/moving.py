"""Operators that move entries: views, permutations, cuts and joins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.dependencies.axes import Axes, Reading, Rule, is_fixed, shape_of
from compressor.graph.dependencies.labels import Labels
from compressor.graph.provenance import describe

_ATEN = torch.ops.aten
_PERMUTES = (_ATEN.transpose.int, _ATEN.permute.default)
_TAKES_APART = {_ATEN.unbind.int: 1, _ATEN.select.int: 1, _ATEN.split.Tensor: 2, _ATEN.chunk.default: 2}
"""Operator -> its argument that names the axis."""


def _view(node: Node, reading: Reading) -> Axes:
    """Tell axes that stay from those that are cut (an entry of the first part is a channel) or merged."""
    old, new, axes = shape_of(node.args[0]), shape_of(node), reading.of(node.args[0])  # type: ignore[arg-type]
    result: Axes = []
    for before, after in _same_sizes(old, new):
        tracked = [axis for axis in before if axes[axis] is not None]
        first = axes[tracked[0]] if tracked else None
        if first is None:
            result += [None] * len(after)
        elif len(before) == len(after) == 1:
            result.append(first)
        elif len(before) == 1:
            sizes = [new[axis] for axis in after]
            parts = [place for place, axis in enumerate(after) if new[axis] > 1 and not _is_taken_apart(node, axis)]
            result += _cut(first, sizes, parts[0] if parts else 0, reading)
        elif len(after) == 1:
            reading.keep([axes[axis] for axis in tracked[1:]], f"{describe(node)} merges it with another axis")
            shape = [old[axis] if axis == tracked[0] else 1 for axis in before]
            result.append(np.broadcast_to(first.reshape(shape), [old[axis] for axis in before]).reshape(-1))
        else:
            reading.keep([axes[axis] for axis in tracked], f"{describe(node)} mixes it with another axis")
            result += [None] * len(after)
    return result


def _cut(labels: Labels, sizes: Sequence[int], part: int, reading: Reading) -> Axes:
    """Cut an axis: an entry of one part goes or stays with all that it holds."""
    held = np.moveaxis(labels.reshape(sizes), part, 0).reshape(sizes[part], -1)
    reading.labels.join(held, np.broadcast_to(held[:, :1], held.shape))
    return [held[:, 0] if place == part else None for place in range(len(sizes))]


def _is_taken_apart(node: Node, axis: int) -> bool:
    """Tell whether what reads a tensor takes an axis apart, as one that holds queries, keys and values."""
    for user in node.users:
        args: Any = user.args
        if user.target in _PERMUTES:
            found = _is_taken_apart(user, _order(user).index(axis))
        elif user.target in _TAKES_APART:
            given = args[_TAKES_APART[user.target] :]
            found = (given[0] if given else 0) % len(shape_of(node)) == axis
        else:
            continue
        if found:
            return True
    return False


def _same_sizes(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the shortest runs of axes of both shapes that hold as many entries."""
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(before), j + len(after)
        left, right = (int(np.prod([shape[a] for a in axes])) for shape, axes in ((old, before), (new, after)))
        while left != right:
            if left < right:
                before, left, i = [*before, i], left * old[i], i + 1
            else:
                after, right, j = [*after, j], right * new[j], j + 1
        yield before, after


def _permute(node: Node, reading: Reading) -> Axes:
    axes = reading.of(node.args[0])
    return [axes[axis] for axis in _order(node)]


def _order(node: Node) -> list[int]:
    """Return the axis of the input that each axis of a permutation is."""
    args: Any = node.args
    rank = len(shape_of(node))
    if node.target is _ATEN.permute.default:
        return [axis % rank for axis in args[1]]
    first, second = (axis % rank for axis in args[1:3])
    return [{first: second, second: first}.get(axis, axis) for axis in range(rank)]


def _unsqueeze(node: Node, reading: Reading) -> Axes:
    axes, place = reading.of(node.args[0]), int(node.args[1])  # type: ignore[arg-type]
    place %= len(axes) + 1
    return [*axes[:place], None, *axes[place:]]


def _squeeze(node: Node, reading: Reading) -> Axes:
    args: Any = node.args
    axes = reading.of(args[0])
    gone = {axis % len(axes) for axis in (args[1] if isinstance(args[1], list | tuple) else [args[1]])}
    ones = {axis for axis in gone if shape_of(args[0])[axis] == 1}
    return [labels for axis, labels in enumerate(axes) if axis not in ones]


def _expand(node: Node, reading: Reading) -> Axes:
    """Give copies labels of their own: any of them can go."""
    new, old = shape_of(node), shape_of(node.args[0])  # type: ignore[arg-type]
    known, added = reading.of(node.args[0]), len(new) - len(old)
    axes: Axes = [*[None] * added, *known]
    for axis, (size, value) in enumerate(zip(new, node.meta["val"].shape, strict=True)):
        if is_fixed(value) and (axis < added or old[axis - added] == 1):
            axes[axis] = reading.labels.fresh(size)
    return axes


def _slice(node: Node, reading: Reading) -> Axes:
    args: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    axes = list(reading.of(args[0]))
    labels = axes[args[1]]
    if labels is None:
        return axes
    if any(isinstance(one, Node) for one in args[2:4]):
        reading.keep([labels], f"{describe(node)} takes as much of it as the input decides")
        axes[args[1]] = None
    else:
        axes[args[1]] = labels[args[2] : args[3] : args[4]]
    return axes


def _select(node: Node, reading: Reading) -> Axes:
    axes, axis = reading.of(node.args[0]), int(node.args[1])  # type: ignore[arg-type]
    axis %= len(axes)
    reading.keep([axes[axis]], f"{describe(node)} takes one entry of it")
    return [*axes[:axis], *axes[axis + 1 :]]


def _unbind(node: Node, reading: Reading) -> tuple[Axes, ...]:
    axes, axis = reading.of(node.args[0]), int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    axis %= len(axes)
    reading.keep([axes[axis]], f"{describe(node)} takes it apart")
    return tuple([*axes[:axis], *axes[axis + 1 :]] for _ in node.meta["val"])


def _split(node: Node, reading: Reading) -> tuple[Axes, ...]:
    args: Any = (*node.args, *(0,)[len(node.args) - 2 :])
    axes, axis = reading.of(args[0]), args[2]
    sizes = [value.shape[axis] for value in node.meta["val"]]
    labels = axes[axis]
    if labels is None:
        return tuple(list(axes) for _ in sizes)
    parts = np.split(labels, np.cumsum(sizes)[:-1])
    place = axis % len(axes)
    return tuple([*axes[:place], part, *axes[place + 1 :]] for part in parts)


def getitem(node: Node, reading: Reading) -> Axes:
    """Return the axes of one of several values."""
    found = reading.axes.get(node.args[0])  # type: ignore[arg-type]
    return found[node.args[1]] if isinstance(found, tuple) else [None] * len(shape_of(node))  # type: ignore[index]


def _cat(node: Node, reading: Reading) -> Axes:
    pieces: Any = node.args[0]
    axis = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    several = [reading.of(piece) for piece in pieces]
    result: Axes = []
    for place in range(len(several[0])):
        labels = [axes[place] for axes in several]
        if place == axis % len(several[0]):
            is_tracked = any(one is not None for one in labels)
            whole = (_filler(reading, p, place) if one is None else one for one, p in zip(labels, pieces, strict=True))
            result.append(np.concatenate([*whole]) if is_tracked else None)
        else:
            result.append(reading.meet(labels, f"{describe(node)} joins it with places that are not channels"))
    return result


def _stack(node: Node, reading: Reading) -> Axes:
    pieces: Any = node.args[0]
    several = [reading.of(piece) for piece in pieces]
    reason = f"{describe(node)} joins it with places that are not channels"
    axes = [reading.meet([one[place] for one in several], reason) for place in range(len(several[0]))]
    at = (int(node.args[1]) if len(node.args) > 1 else 0) % (len(axes) + 1)  # type: ignore[arg-type]
    return [*axes[:at], None, *axes[at:]]


def _filler(reading: Reading, piece: Node, axis: int) -> Labels:
    labels = reading.labels.fresh(shape_of(piece)[axis])
    reading.labels.keep(labels, f"{describe(piece)} is not made of channels")
    return labels


def _pad(node: Node, reading: Reading) -> Axes:
    """Give entries that are added labels of their own: they are constants, which can go."""
    amounts: Any = node.args[1]
    axes = list(reading.of(node.args[0]))
    for place in range(len(amounts) // 2):
        axis, before, after = len(axes) - 1 - place, amounts[2 * place], amounts[2 * place + 1]
        labels = axes[axis]
        if labels is None or not (before or after):
            continue
        added = [reading.labels.fresh(max(0, n)) for n in (before, after)]
        inner = labels[max(0, -before) : len(labels) - max(0, -after)]
        if min(before, after) < 0:
            reading.keep([labels], f"{describe(node)} cuts it")
        axes[axis] = np.concatenate([added[0], inner, added[1]])
    return axes


def _index(node: Node, reading: Reading) -> Axes:
    x, indices = node.args
    axes, named = reading.of(x), [axis for axis, one in enumerate(indices) if one is not None]  # type: ignore[arg-type]
    reading.keep([axes[axis] for axis in named], f"{describe(node)} picks entries of it")
    if len(named) == 1 and len(shape_of(node)) == len(axes):
        return [None if axis in named else labels for axis, labels in enumerate(axes)]
    reading.keep(axes, f"{describe(node)} picks entries by several indices")
    return [None] * len(shape_of(node))


def _expert_rows(node: Node, reading: Reading) -> Axes:
    return [None, reading.of(node.args[0])[-1]]


def _join_experts(node: Node, reading: Reading) -> Axes:
    """Join the channels of all experts: what they make lies in one tensor."""
    parts: Any = node.args[1]
    reason = f"{describe(node)} joins it with places that are not channels"
    return [None, None, reading.meet([reading.of(part)[-1] for part in parts], reason)]


def _size(node: Node, reading: Reading) -> Axes:
    reading.keep([reading.of(node.args[0])[int(node.args[1])]], f"{describe(node)} is its size")  # type: ignore[arg-type]
    return []


MOVING: dict[Any, Rule] = {
    **dict.fromkeys((_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default), _view),
    _ATEN.flatten.using_ints: _view,
    **dict.fromkeys(_PERMUTES, _permute),
    _ATEN.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((_ATEN.squeeze.dim, _ATEN.squeeze.dims), _squeeze),
    _ATEN.expand.default: _expand,
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _select,
    _ATEN.unbind.int: _unbind,
    **dict.fromkeys((_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.chunk.default), _split),
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.pad.default: _pad,
    _ATEN.index.Tensor: _index,
    _ATEN.sym_size.int: _size,
    torch.ops.compressor.expert_rows.default: _expert_rows,
    torch.ops.compressor.join_experts.default: _join_experts,
}
"""Operator -> its rule."""
