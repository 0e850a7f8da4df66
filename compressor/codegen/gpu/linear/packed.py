"""The packed linear on a GPU: dequantisation and matrix product in one kernel that reads the stored codes."""

from __future__ import annotations

from collections.abc import Sequence

import tvm

from compressor.codegen.gpu.linear import products
from compressor.codegen.gpu.linear.fragments import Fragments
from compressor.codegen.gpu.linear.kernel import Schedule, linear_kernel
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.products import Products
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.format import Format


def supports(fmt: Format) -> str:
    """Say what these kernels cannot read of a format; an empty text if they read all."""
    if wrong := products.supports(fmt):
        return wrong
    found = Fragments.of(fmt, 1 << 20)
    return found if isinstance(found, str) else ""


def fused_linear(
    rows: Sequence[int],
    columns: int,
    fmt: Format,
    has_bias: bool,
    schedule: Schedule,
    *,
    prologue: Prologue | None = None,
    has_residual: bool = False,
) -> tvm.tirx.PrimFunc:
    """Write TIR for packed linears of the same activations.

    Parameters of the result: as those of :func:`compressor.codegen.kernels.linear.packed.fused_linear`.
    """
    assert not supports(fmt)
    return linear_kernel(*packed_parts(rows, columns, fmt, has_bias, has_residual), schedule, prologue)


def packed_parts(
    rows: Sequence[int], columns: int, fmt: Format, has_bias: bool, has_residual: bool
) -> tuple[Products, Operands]:
    """Return what the kernel for weights [rows, columns] is made of."""
    fragments = Fragments.of(fmt, columns)
    assert isinstance(fragments, Fragments)
    operands = Operands(rows, [fmt.parts(n, columns) for n in rows], has_bias, has_residual)
    return Products(fragments, fmt), operands
