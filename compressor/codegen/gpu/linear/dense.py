"""The dense linear on a GPU: float weights in their storage type, row-major, as a tied embedding reads them.

Products are of the weight's own type, and activations come in two halves of it.  Float32 is two numbers of the 19 bits
that tensor cores read: both of the weight by both of the activation.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.halves import first_bits
from compressor.codegen.gpu.linear.fragments import LANES, Fragments, Kind
from compressor.codegen.gpu.linear.kernel import Schedule, linear_kernel
from compressor.codegen.gpu.linear.operands import Loads, Operands
from compressor.codegen.gpu.linear.products import Statements
from compressor.codegen.gpu.linear.tensor_cores import product_bfloats, product_floats, product_halves
from compressor.codegen.gpu.memory import stream_four
from compressor.codegen.kernels.linear.weights import Weight
from compressor.formats.parts import TILE_ROWS

_KINDS: dict[str, Kind] = {"float16": "float16", "uint16": "bfloat16", "float32": "float32"}
_BYTES = 16  # that a lane loads of a row at once


class DenseLoads(Loads):
    """Loads of a lane: 16 bytes of each of its rows, for each of its chunks."""

    def __init__(self, fragments: Fragments, rows: int) -> None:
        self.fragments, self.rows = fragments, rows
        self.words = 2 * fragments.lane_chunks * _BYTES // 4
        self.is_aligned = fragments.columns % fragments.chunk_columns == 0

    def codes(self, to: Any, slot: int, weight: Weight, tile: Any, step: Any, lane: Any) -> None:
        """Load a step's weights: chunks, rows, words."""
        f, part = self.fragments, weight.parts["weight"]
        for i in range(f.lane_chunks):
            column = (step * f.step_chunks + LANES * i + lane % LANES) * f.chunk_columns
            for r in range(2):
                at = slot + (2 * i + r) * (_BYTES // 4)
                row = tile * TILE_ROWS + lane // LANES * 2 + r
                row = T.min(row, self.rows - 1) if self.rows % TILE_ROWS else row
                if self.is_aligned:  # columns that fill up are multiplied by zeros
                    first = T.min(column, f.columns - f.chunk_columns)
                    stream_four(T.address_of(to[at]), T.address_of(part[row, first]))
                    continue
                for j in range(_BYTES // 4):
                    self._word(to, at + j, part, row, column + j * (f.chunk_columns * 4 // _BYTES))

    def _word(self, to: Any, at: int, part: Any, row: Any, column: Any) -> None:
        """Load a word of a row that does not begin at a multiple of 16 bytes."""
        last = self.fragments.columns - 1
        if part.dtype == "float32":
            T.buffer_store(to, T.reinterpret(part[row, T.min(column, last)], dtype="int32"), [at])
            return
        low, high = (
            T.Cast("int32", T.reinterpret(part[row, T.min(column + j, last)], dtype="uint16")) for j in range(2)
        )
        T.buffer_store(to, T.bitwise_or(low, T.shift_left(high, T.int32(16))), [at])

    def scales(self, to: Any, slot: int, weight: Weight, tile: Any, group: Any, lane: Any) -> None:
        """Load nothing: weights are as they are."""

    def zeros(self, to: Any, slot: int, weight: Weight, tile: Any, group: Any, lane: Any) -> None:
        """Load nothing: weights are as they are."""


class DenseProducts(Statements):
    """The statements for one storage type."""

    def __init__(self, fragments: Fragments, rows: int) -> None:
        self.fragments, self.loads = fragments, DenseLoads(fragments, rows)
        self.is_float32 = fragments.kind == "float32"
        self.operand = 8 if self.is_float32 else 4
        self.per_step = fragments.lane_chunks * (_BYTES // 4) // 2

    def store_constants(self, constants: Any, at: int, raw: Any) -> None:
        """Store nothing: float weights have no zero points."""

    def expand(self, to: Any, at: int, words: Any, slot: int, product: int, constants: Any, first: int) -> None:
        """Store operand A of one product of a step; of float32, a second one of what the first leaves."""
        chunk, inner = divmod(product, _BYTES // 8)
        for row in range(2):
            for part in range(2):
                word = words[slot + (2 * chunk + row) * (_BYTES // 4) + 2 * inner + part]
                bits, place = T.reinterpret(word, dtype="uint32"), at + 2 * part + row
                if not self.is_float32:
                    T.buffer_store(to, bits, [place])
                    continue
                value = T.reinterpret(word, dtype="float32")
                T.buffer_store(to, first_bits(value), [place])
                T.buffer_store(to, first_bits(value - T.reinterpret(to[place], dtype="float32")), [place + 4])

    def multiply(self, sums: Any, at: int, a: Any, first: int, b: Any, operand: int, constants: Any, row: int) -> None:
        """Add one product to four sums from ``sums[at]`` on."""
        kinds = {"float16": product_halves, "bfloat16": product_bfloats, "float32": product_floats}
        for half in range(self.operand // 4):
            left = [a[first + 4 * half + i] for i in range(4)]
            kinds[self.fragments.kind](T.address_of(sums[at]), left, [b[operand], b[operand + 1]])


def dense_linear(
    out_features: int, in_features: int, storage: str, has_bias: bool, schedule: Schedule
) -> tvm.tirx.PrimFunc:
    """Write TIR for ``y = x @ weight.T + bias``.

    Parameters of the result: as those of :func:`compressor.codegen.kernels.dense.dense_linear`.
    """
    return linear_kernel(*dense_parts(out_features, in_features, storage, has_bias), schedule, None)


def dense_parts(rows: int, columns: int, storage: str, has_bias: bool) -> tuple[DenseProducts, Operands]:
    """Return what the kernel for a weight [rows, columns] is made of."""
    chunk = _BYTES // (4 if storage == "float32" else 2)
    fragments = Fragments(
        columns=columns, kind=_KINDS[storage], order=(0, 1, 2, 3), chunk_columns=chunk, lane_chunks=1,
        group_columns=columns, scale_columns=columns, act=None,
    )  # fmt: skip
    operands = Operands([rows], [{"weight": (storage, (rows, columns))}], has_bias, False)
    return DenseProducts(fragments, rows), operands
