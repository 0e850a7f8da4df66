"""The weights of a linear's kernel on a GPU, and the loads of a lane: codes, scales and zero points of its two rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.linear.fragments import LANES, Fragments
from compressor.codegen.gpu.memory import choose, stream, stream_pair, stream_word
from compressor.codegen.kernels.linear.weights import Weight, by_token, parameter
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS, Stored


class Operands:
    """All weights of a kernel, [rows, columns] each, stored alike; blocks of threads share out their tiles."""

    def __init__(
        self, rows: Sequence[int], stored: Sequence[Mapping[str, Stored]], has_bias: bool, has_residual: bool
    ) -> None:
        assert len(rows) == 1 or not has_residual
        self.rows, self.stored, self.has_bias, self.has_residual = tuple(rows), stored, has_bias, has_residual
        self.tiles = [-(-n // TILE_ROWS) for n in rows]
        self._all: list[Weight] = []

    def declare(self, d0: Any, d1: Any) -> None:
        """Declare the kernel's parameters: each weight's parts and bias, the residual, each weight's outputs."""
        found = []
        for n, stored in zip(self.rows, self.stored, strict=True):
            parts = {name: parameter(shape, kind) for name, (kind, shape) in stored.items()}
            found.append((n, parts, parameter((n,), "float32") if self.has_bias else None))
        added = parameter((d0, d1, self.rows[0]), "float32") if self.has_residual else None
        outputs = [parameter((d0, d1, n), "float32") for n in self.rows]
        residual = None if added is None else by_token(added)
        self._all += [
            Weight(n, parts, bias, residual, by_token(y)) for (n, parts, bias), y in zip(found, outputs, strict=True)
        ]

    @property
    def shared(self) -> Any:
        """Parts that activations are prepared with: the first weight's, which is alone where there are any."""
        return self._all[0].parts

    def tasks(self, n_tiles: int) -> int:
        """Count the tasks of ``n_tiles`` tiles each, of all weights; a weight's last may have fewer."""
        return sum(-(-tiles // n_tiles) for tiles in self.tiles)

    def select(self, task: Any, n_tiles: int) -> tuple[Weight, Any, Any]:
        """Return the weight of a task, the first of the task's tiles in it, and the weight's number of tiles."""
        first = self._all[0]
        if len(self._all) == 1:
            return first, task * n_tiles, self.tiles[0]
        ends = list(accumulate(-(-tiles // n_tiles) for tiles in self.tiles))

        def each(values: Sequence[Any], either: Callable[[Any, Any, Any], Any]) -> Any:
            chosen = values[-1]
            for end, value in zip(ends[-2::-1], values[-2::-1], strict=True):
                chosen = either(task < end, value, chosen)
            return T.bind(chosen)

        def number(values: Sequence[int]) -> Any:
            return each([T.int32(value) for value in values], T.if_then_else)

        def pick(buffers: Sequence[Any], shape: Any) -> Any:
            return T.decl_buffer(shape, buffers[0].dtype, data=each([b.data for b in buffers], choose))

        rows = number(self.rows)
        parts = {name: pick([w.parts[name] for w in self._all], b.shape) for name, b in first.parts.items()}
        bias = pick([w.bias for w in self._all], first.bias.shape) if self.has_bias else None
        y = pick([w.y for w in self._all], (first.y.shape[0], rows))
        return Weight(rows, parts, bias, None, y), (task - number([0, *ends[:-1]])) * n_tiles, number(self.tiles)


class Loads(ABC):
    """What a lane loads of its two rows of a tile: ``2 * g`` and ``2 * g + 1``.

    Attributes:
        words: of a lane, in a step.
    """

    words: int

    @abstractmethod
    def codes(self, to: Any, slot: int, weight: Weight, tile: Any, step: Any, lane: Any) -> None:
        """Load a step's weights to ``to[slot]`` and on."""

    @abstractmethod
    def scales(self, to: Any, slot: int, weight: Weight, tile: Any, group: Any, lane: Any) -> None:
        """Load the two rows' scales to ``to[slot]``, if there are any."""

    @abstractmethod
    def zeros(self, to: Any, slot: int, weight: Weight, tile: Any, group: Any, lane: Any) -> None:
        """Load the two rows' zero points to ``to[slot]``, if there are any, one a byte."""


class PackedLoads(Loads):
    """Those of codes, in the words of tiles."""

    def __init__(self, fragments: Fragments, fmt: Format) -> None:
        self.fragments, self.fmt = fragments, fmt
        self.words = 2 * fragments.lane_chunks * fmt.chunk_words  # of codes, in a step
        self.is_block = fmt.block_tiles > 0
        self.has_zeros = not fmt.symmetric
        self.chunks = fmt.chunks(fragments.columns)

    def codes(self, to: Any, slot: int, weight: Weight, tile: Any, step: Any, lane: Any) -> None:
        """Load a step's codes: chunks, words of a chunk, rows."""
        fragments, words = self.fragments, self.fmt.chunk_words
        for i in range(fragments.lane_chunks):
            chunk = step * fragments.step_chunks + LANES * i + lane % LANES
            chunk = T.min(chunk, self.chunks - 1)  # those that fill up are multiplied by zeros
            for word in range(words):
                at = T.address_of(weight.parts["codes"][tile, chunk, word, lane // LANES * 2])
                stream(T.address_of(to[slot + 2 * (i * words + word)]), at)

    def scales(self, to: Any, slot: int, weight: Weight, tile: Any, group: Any, lane: Any) -> None:
        """Load the two rows' scales as they are stored."""
        self._pair(to, slot, weight.parts["scales"], tile, group, lane)

    def zeros(self, to: Any, slot: int, weight: Weight, tile: Any, group: Any, lane: Any) -> None:
        """Load the two rows' zero points."""
        if self.has_zeros:
            self._pair(to, slot, weight.parts["zeros"], tile, group, lane)

    def _pair(self, to: Any, slot: int, part: Any, tile: Any, group: Any, lane: Any) -> None:
        fmt = self.fmt
        group = T.min(group, self.fragments.groups - 1) // self.fragments.scale_groups
        if self.is_block:
            at = part[tile // fmt.block_tiles, group]
            if part.dtype == "uint8":
                value = T.Cast("int32", at) * T.int32(0x101)
            else:
                value = T.Cast("int32", T.reinterpret(at, dtype="uint16")) * T.int32(0x10001)
        else:
            address = T.address_of(part[tile, group, lane // LANES * 2])
            value = stream_pair(address) if part.dtype == "uint8" else stream_word(address)
        T.buffer_store(to, value, [slot])
