"""Compute with sizes before the model runs: operators on whole numbers, some of which are symbols."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compressor.capture.onnx_in.stored import DTYPES
from compressor.capture.onnx_in.values import Call, Constant, Numbers, refuse

_MOST = 4096  # larger arrays are tensors
_WHOLE = (torch.int64, torch.int32, torch.bool)
_Array = NDArray[Any]
_sym_min: Any = torch.sym_min
_sym_max: Any = torch.sym_max


def compute_sizes(call: Call) -> Numbers | tuple[Numbers, ...] | None:
    """Return an operator's result where it reads nothing but sizes and constants, at least one size; else None.

    Shape and Size read any tensor.
    """
    if call.op in ("Shape", "Size"):
        return _shape(call)
    if call.op not in _OPERATORS or not any(isinstance(x, Numbers) for x in call.inputs):
        return None
    given: list[_Array | None] = []
    dtypes = []
    for index, x in enumerate(call.inputs):
        small = isinstance(x, Numbers) or (isinstance(x, Constant) and x.value.numel() <= _MOST)
        if x is not None and (not small or isinstance(x, Tensor)):
            return None
        dtypes.append(x.dtype if isinstance(x, Numbers) else x.value.dtype if isinstance(x, Constant) else torch.int64)
        given.append(call.known(index))
    if call.op != "Resize" and any(d not in _WHOLE for d in dtypes):
        return None
    dtype = dtypes[1] if call.op == "Where" else dtypes[0]
    result = _OPERATORS[call.op](call, *given)
    if result is None:
        return None
    if isinstance(result, tuple):
        return tuple(Numbers(part, dtype) for part in result)
    return result if isinstance(result, Numbers) else Numbers(np.asarray(result, dtype=object), dtype)


def _shape(call: Call) -> Numbers:
    x = call.inputs[0]
    if x is None:
        raise refuse("its input is missing")
    held = x.value if isinstance(x, Constant) else x
    shape = list(held.values.shape if isinstance(held, Numbers) else held.shape)
    if call.op == "Size":
        total: Any = 1
        for size in shape:
            total = total * size
        return Numbers(np.array(total, dtype=object))
    part = shape[call.get("start", 0) : call.get("end")]
    values = np.empty(len(part), dtype=object)
    values[:] = part
    return Numbers(values)


def _elementwise(apply: Callable[..., Any]) -> Callable[..., _Array]:
    def run(call: Call, *args: _Array) -> _Array:
        return np.asarray(np.frompyfunc(apply, len(args), 1)(*args), dtype=object)

    return run


def _comparison(apply: Callable[..., Any]) -> Callable[..., Numbers]:
    def run(call: Call, *args: _Array) -> Numbers:
        plain = np.frompyfunc(lambda *xs: bool(apply(*xs)), len(args), 1)(*args)
        return Numbers(np.asarray(plain, dtype=object), torch.bool)

    return run


def _quotient(a: Any, b: Any) -> Any:
    """Divide towards zero, as the standard says; symbols must be known to be no less than 0."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise refuse("it divides by 0")
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    if not (statically_known_true(a >= 0) and statically_known_true(b > 0)):
        raise refuse(f"it divides {a} by {b}, which may be negative")
    return a // b


def _remainder(call: Call, a: _Array, b: _Array) -> _Array | None:
    if call.get("fmod", 0):
        return None
    return _elementwise(operator.mod)(call, a, b)


def _cast(call: Call, x: _Array) -> Numbers | None:
    dtype = DTYPES.get(call.get("to"))
    if dtype not in _WHOLE:
        return None
    if dtype is torch.bool:
        return _comparison(lambda value: value != 0)(call, x)
    return Numbers(_elementwise(lambda value: int(value) if isinstance(value, bool) else value)(call, x), dtype)


def _plain(*arrays: _Array | None) -> bool:
    """Return whether numbers are not symbols: as an index, a symbol would become the number of the example."""
    return all(isinstance(n, int) for array in arrays if array is not None for n in array.reshape(-1))


def _gather(call: Call, x: _Array, index: _Array) -> _Array | None:
    if not _plain(index):
        return None
    return np.asarray(np.take(x, index.astype(np.int64), axis=call.get("axis", 0)), dtype=object)


def _slice(call: Call, x: _Array, *given: _Array | None) -> _Array | None:
    if not _plain(*given):
        return None
    starts, ends, axes, steps = (list(g.reshape(-1)) if g is not None else None for g in (*given, *[None] * 4)[:4])
    assert starts is not None and ends is not None
    cut: list[slice] = [slice(None)] * x.ndim
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step = steps[i] if steps is not None else 1
        stop = None if end <= -(2**31) and step < 0 else end
        cut[axes[i] if axes is not None else i] = slice(start, stop, step)
    return x[tuple(cut)]


def _concat(call: Call, *parts: _Array) -> _Array:
    return np.concatenate(parts, axis=call.get("axis"))


def _unsqueeze(call: Call, x: _Array, axes: _Array) -> _Array:
    return np.expand_dims(x, tuple(int(a) for a in axes.reshape(-1)))


def _squeeze(call: Call, x: _Array, axes: _Array | None = None) -> _Array:
    return np.squeeze(x, None if axes is None else tuple(int(a) for a in axes.reshape(-1)))


def _reshape(call: Call, x: _Array, shape: _Array) -> _Array | None:
    wanted = list(shape.reshape(-1))
    if 0 in wanted or not all(isinstance(size, int) for size in wanted):
        return None
    return x.reshape(wanted)


def _filled(call: Call, shape: _Array) -> Numbers | None:
    value = call.get("value")
    dtype = value.value.dtype if value is not None else torch.float32
    sizes = list(shape.reshape(-1))
    if dtype not in _WHOLE or not all(isinstance(size, int) for size in sizes) or np.prod(sizes, dtype=object) > _MOST:
        return None
    return Numbers(np.full(sizes, value.number, dtype=object), dtype)


def _expand(call: Call, x: _Array, shape: _Array) -> _Array | None:
    sizes = list(shape.reshape(-1))
    if not all(isinstance(size, int) for size in sizes) or np.prod(sizes, dtype=object) > _MOST:
        return None
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(sizes)))


def _where(call: Call, condition: _Array, a: _Array, b: _Array) -> _Array:
    return np.asarray(np.frompyfunc(lambda c, x, y: x if c else y, 3, 1)(condition, a, b), dtype=object)


def _range(call: Call, start: _Array, limit: _Array, step: _Array) -> _Array | None:
    ends = [start.item(), limit.item(), step.item()]
    if not all(isinstance(end, int) for end in ends) or not ends[2] or len(range(*ends)) > _MOST:
        return None
    return np.array(list(range(*ends)), dtype=object)


def _product(call: Call, x: _Array, axes: _Array | None = None) -> _Array | None:
    if axes is not None or call.get("axes") is not None or x.ndim != 1:
        return None
    total: Any = 1
    for size in x:
        total = total * size
    return np.array([total] if call.get("keepdims", 1) else total, dtype=object)


def _split(call: Call, x: _Array, sizes: _Array | None = None) -> tuple[_Array, ...] | None:
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return None
    return tuple(np.split(x, np.cumsum(sizes.astype(np.int64))[:-1], axis=call.get("axis", 0)))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(_quotient),
    "Mod": _remainder,
    "Neg": _elementwise(operator.neg),
    "Min": _elementwise(lambda *xs: _sym_min(*xs) if len(xs) == 2 else min(xs)),
    "Max": _elementwise(lambda *xs: _sym_max(*xs) if len(xs) == 2 else max(xs)),
    "Equal": _comparison(operator.eq),
    "Greater": _comparison(operator.gt),
    "GreaterOrEqual": _comparison(operator.ge),
    "Less": _comparison(operator.lt),
    "LessOrEqual": _comparison(operator.le),
    "Not": _comparison(operator.not_),
    "And": _comparison(lambda a, b: a and b),
    "Or": _comparison(lambda a, b: a or b),
    "Cast": _cast,
    "Identity": lambda call, x: x,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "ConstantOfShape": _filled,
    "Expand": _expand,
    "Where": _where,
    "Range": _range,
    "ReduceProd": _product,
    "Split": _split,
}
