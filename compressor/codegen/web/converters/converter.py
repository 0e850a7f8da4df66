"""Convert our operators to calls of WGSL kernels, and say what has no kernel there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import tvm
from torch import fx
from tvm import relax

from compressor.codegen.lowering.converters.plain import CONVERTERS
from compressor.codegen.lowering.experts.stack import as_lowered
from compressor.codegen.web.converters.linears import Dispatch, LinearCalls, product, storage_of
from compressor.codegen.web.kernels import attention, embedding, norm, packed_linear, softmax, tree_attention
from compressor.errors import UsageError
from compressor.formats.format import Format

_RECURRENT = ("causal_convolution.default", "selective_scan.default", "gated_delta_rule.default", "wkv.default")
_ABSENT = {
    **dict.fromkeys(_RECURRENT, "recurrent layers"),
    "patches.default": "convolutions",
    "depthwise_linear.default": "depthwise convolutions",
    "packed_depthwise.default": "depthwise convolutions",
    "pack_cache.default": "packed caches (the pass kv_cache)",
    "packed_attention.default": "packed caches (the pass kv_cache)",
    "kept_attention.default": "layers that run kept tokens alone (the pass swift_kv)",
    "packed_kept_attention.default": "packed caches (the pass kv_cache)",
}
"""Our operators without kernels in WGSL, with their names in messages."""
_FORMAT_ARGUMENTS = {"packed_linear.default": 3, "packed_routed_linear.default": 4}
"""Places of the names of formats."""


class WebConverter(LinearCalls):
    """Converter of our operators to calls of WGSL kernels."""

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the converters, by operator name."""
        return {
            "dense_linear.default": self.dense_linear,
            "packed_linear.default": self.packed_linear,
            "routed_linear.default": self.routed_linear,
            "packed_routed_linear.default": self.packed_routed_linear,
            "top_k.default": self.top_k,
            "rms_norm.default": self._rms_norm,
            "layer_norm.default": self._layer_norm,
            "softmax.int": self._softmax,
            "_softmax.default": self._softmax,
            "cached_attention.default": self._cached_attention,
            "tree_attention.default": self._tree_attention,
            "masked_attention.default": self._masked_attention,
            "embedding.default": self._embedding,
            "packed_embedding.default": self._packed_embedding,
            **CONVERTERS,
            **dict.fromkeys(("cat.default", "concat.default"), _concatenate),
            "chunk.default": _chunk,
            "unbind.int": _unbind,
            "split.Tensor": _split,
            "split_with_sizes.default": _split,
            **{name: _refused for name in _ABSENT},
        }

    def _rms_norm(self, node: fx.Node, importer: Any) -> Any:
        x, weight, eps = importer.retrieve_args(node)
        width = int(weight.ty.shape[0])
        return self.rowwise(importer, (norm.norm(width, eps, False, False),), x, [weight], width)

    def _layer_norm(self, node: fx.Node, importer: Any) -> Any:
        x, shape, weight, bias, eps = (*importer.retrieve_args(node), None, None, 1e-5)[:5]
        if len(shape) != 1:
            return importer._layer_norm(node)
        width = int(shape[0])
        weight = relax.const(np.ones(width, "float32")) if weight is None else weight
        return self.rowwise(importer, (norm.norm(width, eps, True, bias is not None),), x, [weight, bias], width)

    def _softmax(self, node: fx.Node, importer: Any) -> Any:
        x, axis = importer.retrieve_args(node)[:2]
        width, last = x.ty.shape[-1], len(x.ty.shape) - 1
        if axis % (last + 1) != last or not isinstance(width, tvm.tirx.IntImm):
            return importer._softmax(node)
        return self.rowwise(importer, (softmax.softmax(int(width)),), x, [], int(width))

    def _cached_attention(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, k_cache, v_cache, position, scale, window, softcap, sinks, chunk, slopes, biases = _filled(
            importer.retrieve_args(node), 10, (0, None, None)
        )
        (batch, heads, new, width), kv_heads = q.ty.shape, int(k.ty.shape[1])
        shape = (int(heads), kv_heads, int(width), float(scale), int(window), float(softcap))
        distances = 0 if biases is None else int(biases.ty.shape[0])
        attend = attention.cached_attention(*shape, sinks is not None, int(chunk), slopes is not None, distances)
        write = attention.write_cache(kv_heads, int(width))
        more = [part for part in (sinks, slopes, biases) if part is not None]

        def sizes(shapes: list[list[Any]]) -> list[Any]:
            return [shapes[0][0], shapes[0][2], shapes[3][2]]

        dispatches = [
            Dispatch((write,), (1, 5, 3), sizes),
            Dispatch((write,), (2, 5, 4), sizes),
            Dispatch(attend, (0, 3, 4, 5, *range(6, 6 + len(more)), -1), sizes),
        ]
        operands = [q, k, v, k_cache, v_cache, position, *more]
        out = relax.TensorType([batch, new, heads, width], "float32")
        return self.call(importer, attend[0].name, dispatches, operands, out)

    def _tree_attention(self, node: fx.Node, importer: Any) -> Any:
        given = importer.retrieve_args(node)
        q, k, v, k_cache, v_cache = given[:5]
        scale, window, softcap, sinks, chunk, slopes, biases = _filled(given[9:], 4, (0, None, None))
        (_, heads, new, width), kv_heads = q.ty.shape, int(k.ty.shape[1])
        shape = (int(heads), kv_heads, int(width), float(scale), int(window), float(softcap))
        distances = 0 if biases is None else int(biases.ty.shape[0])
        attend = tree_attention.tree_attention(*shape, sinks is not None, int(chunk), slopes is not None, distances)
        write = tree_attention.write_rows(kv_heads, int(width))
        more = [part for part in (sinks, slopes, biases) if part is not None]

        def sizes(shapes: list[list[Any]]) -> list[Any]:
            return [shapes[0][2], shapes[3][2]]

        dispatches = [
            Dispatch((write,), (1, 5, 3), sizes),
            Dispatch((write,), (2, 5, 4), sizes),
            Dispatch((attend,), (0, 3, 4, 5, *range(6, 6 + len(more)), -1), sizes),
        ]
        operands = [q, k, v, k_cache, v_cache, self._tree(importer, given[5:9]), *more]
        out = relax.TensorType([1, new, heads, width], "float32")
        return self.call(importer, attend.name, dispatches, operands, out)

    def _tree(self, importer: Any, parts: Sequence[Any]) -> Any:
        """Emit the joining of positions, parents, slots and rows, once for all layers."""
        key = ("tree", *parts)
        if key not in self._kept:
            kernel = tree_attention.join_tree()
            dispatch = Dispatch((kernel,), (0, 1, 2, 3, -1), lambda shapes: [shapes[0][0]])
            out = relax.TensorType([parts[0].ty.shape[0], 4], "int32")
            self._kept[key] = [self.call(importer, kernel.name, [dispatch], list(parts), out)]
        return self._kept[key][0]

    def _masked_attention(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, mask, scale, window, bias, cap = _filled(importer.retrieve_args(node), 5, (0, None, 0.0))
        (batch, heads, length, width), own = q.ty.shape, None
        if bias is not None:
            sizes = bias.ty.shape
            own = (_is_own(sizes[0]), _is_own(sizes[1]), _is_own(sizes[2]))
        shape = (int(heads), int(k.ty.shape[1]), int(width), float(scale))
        kernels = attention.masked_attention(*shape, int(window), own, float(cap))
        if mask is None:
            mask = importer.block_builder.emit(relax.op.ones([batch, k.ty.shape[2]], "float32"))
        operands = [q, k, v, mask, *([] if bias is None else [bias])]
        buffers = (*range(len(operands)), -1)
        dispatch = Dispatch(kernels, buffers, lambda shapes: [shapes[0][0], shapes[0][2], shapes[1][2]])
        out = relax.TensorType([batch, length, heads, width], "float32")
        return self.call(importer, kernels[0].name, [dispatch], operands, out)

    def _embedding(self, node: fx.Node, importer: Any) -> Any:
        table, ids = importer.retrieve_args(node)[:2]
        rows, width = (int(n) for n in table.ty.shape)
        storage = storage_of(table)
        kernel = embedding.embedding(rows, width, storage)
        dispatch = Dispatch((kernel,), (0, 1, -1), lambda shapes: [product(shapes[1])])
        out = relax.TensorType([*ids.ty.shape, width], "float32")
        return self.call(importer, kernel.name, [dispatch], [table, ids], out)

    def _packed_embedding(self, node: fx.Node, importer: Any) -> Any:
        ids, parts, format_name, rows, width = importer.retrieve_args(node)
        self.count_packed(rows * width)
        fmt = Format.parse(format_name)
        stored = dict(zip(fmt.parts(rows, width), parts, strict=True))
        kernel = embedding.packed_embedding(rows, width, fmt)
        operands = [ids, *(stored[name] for name in packed_linear.stored_parts(fmt))]
        dispatch = Dispatch((kernel,), (*range(len(operands)), -1), lambda shapes: [product(shapes[0])])
        return self.call(
            importer, kernel.name, [dispatch], operands, relax.TensorType([*ids.ty.shape, width], "float32")
        )


def _filled(given: Sequence[Any], required: int, defaults: tuple[Any, ...]) -> list[Any]:
    """Return an operator's arguments, the defaults in place of those that the graph leaves out."""
    return [*given, *defaults[len(given) - required :]]


def _is_own(size: Any) -> bool:
    """Return whether there is one of each, not one for all."""
    return not (isinstance(size, tvm.tirx.IntImm) and int(size) == 1)


def _split(node: fx.Node, importer: Any) -> Any:
    """Convert a split to slices, which fuse into the kernels that read them, instead of one kernel with several
    outputs.
    """
    x, sizes, axis = (*importer.retrieve_args(node), 0)[:3]
    return _slices(importer, x, sizes, axis)


def _concatenate(node: fx.Node, importer: Any) -> Any:
    """Convert a concatenation without its empty parts, by whose size TVM would divide, such as no channels."""
    parts, axis = (*importer.retrieve_args(node), 0)[:2]
    axis %= len(parts[0].ty.shape)
    sizes = [part.ty.shape[axis] for part in parts]
    kept = [
        p for p, size in zip(parts, sizes, strict=True) if not (isinstance(size, tvm.tirx.IntImm) and int(size) == 0)
    ]
    return kept[0] if len(kept) == 1 else importer.block_builder.emit(relax.op.concat(kept, axis))


def _chunk(node: fx.Node, importer: Any) -> Any:
    """Convert a split into so many equal parts."""
    x, count, axis = (*importer.retrieve_args(node), 0)[:3]
    return _slices(importer, x, -(-int(x.ty.shape[axis % len(x.ty.shape)]) // count), axis)


def _unbind(node: fx.Node, importer: Any) -> Any:
    """Convert a split into all places of a dimension, which goes."""
    x, axis = (*importer.retrieve_args(node), 0)[:2]
    axis %= len(x.ty.shape)
    parts = _slices(importer, x, 1, axis).fields
    return relax.Tuple([importer.block_builder.emit(relax.op.squeeze(part, [axis])) for part in parts])


def _slices(importer: Any, x: Any, sizes: Any, axis: int) -> Any:
    """Emit parts of a dimension, each of ``sizes``, or of as many as each of these says."""
    axis %= len(x.ty.shape)
    total = int(x.ty.shape[axis])
    if isinstance(sizes, int):
        sizes = [min(sizes, total - begin) for begin in range(0, total, sizes)]
    ends = list(accumulate(map(int, sizes)))
    parts = [relax.op.strided_slice(x, [axis], [end - n], [end]) for end, n in zip(ends, sizes, strict=True)]
    return relax.Tuple([importer.block_builder.emit(part) for part in parts])


def _refused(node: fx.Node, _importer: Any) -> Any:
    """Raise the UsageError for an operator without kernels."""
    raise UsageError(_refusal(node))


def _refusal(node: fx.Node) -> str:
    what = _ABSENT[_operator(node)]
    return f"node {node.name}: the target webgpu has no kernels for {what}; take the target x86 for them"


def _operator(node: fx.Node) -> str:
    """Return the name of one of our operators as in :meth:`WebConverter.table`, or an empty text for any other node."""
    return str(node.target).removeprefix("compressor.") if node.op == "call_function" else ""


def why_unsupported(graph: fx.GraphModule) -> str:
    """Return the message about the first node without kernels in WGSL, or an empty text if all have some."""
    for node in as_lowered(graph).graph.nodes:
        operator = _operator(node)
        if operator in _ABSENT:
            return _refusal(node)
        if operator in _FORMAT_ARGUMENTS:
            name = cast(str, node.args[_FORMAT_ARGUMENTS[operator]])
            if reason := packed_linear.supports(Format.parse(name)):
                return reason
    return ""
