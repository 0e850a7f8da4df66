"""Convert operators of the FX graph to calls of WGSL kernels, as TVM's importer expects.

A call is a ``call_dps_packed`` of a name in the Relax program, which no TVM pass looks into;
:mod:`compressor.codegen.web.program` replaces it by the dispatches that are recorded here under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import tvm
from torch import fx
from tvm import relax

from compressor.codegen.lowering.converters import picking
from compressor.codegen.lowering.converters.plain import slice_rows
from compressor.codegen.web.kernel import Kernel
from compressor.codegen.web.kernels import activations, attention, dense_linear, embedding, norm, packed_linear
from compressor.errors import UsageError
from compressor.formats.format import Format

_RECURRENT = ("causal_convolution.default", "selective_scan.default", "gated_delta_rule.default", "wkv.default")
_ABSENT = {
    **dict.fromkeys(_RECURRENT, "recurrent layers"),
    "patches.default": "convolutions",
    "join_experts.default": "experts",
    "routed_linear.default": "experts",
    "packed_routed_linear.default": "experts",
    "top_k.default": "experts (the choice of the largest scores)",
    "depthwise_linear.default": "depthwise convolutions",
    "packed_depthwise.default": "depthwise convolutions",
    "pack_cache.default": "packed caches (the pass kv_cache)",
    "packed_attention.default": "packed caches (the pass kv_cache)",
}
"""Our operators without kernels in WGSL, with their names in messages."""
_ABSENT_ARGUMENTS = {
    "cached_attention.default": {10: "attention within chunks", 11: "ALiBi"},
    "masked_attention.default": {5: "windows in encoders", 6: "biases of attention (relative positions)"},
}
"""Arguments of our operators that the kernels in WGSL know only as absent, by their places."""


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


class WebConverter:
    """Converter of our operators to calls of WGSL kernels.

    Attributes:
        calls: dispatches of each call, by name.
        smallest_packed: elements of the smallest packed weight, None before the first.
    """

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Dispatch, ...]] = {}
        self.smallest_packed: int | None = None
        self._kept: dict[Any, list[Any]] = {}  # (activations, rounding) -> rounded activations

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the converters, by operator name."""
        return {
            "dense_linear.default": self._dense_linear,
            "packed_linear.default": self._packed_linear,
            "rms_norm.default": self._rms_norm,
            "layer_norm.default": self._layer_norm,
            "cached_attention.default": self._cached_attention,
            "masked_attention.default": self._masked_attention,
            "embedding.default": self._embedding,
            "packed_embedding.default": self._packed_embedding,
            "slice.Tensor": slice_rows,
            "split.Tensor": _split,
            "index.Tensor": picking.index,
            "select.int": picking.select,
            "narrow.default": picking.narrow,
            **{name: _refused for name in _ABSENT},
        }

    def _call(self, importer: Any, name: str, dispatches: Sequence[Dispatch], operands: list[Any], out: Any) -> Any:
        self.calls.setdefault(name, tuple(dispatches))
        return importer.block_builder.emit(relax.call_dps_packed(name, relax.Tuple(operands), out))

    def _rowwise(self, importer: Any, kernels: tuple[Kernel, ...], x: Any, rest: list[Any], width: int) -> Any:
        """Emit a call of kernels over the last dimension of ``x``, whose only size is the number of rows."""
        operands = [x, *(part for part in rest if part is not None)]
        dispatch = _of_rows(kernels, len(operands), 1)
        out = relax.TensorType([*list(x.ty.shape)[:-1], width], "float32")
        return self._call(importer, kernels[0].name, [dispatch], operands, out)

    def _dense_linear(self, node: fx.Node, importer: Any) -> Any:
        x, weight, bias = importer.retrieve_args(node)
        rows, columns = (int(n) for n in weight.ty.shape)
        storage = _storage(weight)
        kernels = dense_linear.dense_linear(rows, columns, storage, bias is not None)
        return self._rowwise(importer, kernels, x, [weight, bias], rows)

    def _packed_linear(self, node: fx.Node, importer: Any) -> Any:
        x, parts, bias, format_name, columns, rows = importer.retrieve_args(node)
        self.smallest_packed = min(rows * columns, self.smallest_packed or rows * columns)
        fmt = Format.parse(format_name)
        kernels = packed_linear.packed_linear(rows, columns, fmt, bias is not None)
        stored = dict(zip(fmt.parts(rows, columns), parts, strict=True))
        inputs = [x] if fmt.activations is None else self._rounded(importer, x, fmt, stored.get("input_scale"))
        rest = [*inputs[1:], *(stored[name] for name in packed_linear.stored_parts(fmt)), bias]
        return self._rowwise(importer, kernels, inputs[0], rest, rows)

    def _rounded(self, importer: Any, x: Any, fmt: Format, input_scale: Any) -> list[Any]:
        """Emit the rounding of activations as a format's linears read them, once for all linears that share it."""
        columns = int(x.ty.shape[-1])
        leading = list(x.ty.shape)[:-1]
        layout = activations.Rounded.of(columns, fmt) if fmt.integer_products else None
        key = (x, input_scale, fmt.activations, layout)
        if key in self._kept:
            return self._kept[key]
        kernel = activations.round_activations(columns, fmt)
        operands = [x, *([] if input_scale is None else [input_scale])]
        made = [(columns, "float32")]
        if layout is not None:
            made = [(layout.words, "uint32"), (layout.numbers, "float32")]
        dispatch = _of_rows((kernel,), len(operands), len(made))
        out = [relax.TensorType([*leading, width], dtype) for width, dtype in made]
        found = self._call(importer, kernel.name, [dispatch], operands, out if len(out) > 1 else out[0])
        parts = [found]
        if len(out) > 1:
            parts = [importer.block_builder.emit(relax.TupleGetItem(found, i)) for i in range(len(out))]
        return self._kept.setdefault(key, parts)

    def _rms_norm(self, node: fx.Node, importer: Any) -> Any:
        x, weight, eps = importer.retrieve_args(node)
        width = int(weight.ty.shape[0])
        return self._rowwise(importer, (norm.norm(width, eps, False, False),), x, [weight], width)

    def _layer_norm(self, node: fx.Node, importer: Any) -> Any:
        x, shape, weight, bias, eps = (*importer.retrieve_args(node), None, None, 1e-5)[:5]
        if len(shape) != 1 or weight is None:
            return importer._layer_norm(node)
        width = int(shape[0])
        return self._rowwise(importer, (norm.norm(width, eps, True, bias is not None),), x, [weight, bias], width)

    def _cached_attention(self, node: fx.Node, importer: Any) -> Any:
        # What comes after these is refused by why_unsupported.
        q, k, v, k_cache, v_cache, position, scale, window, softcap, sinks = importer.retrieve_args(node)[:10]
        (batch, heads, new, width), kv_heads = q.ty.shape, int(k.ty.shape[1])
        shape = (int(heads), kv_heads, int(width), float(scale), int(window), float(softcap))
        write, attend = (
            attention.write_cache(kv_heads, int(width)),
            attention.cached_attention(*shape, sinks is not None),
        )

        def sizes(shapes: list[list[Any]]) -> list[Any]:
            return [shapes[0][0], shapes[0][2], shapes[3][2]]

        dispatches = [
            Dispatch((write,), (1, 5, 3), sizes),
            Dispatch((write,), (2, 5, 4), sizes),
            Dispatch(attend, (0, 3, 4, 5, *([6] if sinks is not None else []), -1), sizes),
        ]
        operands = [q, k, v, k_cache, v_cache, position, *([] if sinks is None else [sinks])]
        out = relax.TensorType([batch, new, heads, width], "float32")
        return self._call(importer, attend[0].name, dispatches, operands, out)

    def _masked_attention(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, mask, scale = importer.retrieve_args(node)[:5]  # what comes after is refused by why_unsupported
        batch, heads, length, width = q.ty.shape
        kernels = attention.masked_attention(int(heads), int(k.ty.shape[1]), int(width), float(scale))
        dispatch = Dispatch(kernels, (0, 1, 2, 3, -1), lambda shapes: [shapes[0][0], shapes[0][2]])
        out = relax.TensorType([batch, length, heads, width], "float32")
        return self._call(importer, kernels[0].name, [dispatch], [q, k, v, mask], out)

    def _embedding(self, node: fx.Node, importer: Any) -> Any:
        table, ids = importer.retrieve_args(node)[:2]
        rows, width = (int(n) for n in table.ty.shape)
        storage = _storage(table)
        kernel = embedding.embedding(rows, width, storage)
        dispatch = Dispatch((kernel,), (0, 1, -1), lambda shapes: [_product(shapes[1])])
        out = relax.TensorType([*ids.ty.shape, width], "float32")
        return self._call(importer, kernel.name, [dispatch], [table, ids], out)

    def _packed_embedding(self, node: fx.Node, importer: Any) -> Any:
        ids, parts, format_name, rows, width = importer.retrieve_args(node)
        self.smallest_packed = min(rows * width, self.smallest_packed or rows * width)
        fmt = Format.parse(format_name)
        stored = dict(zip(fmt.parts(rows, width), parts, strict=True))
        kernel = embedding.packed_embedding(rows, width, fmt)
        operands = [ids, *(stored[name] for name in packed_linear.stored_parts(fmt))]
        dispatch = Dispatch((kernel,), (*range(len(operands)), -1), lambda shapes: [_product(shapes[0])])
        return self._call(
            importer, kernel.name, [dispatch], operands, relax.TensorType([*ids.ty.shape, width], "float32")
        )


def _of_rows(kernels: tuple[Kernel, ...], operands: int, outputs: int) -> Dispatch:
    """Make the dispatch of kernels over the last dimension of their first operand, whose only size is the number of
    rows.
    """
    buffers = (*range(operands), *range(-outputs, 0))
    return Dispatch(kernels, buffers, lambda shapes: [_product(shapes[0][:-1])])


def _split(node: fx.Node, importer: Any) -> Any:
    """Convert a split to slices, which fuse into the kernels that read them, instead of one kernel with several
    outputs.
    """
    x, size, axis = (*importer.retrieve_args(node), 0)[:3]
    total = int(x.ty.shape[axis])
    parts = [relax.op.strided_slice(x, [axis], [i], [min(i + size, total)]) for i in range(0, total, size)]
    return relax.Tuple([importer.block_builder.emit(part) for part in parts])


def _storage(parameter: Any) -> str:
    """Return the stored type of a matrix of floats; the importer represents bfloat16 as uint16."""
    return {"uint16": "bfloat16"}.get(str(parameter.ty.dtype), str(parameter.ty.dtype))


def _product(sizes: Sequence[Any]) -> Any:
    return prod(sizes, start=tvm.tirx.IntImm("int64", 1))


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
    for node in graph.graph.nodes:
        operator = _operator(node)
        if operator in _ABSENT:
            return _refusal(node)
        for place, what in _ABSENT_ARGUMENTS.get(operator, {}).items():
            if len(node.args) > place and node.args[place]:
                return f"node {node.name}: the target webgpu has no kernels for {what}; take the target x86 for them"
        if operator == "packed_linear.default":
            reason = packed_linear.supports(Format.parse(cast(str, node.args[3])))
            if reason:
                return reason
    return ""
