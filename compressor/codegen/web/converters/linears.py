"""Convert linears, and those of experts, to calls of WGSL kernels, as TVM's importer expects.

A call is a ``call_dps_packed`` of a name in the Relax program, which no TVM pass looks into;
:mod:`compressor.codegen.web.program` replaces it by the dispatches that are recorded here under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from torch import fx
from tvm import relax

from compressor.codegen.kernels.experts import Routing
from compressor.codegen.web.kernel import Kernel
from compressor.codegen.web.kernels import activations, dense_linear, experts, packed_linear
from compressor.formats.format import Format


@dataclass(frozen=True)
class Dispatch:
    """One of the dispatches of a call.

    Attributes:
        kernels: alternatives; the first whose limits the sizes keep is dispatched.
        operands: index of the call's operand for each of the kernels' buffers; -1 is the call's last output.
        sizes: from the shapes of the operands to the kernels' sizes.
    """

    kernels: tuple[Kernel, ...]
    operands: tuple[int, ...]
    sizes: Callable[[list[list[Any]]], list[Any]]


class LinearCalls:
    """Calls of kernels for linears.

    Attributes:
        calls: dispatches of each call, by name.
        smallest_packed: elements of the smallest packed weight, None before the first.
        verifies: whether linears add in the order of a single token's for any number of tokens.
    """

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Dispatch, ...]] = {}
        self.smallest_packed: int | None = None
        self.verifies = False
        self._kept: dict[Any, list[Any]] = {}  # what several linears read: rounded activations, sorted pairs

    def call(self, importer: Any, name: str, dispatches: Sequence[Dispatch], operands: list[Any], out: Any) -> Any:
        """Emit a call; dispatches of the same name are the same."""
        self.calls.setdefault(name, tuple(dispatches))
        return importer.block_builder.emit(relax.call_dps_packed(name, relax.Tuple(operands), out))

    def rowwise(self, importer: Any, kernels: tuple[Kernel, ...], x: Any, rest: list[Any], width: int) -> Any:
        """Emit a call of kernels over the last dimension of ``x``, whose only size is the number of rows."""
        operands = [x, *(part for part in rest if part is not None)]
        dispatch = of_rows(kernels, len(operands))
        out = relax.TensorType([*list(x.ty.shape)[:-1], width], "float32")
        return self.call(importer, kernels[-1].name, [dispatch], operands, out)

    def count_packed(self, elements: int) -> None:
        """Take a packed weight of so many elements into account."""
        self.smallest_packed = min(elements, self.smallest_packed or elements)

    def dense_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a linear of stored floats."""
        x, weight, bias = importer.retrieve_args(node)
        rows, columns = (int(n) for n in weight.ty.shape)
        kernels = dense_linear.dense_linear(rows, columns, storage_of(weight), bias is not None, None, self.verifies)
        return self.rowwise(importer, kernels, x, [weight, bias], rows)

    def packed_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a linear of stored codes."""
        x, parts, bias, format_name, columns, rows = importer.retrieve_args(node)
        self.count_packed(rows * columns)
        fmt = Format.parse(format_name)
        kernels = packed_linear.packed_linear(rows, columns, fmt, bias is not None, None, self.verifies)
        stored = dict(zip(fmt.parts(rows, columns), parts, strict=True))
        inputs = [x] if fmt.activations is None else self._rounded(importer, x, fmt, stored.get("input_scale"))
        rest = [*inputs[1:], *(stored[name] for name in packed_linear.stored_parts(fmt)), bias]
        return self.rowwise(importer, kernels, inputs[0], rest, rows)

    def routed_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a routed linear of stored floats."""
        x, index, weight, bias = importer.retrieve_args(node)
        count, rows, columns = (int(n) for n in weight.ty.shape)
        routing = _routing(x, index, count)
        kernels = dense_linear.dense_linear(rows, columns, storage_of(weight), bias is not None, routing, self.verifies)
        return self._routed(importer, kernels, [x], index, [weight, bias], count, rows)

    def packed_routed_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a routed linear of stored codes.

        Activations with a calibrated scale are rounded for each pair of token and expert, by the expert's scale.
        """
        x, index, parts, bias, format_name, columns, rows = importer.retrieve_args(node)
        self.count_packed(rows * columns)
        fmt, count = Format.parse(format_name), int(parts[0].ty.shape[0])
        stored = dict(zip(fmt.parts(rows, columns), parts, strict=True))
        routing, inputs = _routing(x, index, count), [x]
        if fmt.activations is not None:
            inputs = self._rounded(importer, x, fmt, stored.get("input_scale"), (routing, index))
        if "input_scale" in stored:
            routing = Routing(count, routing.each, True)
        kernels = packed_linear.packed_linear(rows, columns, fmt, bias is not None, routing, self.verifies)
        rest = [*(stored[name] for name in packed_linear.stored_parts(fmt)), bias]
        return self._routed(importer, kernels, inputs, index, rest, count, rows)

    def top_k(self, node: fx.Node, importer: Any) -> Any:
        """Emit the choice of the largest elements of each row."""
        x, count = importer.retrieve_args(node)
        *leading, width = x.ty.shape
        kernel = experts.choose(int(width), int(count))
        out = relax.TensorType([*leading, int(count)], "int32")
        return self.call(importer, kernel.name, [of_rows((kernel,), 1)], [x], out)

    def _routed(
        self,
        importer: Any,
        kernels: tuple[Kernel, ...],
        inputs: list[Any],
        index: Any,
        rest: list[Any],
        count: int,
        rows: int,
    ) -> Any:
        """Emit a call of a routed linear's kernels, behind the sorting of its pairs."""
        routes = self._sorted_pairs(importer, index, count)
        operands = [*inputs, routes, *(part for part in rest if part is not None)]
        dispatch = Dispatch(kernels, (*range(len(operands)), -1), lambda shapes: [shapes[0][0]])
        out = relax.TensorType([*index.ty.shape, rows], "float32")
        return self.call(importer, kernels[-1].name, [dispatch], operands, out)

    def _sorted_pairs(self, importer: Any, index: Any, count: int) -> Any:
        """Emit the sorting of pairs of token and expert, once for all linears that are routed alike."""
        key = ("pairs", index, count)
        if key not in self._kept:
            tokens, each = index.ty.shape
            kernel = experts.sort_pairs(count, int(each))
            dispatch = Dispatch((kernel,), (0, -1), lambda shapes: [shapes[0][0]])
            out = relax.TensorType([tokens * (2 * int(each)) + (count + 2)], "uint32")
            self._kept[key] = [self.call(importer, kernel.name, [dispatch], [index], out)]
        return self._kept[key][0]

    def _rounded(
        self, importer: Any, x: Any, fmt: Format, input_scale: Any, routed: tuple[Routing, Any] | None = None
    ) -> list[Any]:
        """Emit the rounding of activations as a format's linears read them, once for all linears that share it.

        Args:
            routed: of a routed linear, its routing and the index of its experts.
        """
        columns, leading = int(x.ty.shape[-1]), list(x.ty.shape)[:-1]
        layout = activations.Rounded.of(columns, fmt) if fmt.integer_products else None
        key = (x, input_scale, fmt.activations, layout, None if input_scale is None or routed is None else routed[1])
        if key in self._kept:
            return self._kept[key]
        if routed is None or input_scale is None:
            kernel = activations.round_activations(columns, fmt)
            operands = [x, *([] if input_scale is None else [input_scale])]
        else:
            kernel = activations.round_activations(columns, fmt, routed[0])
            operands, leading = [x, input_scale, routed[1]], list(routed[1].ty.shape)
        made = [(columns, "float32")]
        if layout is not None:
            made = [(layout.words, "uint32"), (layout.numbers, "float32")]
        buffers = (*range(len(operands)), *range(-len(made), 0))
        rows_of = (
            (lambda shapes: [product(shapes[0][:-1])]) if len(operands) < 3 else (lambda shapes: [product(shapes[2])])
        )
        dispatch = Dispatch((kernel,), buffers, rows_of)
        out = [relax.TensorType([*leading, width], dtype) for width, dtype in made]
        found = self.call(importer, kernel.name, [dispatch], operands, out if len(out) > 1 else out[0])
        parts = [found]
        if len(out) > 1:
            parts = [importer.block_builder.emit(relax.TupleGetItem(found, i)) for i in range(len(out))]
        return self._kept.setdefault(key, parts)


def of_rows(kernels: tuple[Kernel, ...], operands: int) -> Dispatch:
    """Make the dispatch of kernels over the last dimension of their first operand, whose only size is the number of
    rows.
    """
    return Dispatch(kernels, (*range(operands), -1), lambda shapes: [product(shapes[0][:-1])])


def storage_of(parameter: Any) -> str:
    """Return the stored type of a matrix of floats; the importer represents bfloat16 as uint16."""
    return {"uint16": "bfloat16"}.get(str(parameter.ty.dtype), str(parameter.ty.dtype))


def product(sizes: Sequence[Any]) -> Any:
    """Multiply sizes."""
    return prod(sizes, start=tvm.tirx.IntImm("int64", 1))


def _routing(x: Any, index: Any, count: int) -> Routing:
    return Routing(count, int(index.ty.shape[1]), len(x.ty.shape) == 3)
