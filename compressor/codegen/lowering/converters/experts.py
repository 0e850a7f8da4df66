"""Convert routed linears and the choice of experts to calls of our kernels."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import tvm
from torch import fx
from tvm import relax

from compressor.codegen.kernels.experts import Routing
from compressor.codegen.lowering.converters.linears import LinearConverter, dense_linear_name, packed_linear_name
from compressor.formats.format import Format


class ExpertConverter(LinearConverter):
    """Calls of kernels for experts, whose schedules are those of one expert's linear."""

    def routed_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a routed linear of stored floats."""
        x, index, weight, bias = importer.retrieve_args(node)
        count, rows, columns = (int(n) for n in weight.ty.shape)
        routing, storage = _routing(x, index, count), str(weight.ty.dtype)
        name = f"routed_{routing.name}_{dense_linear_name(rows, columns, storage, bias is not None)}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            func = self.kernels.dense_routed(routing, rows, columns, storage, bias is not None)
            return func, {"family": "routed_linear"}

        operands = [x, index, weight, *([] if bias is None else [bias])]
        return self._call(importer, name, make, operands, index, rows)

    def packed_routed_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a routed linear of stored codes."""
        x, index, parts, bias, format_name, columns, rows = importer.retrieve_args(node)
        fmt, has_bias = Format.parse(format_name), bias is not None
        routing = _routing(x, index, int(parts[0].ty.shape[0]))
        self._count_packed(rows * columns)
        name = f"routed_{routing.name}_{packed_linear_name(f'{rows}x{columns}', fmt, has_bias)}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            details: dict[str, Any] = {"family": "packed_routed_linear", "format": fmt.name}
            if any(fmt.extra(extra) is not None for extra in self.kernels.others):
                return self.kernels.packed_routed(routing, rows, columns, fmt, has_bias, None), details
            schedule, _ = self._schedule(rows, columns, fmt, has_bias)
            details["schedule"] = dataclasses.asdict(schedule)
            return self.kernels.packed_routed(routing, rows, columns, fmt, has_bias, schedule), details

        return self._call(importer, name, make, [x, index, *parts, *([bias] if has_bias else [])], index, rows)

    def top_k(self, node: fx.Node, importer: Any) -> Any:
        """Emit the choice of the largest elements of each row."""
        x, k = importer.retrieve_args(node)
        bb, (*leading, n) = importer.block_builder, list(x.ty.shape)
        n, k = int(n), int(k)
        count = prod(leading, start=tvm.tirx.IntImm("int64", 1))
        flat = x if len(leading) == 1 else bb.emit(relax.op.reshape(x, [count, n]))
        kernel = self.kernel(importer, f"top_{k}_of_{n}", lambda: (self.kernels.top_k(n, k), {"family": "top_k"}))
        found = bb.emit(relax.call_tir(kernel, [flat], out_ty=relax.TensorType([count, k], "int64")))
        return found if len(leading) == 1 else bb.emit(relax.op.reshape(found, [*leading, k]))

    def _call(self, importer: Any, name: str, make: Any, operands: list[Any], index: Any, rows: int) -> Any:
        kernel = self.kernel(importer, name, make)
        out = relax.TensorType([*index.ty.shape, rows], "float32")
        return importer.block_builder.emit(relax.call_tir(kernel, operands, out_ty=out))


def _routing(x: Any, index: Any, count: int) -> Routing:
    return Routing(count, int(index.ty.shape[1]), len(x.ty.shape) == 3)
