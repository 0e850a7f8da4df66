"""Rules for what moves or picks elements, and for sizes that vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from compressor.export.onnx_out.emitter import Emitter
from compressor.export.onnx_out.rules import refuse, rule
from compressor.graph.matching import shape_of

_LAST_FIRST, _FIRST_LAST = [0, 3, 1, 2], [0, 2, 3, 1]
_END = (1 << 63) - 1


@rule("aten::sym_size")
def sym_size(e: Emitter, _: Node, x: Node, axis: int) -> str:
    """Emit a size, int64 [1]."""
    return e.dimension(e.of(x), axis % x.meta["val"].dim())


def _size_arithmetic(op: str) -> Callable[..., str]:
    def emit(e: Emitter, _: Node, *sizes: Any) -> str:
        return e.add(op, *(e.size(size) for size in sizes))

    return emit


for _name, _op in {"add": "Add", "sub": "Sub", "mul": "Mul", "floordiv": "Div", "neg": "Neg"}.items():
    rule(f"size::{_name}")(_size_arithmetic(_op))


@rule("size::getitem")
def getitem(e: Emitter, node: Node, several: Node, place: int) -> str:
    """Name one of several results."""
    found: list[str] | None = e.memo.get(("results", several))
    if found is None:
        raise refuse(node, "results of this operator are not told apart")
    return found[place]


@rule("aten::view", "aten::reshape", "aten::_unsafe_view")
def reshape(e: Emitter, node: Node, x: Node, sizes: Any) -> str:
    """Emit another shape; a size that stays in its place is copied, and so need not be known."""
    before, after = x.meta["val"].shape, node.meta["val"].shape
    wanted = []
    for axis, size in enumerate(sizes):
        stays = axis < len(before) and not isinstance(after[axis], int) and str(before[axis]) == str(after[axis])
        wanted.append(0 if stays else size)
    unknown = [axis for axis, size in enumerate(wanted) if isinstance(size, Node)]
    if len(unknown) == 1 and -1 not in wanted:
        wanted[unknown[0]] = -1
    return e.add("Reshape", e.of(x), e.shape(wanted))


@rule("aten::flatten")
def flatten(e: Emitter, node: Node, x: Node, first: int = 0, last: int = -1) -> str:
    """Emit neighbouring dimensions as one."""
    rank = x.meta["val"].dim()
    first, last = first % rank, last % rank
    after = node.meta["val"].shape
    sizes = [0 if axis < first else -1 if axis == first else after[axis] for axis in range(len(after))]
    if not all(isinstance(size, int) for size in sizes):
        raise refuse(node, "sizes behind those that become one vary")
    return e.add("Reshape", e.of(x), e.constant(sizes))


@rule("aten::permute", "aten::transpose", "aten::t")
def permute(e: Emitter, node: Node, x: Node, *axes: Any) -> str | None:
    """Emit dimensions in another order; images are turned where they are read."""
    rank = x.meta["val"].dim()
    if len(axes) == 1:
        order = [axis % rank for axis in axes[0]]
    else:
        one, other = (axis % rank for axis in (axes or (0, 1)))
        order = list(range(rank))
        order[one], order[other] = other, one
    if order == _LAST_FIRST and x in e.channels_first:
        return e.channels_first[x]
    if order == _FIRST_LAST:
        e.channels_first[node] = e.of(x)
        return None
    return e.add("Transpose", e.of(x), perm=order)


@rule("aten::unsqueeze")
def unsqueeze(e: Emitter, node: Node, x: Node, axis: int) -> str:
    """Emit a dimension of one."""
    return e.add("Unsqueeze", e.of(x), e.constant([axis % node.meta["val"].dim()]))


@rule("aten::squeeze")
def squeeze(e: Emitter, _: Node, x: Node, axes: Any) -> str:
    """Emit without dimensions of one."""
    sizes = x.meta["val"].shape
    named = [axes] if isinstance(axes, int) else axes
    gone = [axis % len(sizes) for axis in named if sizes[axis] == 1]
    return e.add("Squeeze", e.of(x), e.constant(gone)) if gone else e.of(x)


@rule("aten::expand")
def expand(e: Emitter, node: Node, x: Node, sizes: Any, *_: Any) -> str:
    """Emit copies along dimensions of one."""
    if shape_of(x.meta["val"]) == shape_of(node.meta["val"]):
        return e.of(x)
    return e.add("Expand", e.of(x), e.shape([1 if isinstance(size, int) and size == -1 else size for size in sizes]))


@rule("aten::slice")
def sliced(e: Emitter, node: Node, x: Node, axis: int = 0, first: Any = None, end: Any = None, step: Any = 1) -> str:
    """Emit a part along a dimension."""
    bounds = e.size(first or 0), e.size(_END if end is None else end)
    return e.add("Slice", e.of(x), *bounds, e.constant([axis % node.meta["val"].dim()]), e.size(step))


@rule("aten::select")
def select(e: Emitter, _: Node, x: Node, axis: int, place: Any) -> str:
    """Emit one place along a dimension, which goes."""
    found = e.add("Gather", e.of(x), e.size(place), axis=axis % x.meta["val"].dim())
    return e.add("Squeeze", found, e.constant([axis % x.meta["val"].dim()]))


@rule("aten::cat")
def cat(e: Emitter, node: Node, several: Any, axis: int = 0) -> str:
    """Emit one tensor behind another."""
    like = node.meta["val"]
    return e.add("Concat", *(e.of(x, like) for x in several), axis=axis)


@rule("aten::split", "aten::split_with_sizes", "aten::chunk")
def split(e: Emitter, node: Node, x: Node, _: Any, axis: int = 0) -> None:
    """Emit the parts of a tensor."""
    rank = x.meta["val"].dim()
    parts, first = [], 0
    for part in node.meta["val"]:
        size = part.shape[axis]
        if not isinstance(size, int):
            raise refuse(node, "parts whose sizes vary are not written")
        bounds = e.constant([first]), e.constant([first + size])
        parts.append(e.add("Slice", e.of(x), *bounds, e.constant([axis % rank])))
        first += size
    e.memo["results", node] = parts
    e.values[node] = parts[0]


@rule("aten::unbind")
def unbind(e: Emitter, node: Node, x: Node, axis: int = 0) -> None:
    """Emit each place along a dimension, which goes."""
    chosen = axis % x.meta["val"].dim()
    name = e.of(x)
    parts = [e.add("Gather", name, e.constant(place), axis=chosen) for place in range(len(node.meta["val"]))]
    e.memo["results", node] = parts
    e.values[node] = parts[0]


@rule("aten::index")
def index(e: Emitter, node: Node, x: Node, places: Any) -> str:
    """Emit the chosen places along one dimension."""
    chosen = [(axis, place) for axis, place in enumerate(places) if place is not None]
    if len(chosen) != 1 or chosen[0][1].meta["val"].dtype not in (torch.int64, torch.int32):
        raise refuse(node, "places along several dimensions, or a mask of places, are not written")
    axis, place = chosen[0]
    return e.of(x) if place is e.memo.get("all rows") else e.add("Gather", e.of(x), e.of(place), axis=axis)


@rule("aten::embedding")
def embedding(e: Emitter, node: Node, weight: Node, ids: Node, *_: Any) -> str:
    """Emit rows of a table of floats."""
    found = e.add("Gather", e.of(weight), e.of(ids), axis=0)
    stored = e.graph.get_parameter(str(weight.target)).dtype if weight.op == "get_attr" else node.meta["val"].dtype
    return found if stored == node.meta["val"].dtype else e.cast(found, node.meta["val"].dtype)


@rule("aten::zeros", "aten::ones", "aten::full")
def full(e: Emitter, node: Node, sizes: Any, *more: Any) -> str:
    """Emit one number everywhere."""
    name = str(node.target).split(".")[1]
    number = {"zeros": 0, "ones": 1}.get(name, more[0] if more else 0)
    return e.add("Expand", e.of(number, node.meta["val"]), e.shape(sizes))


@rule("aten::zeros_like", "aten::ones_like", "aten::full_like")
def full_like(e: Emitter, node: Node, x: Node, *more: Any) -> str:
    """Emit one number everywhere, in the shape of another tensor."""
    name = str(node.target).split(".")[1]
    number = {"zeros_like": 0, "ones_like": 1}.get(name, more[0] if more else 0)
    return e.add("Expand", e.of(number, node.meta["val"]), e.add("Shape", e.of(x)))


@rule("aten::arange")
def arange(e: Emitter, node: Node, *bounds: Any) -> str:
    """Emit whole numbers in a row."""
    numbers = [b for b in bounds if isinstance(b, Node | int) and not isinstance(b, bool)]
    kinds = {"default": 1, "start": 2, "start_step": 3}
    given = numbers[: kinds[str(node.target).rpartition(".")[2]]]
    first, end, step = ([0, given[0]] if len(given) == 1 else given[:2]) + [given[2] if len(given) > 2 else 1]
    scalars = [e.add("Squeeze", e.size(x)) if isinstance(x, Node) else e.constant(x) for x in (first, end, step)]
    found = e.add("Range", *scalars)
    return found if node.meta["val"].dtype == torch.int64 else e.cast(found, node.meta["val"].dtype)


@rule("aten::pad")
def pad(e: Emitter, node: Node, x: Node, sizes: Any, mode: str = "constant", value: Any = 0.0) -> str:
    """Emit a border of one number."""
    if mode != "constant" or not all(isinstance(size, int) for size in sizes):
        raise refuse(node, f"borders of the kind {mode}, or whose sizes vary, are not written")
    if not any(sizes):
        return e.of(x)
    rank = x.meta["val"].dim()
    pairs = [(0, 0)] * (rank - len(sizes) // 2) + [(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 2, -1, -2)]
    both = [first for first, _ in pairs] + [last for _, last in pairs]
    return e.add("Pad", e.of(x), e.constant(both), e.of(value or 0.0, node.meta["val"]))


@rule("aten::max_pool2d", "aten::avg_pool2d")
def pool(e: Emitter, node: Node, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, *more: Any) -> str:
    """Emit the maximum or mean of windows."""

    def two(given: Any) -> list[int]:
        return [given] * 2 if isinstance(given, int) else [*given] * (3 - len(given))

    pads = two(padding)
    common: dict[str, Any] = {"kernel_shape": two(kernel), "strides": two(stride or kernel), "pads": pads + pads}
    if "max" in str(node.target):
        dilation, ceil = (*more, 1, False)[:2] if len(more) < 2 else more[:2]
        return e.add("MaxPool", e.of(x), dilations=two(dilation), ceil_mode=int(ceil), **common)
    ceil, counts, divisor = (*more, False, True, None)[:3] if len(more) < 3 else more[:3]
    if divisor is not None:
        raise refuse(node, "means over a number of its own are not written")
    return e.add("AveragePool", e.of(x), ceil_mode=int(ceil), count_include_pad=int(counts), **common)


@rule("aten::contiguous", "aten::clone", "aten::detach", "aten::alias", "aten::dropout", "aten::lift_fresh_copy")
def same(e: Emitter, node: Node, x: Node, *_: Any) -> str | None:
    """Emit nothing."""
    if x in e.channels_first:
        e.channels_first[node] = e.channels_first[x]
        return None
    return e.of(x)


@rule("aten::matmul", "aten::bmm", "aten::mm")
def matmul(e: Emitter, _: Node, x: Node, y: Node) -> str:
    """Emit a product of matrices."""
    return e.add("MatMul", e.of(x), e.of(y))
