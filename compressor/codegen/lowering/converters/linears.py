"""Convert linears and convolutions to calls of our kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import numpy as np
import tvm
from torch import fx
from tvm import relax

from compressor.codegen.kernels.convolution import depthwise, patches
from compressor.codegen.kernels.convolution import kernel as convolution
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.lowering.convolutions import geometry_of
from compressor.codegen.lowering.kernel_set import Choice, KernelSet
from compressor.codegen.tuning import Tuner
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.parts import TIMING_FILL
from compressor.ops.patches import outputs

_OPAQUE = 8  # of TVM's kinds of functions: it is not fused with others, whatever TVM takes it for


def dense_linear_name(rows: int, columns: int, storage: str, has_bias: bool) -> str:
    """Return the kernel's name; with ``:1`` and so on for the tokens, its name in the database of schedules."""
    return f"dense_linear_{rows}x{columns}_{storage}{'_bias' if has_bias else ''}"


def packed_linear_name(shape: str, fmt: Format, has_bias: bool) -> str:
    """Return a packed linear's name, as :func:`dense_linear_name`; ``shape`` is rows (of each weight) x columns."""
    # Linkers take what follows an @ for a version, and a function of CUDA has a name of C.
    name = fmt.name.replace(".", "p").replace("@", "_zero").replace(":", "of")
    return f"packed_linear_{shape}_{name}{'_bias' if has_bias else ''}"


class LinearConverter:
    """Calls of kernels for linears and convolutions; equal kernels are generated once.

    Attributes:
        records: one entry a kernel, in order of first use.
        smallest_packed: elements of the smallest packed weight, None before the first.
    """

    def __init__(self, kernels: KernelSet, tuner: Tuner) -> None:
        self.kernels, self.isa, self.tuner = kernels, kernels.isa, tuner
        self.records: list[dict[str, Any]] = []
        self.smallest_packed: int | None = None
        self._made: dict[str, Any] = {}

    def kernel(self, importer: Any, name: str, make: Callable[[], tuple[tvm.tirx.PrimFunc, dict[str, Any]]]) -> Any:
        """Return the kernel of that name, made if there is none; ``make`` also returns the fields of its record."""
        if name not in self._made:
            func, details = make()
            self._made[name] = importer.block_builder.add_func(func.with_attr("op_pattern", _OPAQUE), name)
            self.records.append({"name": name, "isa": self.isa.name, **details})
        return self._made[name]

    def dense_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a linear of stored floats."""
        x, weight, bias = importer.retrieve_args(node)
        rows, columns = (int(n) for n in weight.ty.shape)
        storage = str(weight.ty.dtype)
        has_bias = bias is not None
        name = dense_linear_name(rows, columns, storage, has_bias)

        def build(_tokens: int, schedule: Any) -> tvm.tirx.PrimFunc:
            return self.kernels.dense.make(rows, columns, storage, has_bias, schedule)

        def operands(tokens: int) -> list[Any]:
            arrays = [np.zeros((1, tokens, columns), "float32"), np.zeros((rows, columns), storage)]
            return [*arrays, *_zeros(has_bias, rows), np.zeros((1, tokens, rows), "float32")]

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            choices = self.kernels.dense.choices(rows, columns, storage)
            schedule, details = self._choose(name, choices, build, operands)
            return build(1, schedule), {"family": "dense_linear", "schedule": dataclasses.asdict(schedule), **details}

        return self.rowwise(importer, name, make, x, [weight, *([bias] if has_bias else [])], rows)

    def packed_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a linear of stored codes."""
        x, parts, bias, format_name, columns, rows = importer.retrieve_args(node)
        return self._linears(importer, [x], [], [(parts, bias, rows)], None, None, format_name, columns)

    def fused_linear(self, node: fx.Node, importer: Any) -> Any:
        """Emit a :func:`compressor.codegen.lowering.fused_linear.fused_linear`."""
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
        """Emit one call of a kernel (:func:`compressor.codegen.lowering.fused_linear.fused_linear`).

        Returns a tuple where there are several weights.
        """
        fmt, rows = Format.parse(format_name), [n for _, _, n in weights]
        has_bias = weights[0][1] is not None
        self._count_packed(min(rows) * columns)
        shape = f"{'_'.join(map(str, rows))}x{columns}"
        name = packed_linear_name(shape, fmt, has_bias)
        name += "" if prologue is None else f"_of_{prologue.name}"
        name += "" if residual is None else "_plus"

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            given = (rows, columns, fmt, has_bias)
            details: dict[str, Any] = {"family": "packed_linear", "format": fmt.name}
            ends: dict[str, Any] = {"prologue": prologue, "has_residual": residual is not None}
            others = self.kernels.others.items()
            own = next((kernel for extra, kernel in others if fmt.extra(extra) is not None), None)
            if own is not None:
                return own(*given, **ends), details
            chosen, reasons = self._schedule(rows[0], columns, fmt, has_bias)
            schedule = self.kernels.packed.common(chosen, rows, fmt)
            details |= {"schedule": dataclasses.asdict(schedule), **reasons}
            return self.kernels.packed.make(*given, schedule, **ends), details

        stored = [part for parts, bias, _ in weights for part in (*parts, *([bias] if has_bias else []))]
        added = [] if residual is None else [_folded(importer, residual)]
        operands = [*(_folded(importer, x) for x in inputs), *vectors, *stored, *added]
        return _call_by_row(importer, self.kernel(importer, name, make), operands, list(inputs[0].ty.shape)[:-1], rows)

    def _schedule(self, rows: int, columns: int, fmt: Format, has_bias: bool) -> tuple[Any, dict[str, Any]]:
        """Let the tuner choose a schedule for a weight alone; return it, and fields of the kernel's record."""
        name = packed_linear_name(f"{rows}x{columns}", fmt, has_bias)

        def build(tokens: int, schedule: Any) -> tvm.tirx.PrimFunc:
            part = {"only": tokens} if self.kernels.packed.writes_part else {}
            return self.kernels.packed.make([rows], columns, fmt, has_bias, schedule, **part)

        def operands(tokens: int) -> list[Any]:
            arrays = [np.ones((1, tokens, columns), "float32")]
            for part, (kind, shape) in fmt.parts(rows, columns).items():
                fill = TIMING_FILL[part]
                if fill == "even":
                    arrays.append(np.linspace(0, fmt.outliers(rows, columns), shape[0]).astype(kind))
                else:
                    arrays.append(np.full(shape, fill, kind))
            return [*arrays, *_zeros(has_bias, rows), np.zeros((1, tokens, rows), "float32")]

        return self._choose(name, self.kernels.packed.choices(rows, columns, fmt), build, operands)

    def _count_packed(self, elements: int) -> None:
        self.smallest_packed = min(elements, self.smallest_packed or elements)

    def patches(self, node: fx.Node, importer: Any) -> Any:
        """Emit the inputs of each output of a convolution, as rows."""
        x, *geometry = importer.retrieve_args(node)
        batch, *size, channels = x.ty.shape
        kernel, channels = geometry[0], int(channels)
        name = "_".join(["patches", str(channels), *("x".join(map(str, pair)) for pair in geometry)])
        make = lambda: (patches.patches(channels, *geometry), {"family": "patches"})  # noqa: E731
        counts = [outputs(n, *each) for n, *each in zip(size, *geometry, strict=True)]
        out = relax.TensorType([batch, *counts, kernel[0] * kernel[1] * channels], "float32")
        return importer.block_builder.emit(relax.call_tir(self.kernel(importer, name, make), [x], out_ty=out))

    def convolution(self, node: fx.Node, importer: Any) -> Any:
        """Emit a :func:`compressor.codegen.lowering.convolutions.fused_convolution`."""
        x, parts, bias, residual, next_scale, name, rows, pairs, is_relu, following, *others = importer.retrieve_args(
            node
        )
        ceiling, by_channel, is_planar = others
        fmt, geometry = Format.parse(name) if name else None, geometry_of(cast(fx.Node, node.args[0]), pairs, is_planar)
        assert geometry is not None
        if fmt is not None:
            self._count_packed(rows * (prod(geometry.kernel) if by_channel else geometry.columns))
        next_act = Format.parse(following).activations if following else None
        epilogue = convolution.Epilogue(residual is not None, is_relu, next_act, ceiling)
        more = (bias is not None, str(x.ty.dtype) == "int8", epilogue)
        out = relax.TensorType([x.ty.shape[0], *geometry.outputs, rows], "int8" if following else "float32")

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            if by_channel:
                stored = {"format": fmt.name} if fmt is not None else {}
                return depthwise.depthwise(geometry, fmt, *more, self.isa), {"family": "depthwise", **stored}
            assert fmt is not None
            details = {"family": "convolution", "format": fmt.name}
            return convolution.convolution(rows, geometry, fmt, *more, self.isa, is_planar), details

        if by_channel:
            kernel_name = depthwise.depthwise_name(geometry, fmt, *more)
        else:
            assert fmt is not None
            kernel_name = convolution.convolution_name(rows, geometry, fmt, *more) + ("_planes" if is_planar else "")
        args = [x, *parts, *(part for part in (bias, residual, next_scale) if part is not None)]
        kernel = self.kernel(importer, kernel_name, make)
        return importer.block_builder.emit(relax.call_tir(kernel, args, out_ty=out))

    def depthwise(self, node: fx.Node, importer: Any) -> Any:
        """Refuse a depthwise convolution that no rule has fused with the patches in front of it."""
        given: Any = node.args
        fmt = Format.parse(given[3]) if len(given) > 3 else None
        channels, columns = (given[0].meta["val"].shape[-1], node.meta["val"].shape[-1])
        reason = depthwise.supports(fmt, channels // columns) or "it reads other rows than patches of images"
        raise UsageError(f"{node.name}: a depthwise convolution without a kernel: {reason}")

    def _choose(
        self,
        name: str,
        choices: Sequence[Choice],
        build: Callable[[int, Any], tvm.tirx.PrimFunc],
        operands: Callable[[int], list[Any]],
    ) -> tuple[Any, dict[str, Any]]:
        """Let the tuner make a kernel's choices; return the schedule, and fields of the kernel's record.

        Args:
            build: (tokens, schedule) -> the kernel, as it is timed with so many tokens.
            operands: tokens -> what it is timed with.
        """
        schedule: Any = None
        kernels = [f"{name}:{choice.tokens}" for choice in choices]
        for kernel, choice in zip(kernels, choices, strict=True):
            given = partial(operands, choice.tokens)
            written = partial(build, choice.tokens)
            schedule = self.tuner.choose(kernel, choice.space(schedule), written, given, choice.estimate)
        reasons = {kernel.rpartition(":")[2]: reason for kernel, reason in self.tuner.reasons(kernels).items()}
        return schedule, {"schedule_chosen": reasons} if reasons else {}

    def rowwise(self, importer: Any, name: str, make: Any, x: Any, weights: list[Any], width: int) -> Any:
        """Call a kernel over the last dimension."""
        kernel, leading = self.kernel(importer, name, make), list(x.ty.shape)[:-1]
        return _call_by_row(importer, kernel, [_folded(importer, x), *weights], leading, [width])


def _folded(importer: Any, x: Any) -> Any:
    """Fold all dimensions of ``x`` but the last into two."""
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


def _zeros(wanted: bool, size: int) -> list[Any]:
    return [np.zeros((size,), "float32")] if wanted else []
