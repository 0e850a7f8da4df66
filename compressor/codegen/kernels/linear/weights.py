"""The weights of a packed linear's kernel: their stored parts and where their outputs go.

Several weights that read the same activations share one kernel.  Each keeps its own tensors; a task of the parallel
loop belongs to one of them and finds its addresses in a table, so that there is one copy of the products' code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

_DATA = 1  # the field of a DLTensor that holds its address


@dataclass(frozen=True)
class Weight:
    """One weight's buffers; None where there is no such part."""

    rows: Any
    parts: Mapping[str, Any]
    bias: Any  # float32 [rows]
    residual: Any  # float32 [tokens, rows], added to the outputs
    y: Any  # float32 [tokens, rows]

    @property
    def codes(self) -> Any:
        """Words of codes [tiles, chunks, words, 16]; those of two planes as if they lay together."""
        codes, lower = self.parts["codes"], self.parts.get("lower")
        return codes if lower is None else _Planes((lower, codes))

    def finish(self, value: Any, token: Any, at: Any, factor: Any = None, floats: Any = None) -> Any:
        """Multiply the outputs of rows ``at`` by a factor, and add what the weight's floats give, bias and residual.

        It is one expression, so that a factor and what is added first are one instruction for any number of tokens
        (:mod:`compressor.codegen.kernels.vector`).
        """
        if factor is not None:
            value = value * factor
        if floats is not None:
            value = value + floats
        if self.bias is not None:
            value = value + self.bias[at]
        return value if self.residual is None else value + self.residual[token, at]


@dataclass(frozen=True)
class _Planes:
    """Planes of one word a chunk, lowest bits first."""

    each: Sequence[Any]

    def __getitem__(self, place: tuple[Any, ...]) -> Any:
        tile, chunk, word, row = place
        return self.each[word][tile, chunk, 0, row]


@dataclass(frozen=True)
class Apart:
    """Tiles of a task that do not lie side by side: tile ``n`` is written ``first + n``, as of those that do."""

    first: Any
    stride: Any

    def __add__(self, n: Any) -> Any:
        """Return the number of tile ``n``."""
        return self.first + n * self.stride

    def behind(self, n: Any) -> Apart:
        """Return the tiles from ``n`` on."""
        return Apart(self + n, self.stride)


class Weights:
    """All weights of a kernel: [rows, columns] each, of one format."""

    def __init__(self, rows: Sequence[int], columns: int, fmt: Format, has_bias: bool, has_residual: bool) -> None:
        assert len(rows) == 1 or not has_residual
        self.rows, self.has_bias, self.has_residual = tuple(rows), has_bias, has_residual
        self.columns, self.fmt = columns, fmt
        self.stored = [fmt.parts(n, columns) for n in rows]
        self.tiles = [-(-n // TILE_ROWS) for n in rows]
        self.is_ragged = any(n % TILE_ROWS for n in rows)
        self.has_outliers = "outlier_starts" in self.stored[0]
        self._all: list[Weight] = []
        self._table: Any = None

    def declare(self, d0: Any, d1: Any) -> None:
        """Declare the kernel's parameters: each weight's parts and bias, the residual, each weight's outputs."""

        found = []
        for n, stored in zip(self.rows, self.stored, strict=True):
            parts = {name: parameter(shape, kind) for name, (kind, shape) in stored.items()}
            found.append((n, parts, parameter((n,), "float32") if self.has_bias else None))
        added = parameter((d0, d1, self.rows[0]), "float32") if self.has_residual else None
        outputs = [parameter((d0, d1, n), "float32") for n in self.rows]  # parameters come before other statements
        residual = None if added is None else by_token(added)
        for (n, parts, bias), y in zip(found, outputs, strict=True):
            self._all.append(Weight(n, parts, bias, residual, by_token(y)))
        if len(self._all) > 1:
            rows = [self._buffers(weight) for weight in self._all]
            self._table = T.bind(T.tvm_stack_alloca("array", len(rows) * len(rows[0])))
            for place, buffer in enumerate(buffer for row in rows for buffer in row):
                T.evaluate(T.tvm_struct_set(self._table, place, _DATA, buffer.data))

    @property
    def shared(self) -> Mapping[str, Any]:
        """Parts that activations are prepared with: the first weight's, which is alone where there are any."""
        return self._all[0].parts

    @staticmethod
    def _buffers(weight: Weight) -> list[Any]:
        return [*weight.parts.values(), *([] if weight.bias is None else [weight.bias]), weight.y]

    def steps(self, n_tiles: int) -> int:
        """Tasks of ``n_tiles`` tiles each, of all weights."""
        return sum(self.tiles) // n_tiles

    def of_task(self, i: Any, n_tiles: int) -> tuple[Weight, Any]:
        """Return the weight that task ``i`` belongs to, and the first of the task's tiles in it."""
        weight, number = self._numbered(i, n_tiles)
        return weight, number * n_tiles

    def apart(self, i: Any, n_tiles: int) -> tuple[Weight, Apart]:
        """Return as :meth:`of_task`, for few tokens: the tiles of a task lie a part of the weight apart.

        Each task goes on in memory where the one before it stopped, in every part: what the processor fetches ahead is
        of use, and tasks of adjacent tiles would jump.
        """
        weight, number = self._numbered(i, n_tiles)
        return weight, Apart(number, self.of_each(i, n_tiles, [tiles // n_tiles for tiles in self.tiles]))

    def _numbered(self, i: Any, n_tiles: int) -> tuple[Weight, Any]:
        """Return the weight that task ``i`` belongs to, and the task's number among this weight's."""
        first = self._all[0]
        if len(self._all) == 1:
            return first, i
        ends = self._ends(n_tiles)
        which = T.bind(sum((T.Cast("int32", i >= end) for end in ends[:-1]), T.int32(0)))
        place = iter(range(len(self._buffers(first))))

        def pick(buffer: Any, shape: Any) -> Any:
            at = which * len(self._buffers(first)) + next(place)
            data = T.bind(tvm.tirx.op.tvm_struct_get(self._table, at, _DATA, buffer.data.ty))
            return T.decl_buffer(shape, buffer.dtype, data=data)

        rows = self.of_each(i, n_tiles, self.rows)
        parts = {name: pick(buffer, buffer.shape) for name, buffer in first.parts.items()}
        bias = pick(first.bias, first.bias.shape) if self.has_bias else None
        y = pick(first.y, (first.y.shape[0], rows))
        return Weight(rows, parts, bias, None, y), i - self.of_each(i, n_tiles, [0, *ends[:-1]])

    def _ends(self, n_tiles: int) -> list[int]:
        """Return the task behind the last one of each weight."""
        return [end // n_tiles for end in accumulate(self.tiles)]

    def of_each(self, i: Any, n_tiles: int, values: Sequence[int]) -> Any:
        """Return the value of the weight that task ``i`` belongs to, of one for each."""
        if len(set(values)) == 1:
            return T.int64(values[0])
        chosen = T.int64(values[-1])
        for end, value in zip(self._ends(n_tiles)[-2::-1], values[-2::-1], strict=True):
            chosen = T.if_then_else(i < end, T.int64(value), chosen)
        # Memory, where a variable would do: TVM writes an integer's expression into every index that it is part of and
        # simplifies them all, which takes longer than all else.
        held = T.alloc_buffer((1,), "int64")
        T.buffer_store(held, chosen, [0])
        return T.bind(held[0])


def parameter(shape: Sequence[Any], dtype: str) -> Any:
    """One more parameter of the kernel that is being built."""
    return T.match_buffer(T.arg("tensor", T.handle()), shape, dtype)


def by_token(buffer: Any) -> Any:
    """View a buffer [d0, d1, n] as [d0 * d1, n]."""
    d0, d1, n = buffer.shape
    return T.decl_buffer((d0 * d1, n), buffer.dtype, data=buffer.data)


def added_floats(fmt: Format, has_outliers: bool) -> Any:
    """Make a macro that sums up the products of a token and a tile that no codes stand for."""
    every = T.ramp(0, 1, TILE_ROWS)

    @T.inline
    def add_floats(at, weight, floats, tile, token):
        floats[every] = T.broadcast(T.float32(0), TILE_ROWS)
        if fmt.outlier_features > 0:
            for k in range(fmt.outlier_features):
                single = T.meta_var(T.broadcast(at.inputs[0][token, weight.parts["float_columns"][k]], TILE_ROWS))
                value = T.meta_var(T.Cast("float32x16", weight.parts["float_values"][tile, k, every]))
                floats[every] = floats[every] + value * single
        if has_outliers:
            starts = T.meta_var(weight.parts["outlier_starts"])
            for r in range(TILE_ROWS):
                begin = T.meta_var(starts[tile * TILE_ROWS + r])
                for k in range(starts[tile * TILE_ROWS + r + 1] - begin):
                    column = T.meta_var(T.Cast("int32", weight.parts["outlier_columns"][begin + k]))
                    value = T.meta_var(T.Cast("float32", weight.parts["outlier_values"][begin + k]))
                    floats[r] = floats[r] + value * at.inputs[0][token, column]

    return add_floats
