"""Convert operators of the FX graph to calls of our kernels, as TVM's importer asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax

from compressor.codegen.lowering.converters.experts import ExpertConverter
from compressor.codegen.lowering.converters.plain import CONVERTERS
from compressor.codegen.lowering.converters.recurrences import RecurrenceConverter
from compressor.codegen.lowering.convolutions import fused_convolution
from compressor.codegen.lowering.kernel_set import Maker
from compressor.errors import VerificationError
from compressor.formats.cache import CacheFormat
from compressor.formats.format import Format
from compressor.graph.matching import shape_of

_ATEN = torch.ops.aten


class Converter(ExpertConverter, RecurrenceConverter):
    """Turns each of our operators into a call of one kernel."""

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the converter of each operator, by its name."""
        return {
            "dense_linear.default": self.dense_linear,
            "packed_linear.default": self.packed_linear,
            "fused_linear": self.fused_linear,
            "routed_linear.default": self.routed_linear,
            "packed_routed_linear.default": self.packed_routed_linear,
            "top_k.default": self.top_k,
            "patches.default": self.patches,
            "depthwise_linear.default": self.depthwise,
            "packed_depthwise.default": self.depthwise,
            fused_convolution.__name__: self.convolution,
            "rms_norm.default": self._rms_norm,
            "layer_norm.default": self._layer_norm,
            "cached_attention.default": self._cached_attention,
            "pack_cache.default": self._pack_cache,
            "packed_attention.default": self._packed_attention,
            "tree_attention.default": self._cached_attention,
            "packed_tree_attention.default": self._packed_attention,
            "kept_attention.default": self._cached_attention,
            "packed_kept_attention.default": self._packed_attention,
            "masked_attention.default": self._masked_attention,
            "embedding.default": self._embedding,
            "packed_embedding.default": self._packed_embedding,
            **CONVERTERS,
            **self.recurrences(),
        }

    def _rms_norm(self, node: fx.Node, importer: Any) -> Any:
        x, weight, eps = importer.retrieve_args(node)
        width = int(weight.ty.shape[0])
        name = f"rms_norm_{width}_{eps:g}".replace("-", "m").replace(".", "p")
        make = lambda: (self.kernels.norm(width, eps, False, False), {"family": "rms_norm"})  # noqa: E731
        return self.rowwise(importer, name, make, x, [weight], width)

    def _layer_norm(self, node: fx.Node, importer: Any) -> Any:
        x, shape, weight, bias, eps = (*importer.retrieve_args(node), None, None, 1e-5)[:5]
        if len(shape) == 1 and weight is None:
            one, zero = (
                importer.block_builder.emit(f([int(shape[0])], "float32")) for f in (relax.op.ones, relax.op.zeros)
            )
            return importer.block_builder.emit(relax.op.nn.layer_norm(x, one, zero, axes=-1, epsilon=float(eps)))
        if len(shape) != 1:
            return importer._layer_norm(node)
        width, has_bias = int(shape[0]), bias is not None
        name = f"layer_norm_{width}_{eps:g}{'_bias' if has_bias else ''}".replace("-", "m").replace(".", "p")
        make = lambda: (self.kernels.norm(width, eps, True, has_bias), {"family": "layer_norm"})  # noqa: E731
        return self.rowwise(importer, name, make, x, [weight, *([bias] if has_bias else [])], width)

    def _cached_attention(self, node: fx.Node, importer: Any) -> Any:
        given, (scale, window, softcap, sinks, *more) = _after_places(node, importer.retrieve_args(node))
        chunk, slopes, biases = _filled(more, 0, (0, None, None))
        family, make_kernel = self._family(node)
        shape = (*_heads(given), float(scale), int(window), float(softcap))
        name = f"{family}_{'_'.join(f'{n:g}' for n in shape)}".replace("-", "m").replace(".", "p")
        name += f"{'' if sinks is None else '_sinks'}{f'_chunk{chunk}' if chunk else ''}"
        name += "" if slopes is None else "_slopes"
        distances = 0
        if biases is not None:
            distances = int(biases.ty.shape[0])
            biases = importer.block_builder.emit(relax.op.reshape(biases, [distances * shape[0]]))
            name += f"_distances{distances}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            func = make_kernel(*shape, sinks is not None, int(chunk), slopes is not None, distances)
            return func, {"family": family}

        args = [*given, *(part for part in (sinks, slopes, biases) if part is not None)]
        return _call_attention(importer, self.kernel(importer, name, make), args)

    def _pack_cache(self, node: fx.Node, importer: Any) -> Any:
        x, order, format_name = importer.retrieve_args(node)
        fmt, (batch, kv_heads, new, width) = CacheFormat.parse(format_name), x.ty.shape
        shape, permuted = (int(kv_heads), int(width)), order is not None
        name = f"pack_cache_{shape[0]}x{shape[1]}_{fmt.name}{'_permuted' if permuted else ''}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            return self.kernels.pack_cache(*shape, fmt, permuted), {"family": "pack_cache", "cache_format": fmt.name}

        out = relax.TensorType([batch, kv_heads, new, fmt.row_bytes(shape[1])], "uint8")
        args = [x, order] if permuted else [x]
        return importer.block_builder.emit(relax.call_tir(self.kernel(importer, name, make), args, out_ty=out))

    def _packed_attention(self, node: fx.Node, importer: Any) -> Any:
        given, (scale, window, softcap, sinks, *orders, fmt_name) = _after_places(node, importer.retrieve_args(node))
        fmt, has_sinks, permuted = CacheFormat.parse(fmt_name), sinks is not None, orders[0] is not None
        family, make_kernel = self._family(node)
        shape = (*_heads(given), float(scale), int(window), float(softcap))
        name = f"{family}_{'_'.join(f'{n:g}' for n in shape)}".replace("-", "m").replace(".", "p")
        name += f"_{fmt.name}{'_sinks' if has_sinks else ''}{'_permuted' if permuted else ''}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            return make_kernel(*shape, has_sinks, fmt, permuted), {"family": family, "cache_format": fmt.name}

        args = [*given, *(part for part in (sinks, *orders) if part is not None)]
        return _call_attention(importer, self.kernel(importer, name, make), args)

    def _family(self, node: fx.Node) -> tuple[str, Maker]:
        """Return the name and the maker of a kernel of attention over caches: those of its operator's name."""
        operator = str(node.target.__name__)  # type: ignore[union-attr]
        family = operator.partition(".")[0]
        if (make := getattr(self.kernels, family)) is None:
            words = self.kernels.missing[operator]
            raise VerificationError(f"{node.name}: {self.isa.name} has no kernels for {words}; leave them out")
        return family, make

    def _masked_attention(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, mask, scale, window, bias, softcap = _filled(importer.retrieve_args(node), 5, (0, None, 0.0))
        batch, heads, length, width = q.ty.shape
        if mask is None:
            shown = relax.op.ones([batch, k.ty.shape[2]], "float32")
            mask = importer.block_builder.emit(shown)
        if not _same_length(node):
            return self._cross_attention(node, importer, mask)
        shape, cap = (int(heads), int(k.ty.shape[1]), int(width), float(scale)), float(softcap)
        rows = [_tokens_first(arg) for arg in node.args[:3]]  # read in front of their transposes, which are dropped
        given = [x if row is None else importer.env[row] for x, row in zip((q, k, v), rows, strict=True)]
        first = [row is not None for row in rows]
        name = f"masked_attention_{'_'.join(f'{n:g}' for n in shape)}".replace("-", "m").replace(".", "p")
        name += "".join(f"_{letter}" for letter, is_first in zip("qkv", first, strict=True) if is_first)
        own: tuple[bool, bool, bool] | None = None
        if bias is not None:
            sizes = bias.ty.shape
            own = (_is_own(sizes[0]), _is_own(sizes[1]), _is_own(sizes[2]))
            name += f"_bias{''.join(str(int(each)) for each in own)}"
            flat = math.prod(bias.ty.shape, start=tvm.tirx.IntImm("int64", 1))
            given_bias = [importer.block_builder.emit(relax.op.reshape(bias, [flat]))]
        name += f"_window{window}" if window else ""
        name += f"_cap{cap:g}".replace(".", "p") if cap else ""

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            func = self.kernels.masked_attention(*shape, first, int(window), own, cap)
            return func, {"family": "masked_attention"}

        out = relax.TensorType([batch, length, heads, width], "float32")
        kernel = self.kernel(importer, name, make)
        operands = [*given, mask, *(given_bias if own else [])]
        return importer.block_builder.emit(relax.call_tir(kernel, operands, out_ty=out))

    def _cross_attention(self, node: fx.Node, importer: Any, mask: Any) -> Any:
        q, k, v, _, scale, window, bias, softcap = _filled(importer.retrieve_args(node), 5, (0, None, 0.0))
        if window or bias is not None:
            raise VerificationError(f"{node.name}: attention to an encoder's output within a window, or with a bias")
        batch, heads, length, width = q.ty.shape
        shape, cap = (int(heads), int(k.ty.shape[1]), int(width), float(scale)), float(softcap)
        name = f"cross_attention_{'_'.join(f'{n:g}' for n in shape)}".replace("-", "m").replace(".", "p")
        name += f"_cap{cap:g}".replace(".", "p") if cap else ""
        make = lambda: (self.kernels.cross_attention(*shape, cap), {"family": "cross_attention"})  # noqa: E731
        out = relax.TensorType([batch, length, heads, width], "float32")
        call = relax.call_tir(self.kernel(importer, name, make), [q, k, v, mask], out_ty=out)
        return importer.block_builder.emit(call)

    def _embedding(self, node: fx.Node, importer: Any) -> Any:
        table, ids = importer.retrieve_args(node)[:2]
        rows, width = (int(n) for n in table.ty.shape)
        storage = str(table.ty.dtype)
        name = f"embedding_{rows}x{width}_{storage}"
        make = lambda: (self.kernels.embedding(rows, width, storage), {"family": "embedding"})  # noqa: E731
        return _look_up(importer, self.kernel(importer, name, make), ids, width, [table, ids])

    def _packed_embedding(self, node: fx.Node, importer: Any) -> Any:
        ids, parts, format_name, rows, width = importer.retrieve_args(node)
        fmt = Format.parse(format_name)
        self._count_packed(rows * width)
        name = f"packed_embedding_{rows}x{width}_{fmt.name.replace('.', 'p')}"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            func = self.kernels.packed_embedding(rows, width, fmt)
            return func, {"family": "packed_embedding", "format": fmt.name}

        return _look_up(importer, self.kernel(importer, name, make), ids, width, [ids, *parts])


def _look_up(importer: Any, kernel: Any, ids: Any, width: int, operands: list[Any]) -> Any:
    """Call a kernel that gives a row of ``width`` for each of ids, which it takes as [d0, d1]."""
    bb, sizes = importer.block_builder, list(ids.ty.shape)
    folded = [math.prod(sizes[:-1], start=tvm.tirx.IntImm("int64", 1)), sizes[-1]] if sizes else [1, 1]
    flat = ids if len(sizes) == 2 else bb.emit(relax.op.reshape(ids, folded))
    out = relax.TensorType([*folded, width], "float32")
    y = bb.emit(relax.call_tir(kernel, [flat if operand is ids else operand for operand in operands], out_ty=out))
    return y if flat is ids else bb.emit(relax.op.reshape(y, [*sizes, width]))


def _filled(given: Sequence[Any], required: int, defaults: tuple[Any, ...]) -> list[Any]:
    """Return an operator's arguments, the defaults in place of those that the graph leaves out."""
    return [*given, *defaults[len(given) - required :]]


def _after_places(node: fx.Node, given: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """Return the tensors of attention over caches up to the places of its tokens, and the arguments behind them."""
    count = [argument.name for argument in node.target._schema.arguments].index("scale")  # type: ignore[union-attr]
    return list(given[:count]), given[count:]


def _heads(given: Sequence[Any]) -> tuple[int, int, int]:
    """Return the heads of queries and of keys and values, and a head's width."""
    q, k = (tensor.ty.shape for tensor in given[:2])
    return int(q[1]), int(k[1]), int(q[3])


def _is_own(size: Any) -> bool:
    """Return whether there is one of each, not one for all."""
    return not (isinstance(size, tvm.tirx.IntImm) and int(size) == 1)


def _call_attention(importer: Any, kernel: Any, args: list[Any]) -> Any:
    """Call an attention kernel on q [B, H, R, D], new keys and values, caches, which it writes, and the rest."""
    (batch, heads, new, width), caches = args[0].ty.shape, [args[3].ty, args[4].ty]
    out = relax.TensorType([batch, new, heads, width], "float32")
    call = relax.op.call_tir_inplace(kernel, relax.Tuple(args), [-1, 3, 4], [out, *caches])
    return importer.block_builder.emit(relax.TupleGetItem(importer.block_builder.emit(call), 0))


def _same_length(node: fx.Node) -> bool:
    """Return whether attention has as many queries as keys, of the same tokens."""
    q, k = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
    return shape_of(q)[2] == shape_of(k)[2]


def _tokens_first(arg: Any) -> fx.Node | None:
    """Return the node [B, S, H, D] of which an operand is the transpose [B, H, S, D]; None where it is not one."""
    if not isinstance(arg, fx.Node) or arg.target not in (_ATEN.transpose.int, _ATEN.permute.default):
        return None
    source: Any = arg.args[0]
    return source if arg.target(torch.empty(1, 2, 3, 4, device="meta"), *arg.args[1:]).shape == (1, 3, 2, 4) else None
