"""Converters from operators of the FX graph to kernels of ours, as TVM's importer calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import numpy as np
import torch
import tvm
from torch import fx
from tvm import relax, te

from compressor.codegen.convolutions import fused_convolution, geometry_of
from compressor.codegen.kernels import (
    attention,
    convolution,
    dense_linear,
    embedding,
    norm,
    packed_cache,
    packed_linear,
    patches,
)
from compressor.codegen.kernels.prologue import Prologue
from compressor.codegen.kernels.vector import Isa
from compressor.codegen.tune import Tuner
from compressor.formats import TILE_ROWS, Format
from compressor.formats_cache import CacheFormat
from compressor.ops import outputs

_ATEN = torch.ops.aten

TUNED_TOKENS = 64
"""Schedules are chosen for one token, and then for so many."""


def dense_linear_name(rows: int, columns: int, storage: str, has_bias: bool) -> str:
    """The kernel's name; with ``:1`` or ``:64`` for the tokens, its name in the database of schedules."""
    return f"dense_linear_{rows}x{columns}_{storage}{'_bias' if has_bias else ''}"


def packed_linear_name(shape: str, fmt: Format, has_bias: bool) -> str:
    """As :func:`dense_linear_name`; ``shape`` is rows x columns, of several weights the rows of each x columns."""
    return f"packed_linear_{shape}_{fmt.name.replace('.', 'p')}{'_bias' if has_bias else ''}"


class Converter:
    """Turns each of our operators into a call of one kernel; equal kernels are generated once.

    Attributes:
        records: one entry a kernel, in order of first use.
        smallest_packed: elements of the smallest packed weight, None before the first.
    """

    def __init__(self, isa: Isa, tuner: Tuner) -> None:
        self.isa, self.tuner = isa, tuner
        self.records: list[dict[str, Any]] = []
        self.smallest_packed: int | None = None
        self._made: dict[str, Any] = {}

    def table(self) -> dict[str, Callable[..., Any]]:
        """Operator name -> converter."""
        return {
            "dense_linear.default": self._dense_linear,
            "packed_linear.default": self._packed_linear,
            "fused_linear": self._fused_linear,
            "patches.default": self._patches,
            fused_convolution.__name__: self._convolution,
            "rms_norm.default": self._rms_norm,
            "layer_norm.default": self._layer_norm,
            "cached_attention.default": self._cached_attention,
            "pack_cache.default": self._pack_cache,
            "packed_attention.default": self._packed_attention,
            "masked_attention.default": self._masked_attention,
            "embedding.default": self._embedding,
            "slice.Tensor": self._slice,
            "index.Tensor": self._index,
        }

    def _kernel(self, importer: Any, name: str, make: Callable[[], tuple[tvm.tirx.PrimFunc, dict[str, Any]]]) -> Any:
        if name not in self._made:
            func, details = make()
            self._made[name] = importer.block_builder.add_func(func, name)
            self.records.append({"name": name, "isa": self.isa.name, **details})
        return self._made[name]

    def _dense_linear(self, node: fx.Node, importer: Any) -> Any:
        x, weight, bias = importer.retrieve_args(node)
        rows, columns = (int(n) for n in weight.ty.shape)
        storage = str(weight.ty.dtype)
        has_bias = bias is not None
        name = dense_linear_name(rows, columns, storage, has_bias)

        def build(schedule: dense_linear.Schedule) -> tvm.tirx.PrimFunc:
            return dense_linear.dense_linear(rows, columns, storage, has_bias, schedule)

        def operands(tokens: int) -> list[Any]:
            arrays = [np.zeros((1, tokens, columns), "float32"), np.zeros((rows, columns), storage)]
            return [*arrays, *_zeros(has_bias, rows), np.zeros((1, tokens, rows), "float32")]

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            source = dense_linear.__file__
            first = self._choose(f"{name}:1", dense_linear.gemv_space(), build, lambda: operands(1), source)
            space = dense_linear.gemm_space(first.gemv_rows)
            many = f"{name}:{TUNED_TOKENS}"
            schedule = self._choose(many, space, build, lambda: operands(TUNED_TOKENS), source)
            return build(schedule), {"family": "dense_linear", "schedule": dataclasses.asdict(schedule)}

        return self._rowwise(importer, name, make, x, [weight, *([bias] if has_bias else [])], rows)

    def _packed_linear(self, node: fx.Node, importer: Any) -> Any:
        x, parts, bias, format_name, columns, rows = importer.retrieve_args(node)
        return self._linears(importer, [x], [], [(parts, bias, rows)], None, None, format_name, columns)

    def _fused_linear(self, node: fx.Node, importer: Any) -> Any:
        return self._linears(importer, *importer.retrieve_args(node))

    def _linears(
        self,
        importer: Any,
        inputs: list[Any],
        vectors: list[Any],
        weights: list[tuple[list[Any], Any, int]],
        residual: Any,
        prologue: Prologue | None,
        format_name: str,
        columns: int,
    ) -> Any:
        """One call of a kernel, see :func:`compressor.codegen.fusion.fused_linear`; of several weights, a tuple."""
        fmt, rows = Format.parse(format_name), [n for _, _, n in weights]
        has_bias = weights[0][1] is not None
        self._count_packed(min(rows) * columns)
        shape = f"{'_'.join(map(str, rows))}x{columns}"
        name = packed_linear_name(shape, fmt, has_bias)
        name += "" if prologue is None else f"_of_{prologue.name}"
        name += "" if residual is None else "_plus"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            schedule = packed_linear.common_schedule(
                self._schedule(rows[0], columns, fmt, has_bias), rows, fmt, self.isa
            )
            func = packed_linear.fused_linear(
                rows, columns, fmt, has_bias, self.isa, schedule, prologue=prologue, has_residual=residual is not None
            )
            details = {"family": "packed_linear", "format": fmt.name, "schedule": dataclasses.asdict(schedule)}
            return func, details

        stored = [part for parts, bias, _ in weights for part in (*parts, *([bias] if has_bias else []))]
        added = [] if residual is None else [_folded(importer, residual)]
        operands = [*(_folded(importer, x) for x in inputs), *vectors, *stored, *added]
        return _call_by_row(importer, self._kernel(importer, name, make), operands, list(inputs[0].ty.shape)[:-1], rows)

    def _schedule(self, rows: int, columns: int, fmt: Format, has_bias: bool) -> packed_linear.Schedule:
        """What the tuner chooses for a weight alone."""
        tiles, name = -(-rows // TILE_ROWS), packed_linear_name(f"{rows}x{columns}", fmt, has_bias)

        def build(schedule: packed_linear.Schedule) -> tvm.tirx.PrimFunc:
            return packed_linear.packed_linear(rows, columns, fmt, has_bias, self.isa, schedule)

        def operands(tokens: int) -> list[Any]:
            arrays = [np.ones((1, tokens, columns), "float32")]
            for part, (kind, shape) in fmt.parts(rows, columns).items():
                arrays.append(np.ones(shape, kind) if part in ("scales", "tensor_scale") else np.zeros(shape, kind))
                if part == "outlier_starts":  # as many in each row
                    arrays[-1] = np.linspace(0, fmt.outliers(rows, columns), shape[0]).astype(kind)
            return [*arrays, *_zeros(has_bias, rows), np.zeros((1, tokens, rows), "float32")]

        source = packed_linear.__file__
        first = self._choose(f"{name}:1", packed_linear.gemv_space(tiles), build, lambda: operands(1), source)
        space = packed_linear.gemm_space(tiles, first.gemv_tiles, fmt, self.isa)
        many = f"{name}:{TUNED_TOKENS}"
        schedule: packed_linear.Schedule = self._choose(many, space, build, lambda: operands(TUNED_TOKENS), source)
        return schedule

    def _count_packed(self, elements: int) -> None:
        self.smallest_packed = min(elements, self.smallest_packed or elements)

    def _patches(self, node: fx.Node, importer: Any) -> Any:
        x, *geometry = importer.retrieve_args(node)
        batch, *size, channels = x.ty.shape
        kernel, channels = geometry[0], int(channels)
        name = "_".join(["patches", str(channels), *("x".join(map(str, pair)) for pair in geometry)])
        make = lambda: (patches.patches(channels, *geometry), {"family": "patches"})  # noqa: E731
        counts = [outputs(n, *each) for n, *each in zip(size, *geometry, strict=True)]
        out = relax.TensorType([batch, *counts, kernel[0] * kernel[1] * channels], "float32")
        return importer.block_builder.emit(relax.call_tir(self._kernel(importer, name, make), [x], out_ty=out))

    def _convolution(self, node: fx.Node, importer: Any) -> Any:
        x, parts, bias, residual, next_scale, name, rows, pairs, is_relu, following = importer.retrieve_args(node)
        fmt, geometry = Format.parse(name), geometry_of(cast(fx.Node, node.args[0]), pairs)
        assert geometry is not None
        self._count_packed(rows * geometry.columns)
        next_fed = Format.parse(following).activations if following else None
        epilogue = convolution.Epilogue(residual is not None, is_relu, next_fed)
        shape = (rows, geometry, fmt, bias is not None, str(x.ty.dtype) == "int8", epilogue)
        out = relax.TensorType([x.ty.shape[0], *geometry.outputs, rows], "int8" if following else "float32")

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            return convolution.convolution(*shape, self.isa), {"family": "convolution", "format": fmt.name}

        args = [x, *parts, *(part for part in (bias, residual, next_scale) if part is not None)]
        kernel = self._kernel(importer, convolution.convolution_name(*shape), make)
        return importer.block_builder.emit(relax.call_tir(kernel, args, out_ty=out))

    def _choose(self, kernel: str, space: Sequence[Any], build: Any, operands: Any, source: str) -> Any:
        return self.tuner.choose(kernel, space, build, operands, source)

    def _rms_norm(self, node: fx.Node, importer: Any) -> Any:
        x, weight, eps = importer.retrieve_args(node)
        width = int(weight.ty.shape[0])
        name = f"rms_norm_{width}_{eps:g}".replace("-", "m").replace(".", "p")
        make = lambda: (norm.norm(width, eps, False, False), {"family": "rms_norm"})  # noqa: E731
        return self._rowwise(importer, name, make, x, [weight], width)

    def _layer_norm(self, node: fx.Node, importer: Any) -> Any:
        x, shape, weight, bias, eps = (*importer.retrieve_args(node), None, None, 1e-5)[:5]
        if len(shape) != 1 or weight is None:
            return importer._layer_norm(node)
        width, has_bias = int(shape[0]), bias is not None
        name = f"layer_norm_{width}_{eps:g}{'_bias' if has_bias else ''}".replace("-", "m").replace(".", "p")
        make = lambda: (norm.norm(width, eps, True, has_bias), {"family": "layer_norm"})  # noqa: E731
        return self._rowwise(importer, name, make, x, [weight, *([bias] if has_bias else [])], width)

    def _rowwise(self, importer: Any, name: str, make: Any, x: Any, weights: list[Any], width: int) -> Any:
        """Call a kernel over the last dimension."""
        kernel, leading = self._kernel(importer, name, make), list(x.ty.shape)[:-1]
        return _call_by_row(importer, kernel, [_folded(importer, x), *weights], leading, [width])

    def _cached_attention(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, k_cache, v_cache, position, scale, window, softcap, sinks = importer.retrieve_args(node)
        heads, width = int(q.ty.shape[1]), int(q.ty.shape[3])
        shape = (heads, int(k.ty.shape[1]), width, float(scale), int(window), float(softcap))
        name = f"cached_attention_{'_'.join(f'{n:g}' for n in shape)}".replace("-", "m").replace(".", "p")
        name += "" if sinks is None else "_sinks"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            return attention.cached_attention(*shape, sinks is not None), {"family": "cached_attention"}

        args = [q, k, v, k_cache, v_cache, position, *([] if sinks is None else [sinks])]
        return _call_attention(importer, self._kernel(importer, name, make), args)

    def _pack_cache(self, node: fx.Node, importer: Any) -> Any:
        x, order, format_name = importer.retrieve_args(node)
        fmt, (batch, kv_heads, new, width) = CacheFormat.parse(format_name), x.ty.shape
        shape, permuted = (int(kv_heads), int(width)), order is not None
        name = f"pack_cache_{shape[0]}x{shape[1]}_{fmt.name}{'_permuted' if permuted else ''}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            return packed_cache.pack_cache(*shape, fmt, permuted), {"family": "pack_cache", "cache_format": fmt.name}

        out = relax.TensorType([batch, kv_heads, new, fmt.row_bytes(shape[1])], "uint8")
        args = [x, order] if permuted else [x]
        return importer.block_builder.emit(relax.call_tir(self._kernel(importer, name, make), args, out_ty=out))

    def _packed_attention(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, k_cache, v_cache, position, scale, window, softcap, sinks, *orders, fmt_name = importer.retrieve_args(
            node
        )
        fmt, has_sinks, permuted = CacheFormat.parse(fmt_name), sinks is not None, orders[0] is not None
        heads, width = int(q.ty.shape[1]), int(q.ty.shape[3])
        shape = (heads, int(k.ty.shape[1]), width, float(scale), int(window), float(softcap))
        name = f"packed_attention_{'_'.join(f'{n:g}' for n in shape)}".replace("-", "m").replace(".", "p")
        name += f"_{fmt.name}{'_sinks' if has_sinks else ''}{'_permuted' if permuted else ''}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            details = {"family": "packed_attention", "cache_format": fmt.name}
            return packed_cache.packed_attention(*shape, has_sinks, fmt, permuted), details

        args = [q, k, v, k_cache, v_cache, position, *(part for part in (sinks, *orders) if part is not None)]
        return _call_attention(importer, self._kernel(importer, name, make), args)

    def _masked_attention(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, mask, scale = importer.retrieve_args(node)
        batch, heads, length, width = q.ty.shape
        shape = (int(heads), int(k.ty.shape[1]), int(width), float(scale))
        rows = [_tokens_first(arg) for arg in node.args[:3]]  # read in front of their transposes, which are dropped
        given = [x if row is None else importer.env[row] for x, row in zip((q, k, v), rows, strict=True)]
        first = [row is not None for row in rows]
        name = f"masked_attention_{'_'.join(f'{n:g}' for n in shape)}".replace("-", "m").replace(".", "p")
        name += "".join(f"_{letter}" for letter, is_first in zip("qkv", first, strict=True) if is_first)
        make = lambda: (attention.masked_attention(*shape, first), {"family": "masked_attention"})  # noqa: E731
        out = relax.TensorType([batch, length, heads, width], "float32")
        kernel = self._kernel(importer, name, make)
        return importer.block_builder.emit(relax.call_tir(kernel, [*given, mask], out_ty=out))

    def _embedding(self, node: fx.Node, importer: Any) -> Any:
        table, ids = importer.retrieve_args(node)[:2]
        bb = importer.block_builder
        rows, width = (int(n) for n in table.ty.shape)
        storage = str(table.ty.dtype)
        name = f"embedding_{rows}x{width}_{storage}"
        make = lambda: (embedding.embedding(rows, width, storage), {"family": "embedding"})  # noqa: E731
        kernel = self._kernel(importer, name, make)
        flat = ids if len(ids.ty.shape) == 2 else bb.emit(relax.op.reshape(ids, [1, *ids.ty.shape]))
        out = relax.TensorType([*flat.ty.shape, width], "float32")
        y = bb.emit(relax.call_tir(kernel, [table, flat], out_ty=out))
        return y if flat is ids else bb.emit(relax.op.reshape(y, [*ids.ty.shape, width]))

    @staticmethod
    def _slice(node: fx.Node, importer: Any) -> Any:
        """A slice up to a symbolic end, such as the first S rows of a table of positions, has that length.

        TVM's own converter infers min(S, rows), with which nothing broadcasts.
        """
        given: tuple[Any, ...] = node.args
        table, axis, begin, end, step = given + (None, 0, None, None, 1)[len(given) :]
        length = node.meta["val"].shape[axis]
        known = end.meta["val"] if isinstance(end, fx.Node) else None
        if begin or step != 1 or not _same_symbol(length, known):
            return importer._slice(node)

        def first(x: Any) -> Any:
            shape = list(x.shape)
            shape[axis] = importer.env[end]
            return te.compute(shape, lambda *index: x[index], "first")

        return importer.block_builder.emit_te(first, importer.env[table])

    @staticmethod
    def _index(node: fx.Node, importer: Any) -> Any:
        """Rows picked by one index tensor; TVM's own converter would read foreign memory where one is out of range."""
        indices: Any = node.args[1]
        given = [(axis, importer.env[index]) for axis, index in enumerate(indices) if index is not None]
        if len(given) != 1 or str(given[0][1].ty.dtype) == "bool":
            return importer._index_tensor(node)
        ((axis, index),) = given
        return importer.block_builder.emit(relax.op.take(importer.env[node.args[0]], index, axis, mode="clip"))


def _folded(importer: Any, x: Any) -> Any:
    """``x`` with all dimensions but the last folded into two."""
    leading = list(x.ty.shape)[:-1]
    if len(leading) == 2:
        return x
    folded = [prod(leading[:-1], start=tvm.tirx.IntImm("int64", 1)), leading[-1]] if leading else [1, 1]
    return importer.block_builder.emit(relax.op.reshape(x, [*folded, x.ty.shape[-1]]))


def _call_by_row(importer: Any, kernel: Any, operands: list[Any], leading: list[Any], widths: list[int]) -> Any:
    """Call a kernel whose first operand is folded; outputs [*leading, width], a tuple of them if there are several."""
    bb, folded = importer.block_builder, list(operands[0].ty.shape)[:-1]
    types = [relax.TensorType([*folded, width], "float32") for width in widths]
    found = bb.emit(relax.call_tir(kernel, operands, out_ty=types[0] if len(types) == 1 else types))
    outputs = [found] if len(types) == 1 else [bb.emit(relax.TupleGetItem(found, i)) for i in range(len(types))]
    if len(leading) != 2:
        outputs = [bb.emit(relax.op.reshape(y, [*leading, n])) for y, n in zip(outputs, widths, strict=True)]
    return outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)


def _call_attention(importer: Any, kernel: Any, args: list[Any]) -> Any:
    """Call an attention kernel on q [B, H, S, D], new keys and values, caches, which it writes, and the rest."""
    (batch, heads, new, width), caches = args[0].ty.shape, [args[3].ty, args[4].ty]
    out = relax.TensorType([batch, new, heads, width], "float32")
    call = relax.op.call_tir_inplace(kernel, relax.Tuple(args), [-1, 3, 4], [out, *caches])
    return importer.block_builder.emit(relax.TupleGetItem(importer.block_builder.emit(call), 0))


def _zeros(wanted: bool, size: int) -> list[Any]:
    return [np.zeros((size,), "float32")] if wanted else []


def _tokens_first(arg: Any) -> fx.Node | None:
    """The node [B, S, H, D] whose transpose [B, H, S, D] an operand is; None where it is something else."""
    if not isinstance(arg, fx.Node) or arg.target not in (_ATEN.transpose.int, _ATEN.permute.default):
        return None
    source: Any = arg.args[0]
    return source if arg.target(torch.empty(1, 2, 3, 4, device="meta"), *arg.args[1:]).shape == (1, 3, 2, 4) else None


def _same_symbol(one: object, other: object) -> bool:
    """Whether both are the same symbolic number."""
    return isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt) and one.node.expr == other.node.expr
