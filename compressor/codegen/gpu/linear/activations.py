"""Prepare a token's activations for tensor cores, by one block of threads.

The input, or what the prologue makes of it, is rounded to codes or to floats on a grid as on x86, and stored in the
order of :mod:`compressor.codegen.gpu.linear.fragments`.  Floats are stored in two halves; two float16 after a power of
two has brought the token's largest to 2 ** 14: what is below 2 ** -24 then is lost, 2 ** -38 of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.halves import bfloat2, first_bits, half2, low_bfloat, low_half
from compressor.codegen.gpu.intrinsics import WARP, lane_max, lane_sum, warp_max, warp_sum
from compressor.codegen.gpu.linear.fragments import Fragments
from compressor.codegen.gpu.memory import held, shared
from compressor.codegen.kernels.activations import inverse_scale, on_grid, span_scale
from compressor.codegen.kernels.linear.prologue import ACTIVATIONS, Prologue
from compressor.codegen.kernels.vector import finite_size, is_nan, size_bits

_LARGEST = 14  # the exponent of a token's largest activation as float16


@dataclass(frozen=True)
class Prepared:
    """Hold the buffers that preparing tokens reads and writes.

    Attributes:
        inputs: float32 [tokens, columns] each.
        vectors: float32 [columns], of a norm.
        parts: of the weight: ``tensor_scale`` and ``input_scale`` are read.
        words: the activations, uint32, at the index that ``index`` returns.
        factor: float32 [tokens, groups of activations]: what sums are multiplied by.
        index: (token, half, step, vector, lane of a row, word) -> place in ``words``.
    """

    inputs: Sequence[Any]
    vectors: Sequence[Any]
    parts: Mapping[str, Any]
    words: Any
    factor: Any
    index: Callable[[Any, int, Any, Any, Any, Any], Any]


class Preparation:
    """The statements of one thread of ``threads`` for ``steps`` steps, of which the last may be filled up."""

    def __init__(self, fragments: Fragments, prologue: Prologue | None, threads: int, steps: int) -> None:
        self.fragments, self.prologue, self.threads = fragments, prologue, threads
        self.columns, self.act = fragments.columns, fragments.act
        self.quads = steps * fragments.step_columns // 4
        self.rounds = -(-self.quads // threads)
        self.warps = threads // WARP

    @property
    def scratch(self) -> int:
        """Elements of shared memory, float32, that it needs."""
        act, prologue = self.act, self.prologue
        is_alone = act is not None and act.granularity == "group" and self.fragments.integer
        if is_alone and not self._scans and not (prologue is not None and prologue.is_norm):
            return 0  # groups lie within a warp
        return 4 * WARP + (self.quads if self._scans else 0)

    @property
    def _span(self) -> int:
        """Quads of columns with a scale of their own; 0 where a token has one."""
        return self.act.group_size // 4 if self.act is not None else 0

    @property
    def _scans(self) -> bool:
        return self._span > 0 and (self._span > WARP or self._span & (self._span - 1) != 0)

    def memory(self) -> Any:
        """Allocate the shared memory, where it needs any."""
        return shared(((self.scratch,), "float32"))[0] if self.scratch else None

    def macro(self) -> Any:
        """Make a macro ``prepare(at, m, thread, scratch)`` for token ``m``; all threads call it."""
        act, norm = self.act, self._norm()

        @T.inline
        def prepare(at, m, thread, scratch):
            x = T.alloc_buffer((self.rounds * 4,), "float32", scope="local")
            one = T.alloc_buffer((4,), "float32", scope="local")
            self.read(at, x, m, thread)
            if norm is not None:
                norm(at, x, thread, scratch, one)
            if act is None:
                self.top(x, one, 0, thread, scratch, 2)
                self.store_floats(at, x, one, m, thread)
            else:
                scales = T.alloc_buffer((self.rounds,), "float32", scope="local")
                self.find_scales(at, x, scales, one, thread, scratch)
                if self.fragments.integer:
                    self.store_codes(at, x, scales, m, thread)
                else:
                    self.round_floats(x, scales)
                    self.top(x, one, 0, thread, scratch, 3)
                    self.store_floats(at, x, one, m, thread)

        return prepare

    def read(self, at: Prepared, x: Any, m: Any, thread: Any) -> None:
        """Load the thread's columns, and compute what the prologue makes of them; zeros behind the last."""
        prologue, columns = self.prologue, self.columns
        gated = prologue is not None and prologue.gated
        kind = prologue.kind if prologue is not None and not prologue.is_norm else None
        for i in range(self.rounds):
            quad = held(T.Cast("int32", i * self.threads + thread))
            for j in range(4):
                T.buffer_store(x, T.float32(0), [4 * i + j])
            if columns % 4 == 0:
                with T.If(quad < columns // 4), T.Then():
                    place = T.ramp(4 * quad, 1, 4)
                    T.buffer_store(x, at.inputs[0][m, place], [T.ramp(4 * i, 1, 4)])
                    other: Any = T.alloc_buffer((4,), "float32", scope="local") if gated else None
                    if gated:
                        T.buffer_store(other, at.inputs[1][m, place], [T.ramp(0, 1, 4)])
                    for j in range(4 if kind else 0):
                        factor = other[j] if gated else None
                        T.buffer_store(x, _activated(kind, x[4 * i + j], factor), [4 * i + j])
                continue
            for j in range(4):
                with T.If(4 * quad + j < columns), T.Then():
                    value = at.inputs[0][m, 4 * quad + j]
                    factor = at.inputs[1][m, 4 * quad + j] if gated else None
                    T.buffer_store(x, _activated(kind, value, factor) if kind else value, [4 * i + j])

    def _each(self, thread: Any) -> list[tuple[int, Any]]:
        """List the thread's elements: place in its registers, and column."""
        return [(4 * i + j, 4 * (i * self.threads + thread) + j) for i in range(self.rounds) for j in range(4)]

    def _block(self, value: Any, one: Any, place: int, thread: Any, scratch: Any, slot: int, *, is_sum: bool) -> None:
        """Leave the block's sum or maximum of a float32 in ``one[place]``."""
        combine = warp_sum if is_sum else warp_max
        T.buffer_store(one, combine(value), [place])
        with T.If(thread % WARP == 0), T.Then():
            T.buffer_store(scratch, one[place], [slot * WARP + thread // WARP])
        T.evaluate(T.tvm_storage_sync("shared.dyn"))
        T.buffer_store(one, T.float32(0), [place])
        with T.If(thread % WARP < self.warps), T.Then():
            T.buffer_store(one, scratch[slot * WARP + thread % WARP], [place])
        T.buffer_store(one, combine(one[place]), [place])

    def top(self, x: Any, one: Any, place: int, thread: Any, scratch: Any, slot: int) -> None:
        """Leave the largest size of the token's activations in ``one[place]``."""
        bits = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(bits, T.int32(0), [0])
        for i in range(4 * self.rounds):
            T.buffer_store(bits, T.max(bits[0], size_bits(x[i], 1)), [0])
        largest = T.reinterpret(bits[0], dtype="float32")
        self._block(largest, one, place, thread, scratch, slot, is_sum=False)

    def _norm(self) -> Any:
        prologue, columns = self.prologue, self.columns
        if prologue is None or not prologue.is_norm:
            return None
        is_centred, eps = prologue.kind == "layer_norm", prologue.eps

        def total(one: Any, x: Any, power: int, thread: Any, scratch: Any, slot: int) -> None:
            T.buffer_store(one, T.float32(0), [1])
            for i in range(4 * self.rounds):
                T.buffer_store(one, one[1] + (x[i] * x[i] if power == 2 else x[i]), [1])
            self._block(one[1], one, slot, thread, scratch, slot, is_sum=True)

        def shift(one: Any, x: Any, thread: Any) -> None:
            for i, column in self._each(thread):
                T.buffer_store(x, T.if_then_else(column < columns, x[i] - one[0], T.float32(0)), [i])

        def scale(at: Prepared, one: Any, x: Any, thread: Any) -> None:
            for i, column in self._each(thread):
                with T.If(column < columns), T.Then():
                    value = x[i] * one[1] * at.vectors[0][column]
                    T.buffer_store(x, value + at.vectors[1][column] if prologue.has_bias else value, [i])

        @T.inline
        def norm(at, x, thread, scratch, one):
            if is_centred:
                total(one, x, 1, thread, scratch, 0)
                one[0] = one[0] / T.float32(columns)
                shift(one, x, thread)
            total(one, x, 2, thread, scratch, 1)
            one[2] = one[1]
            one[1] = T.float32(1) / T.sqrt(one[1] / T.float32(columns) + T.float32(eps))
            if is_centred:  # a variance that overflows has no inverse
                one[1] = T.if_then_else(one[2] < T.float32(math.inf), one[1], T.float32(math.nan))
            scale(at, one, x, thread)

        return norm

    def store_floats(self, at: Prepared, x: Any, one: Any, m: Any, thread: Any) -> None:
        """Store the token's activations in two halves, and its factor; ``one[0]`` is the largest size."""
        f = self.fragments
        bits = size_bits(one[0], 1)
        factor, inverse = T.float32(1), T.float32(1)
        if f.kind == "float16":
            field = held(T.max(T.shift_right(bits, T.int32(23)), T.int32(_LARGEST + 1)))
            inverse = held(T.reinterpret(T.shift_left(2 * 127 + _LARGEST - field, T.int32(23)), dtype="float32"))
            factor = T.reinterpret(T.shift_left(field - _LARGEST, T.int32(23)), dtype="float32")
            factor = T.if_then_else(bits < T.int32(0x7F800000), factor, T.float32(math.nan))
        with T.If(thread == 0), T.Then():
            unit = at.parts.get("tensor_scale")
            T.buffer_store(at.factor, factor if unit is None else factor * unit[0], [m, 0])
        words = T.alloc_buffer((2 * f.quad_words,), "uint32", scope="local")
        for i in range(self.rounds):
            self._split(words, [x[4 * i + j] * inverse if f.kind == "float16" else x[4 * i + j] for j in f.order])
            with T.If(i * self.threads + thread < self.quads), T.Then():
                step, vector, lane, word = f.place(i * self.threads + thread)
                for j in range(2 * f.quad_words):
                    half, inner = divmod(j, f.quad_words)
                    T.buffer_store(at.words, words[j], [at.index(m, half, step, vector, lane, word + inner)])

    def _split(self, words: Any, four: list[Any]) -> None:
        """Store the words of four numbers' first halves, and those of what is left."""
        count = self.fragments.quad_words
        for j in range(count):
            if self.fragments.kind == "float32":
                T.buffer_store(words, first_bits(four[j]), [j])
                rest = four[j] - T.reinterpret(words[j], dtype="float32")
                T.buffer_store(words, first_bits(rest), [count + j])
                continue
            pair = four[2 * j : 2 * j + 2]
            pack, unpack = (half2, low_half) if self.fragments.kind == "float16" else (bfloat2, low_bfloat)
            T.buffer_store(words, pack(*pair), [j])
            rests = [value - unpack(T.shift_right(words[j], T.uint32(16 * k))) for k, value in enumerate(pair)]
            T.buffer_store(words, pack(*rests), [count + j])

    def find_scales(self, at: Prepared, x: Any, scales: Any, one: Any, thread: Any, scratch: Any) -> None:
        """Leave the scale of each quad of columns in ``scales``."""
        act = self.act
        assert act is not None
        given = at.parts["input_scale"][0] if act.calibrated else None
        if act.granularity == "group":
            sizes = T.alloc_buffer((self.rounds,), "float32", scope="local")
            self._group_sizes(x, sizes, thread, scratch)
            for i in range(self.rounds):
                T.buffer_store(scales, span_scale(_finite(sizes[i]), act, given), [i])
            return
        if act.is_sign and act.granularity == "token":
            T.buffer_store(one, T.float32(0), [1])
            for i in range(4 * self.rounds):
                T.buffer_store(one, one[1] + T.abs(x[i]), [1])
            self._block(one[1], one, 0, thread, scratch, 0, is_sum=True)
            T.buffer_store(one, one[0] / T.float32(self.columns), [0])
        else:
            self.top(x, one, 0, thread, scratch, 0)
        # A stored scale saturates infinity; NaN has no place.
        is_static, saturated = act.granularity == "tensor", T.if_then_else(is_nan(one[0]), one[0], T.float32(0))
        T.buffer_store(one, saturated if is_static else _finite(one[0]), [0])
        T.buffer_store(one, span_scale(one[0], act, given), [0])
        for i in range(self.rounds):
            T.buffer_store(scales, one[0], [i])

    def _group_sizes(self, x: Any, sizes: Any, thread: Any, scratch: Any) -> None:
        """Leave the size of each quad's group in ``sizes``: the largest, or of signs the mean."""
        act, span = self.act, self._span
        assert act is not None
        for i in range(self.rounds):
            if act.is_sign:
                own = T.abs(x[4 * i]) + T.abs(x[4 * i + 1]) + T.abs(x[4 * i + 2]) + T.abs(x[4 * i + 3])
                T.buffer_store(sizes, own, [i])
            else:
                bits = [size_bits(x[4 * i + j], 1) for j in range(4)]
                largest = T.max(T.max(bits[0], bits[1]), T.max(bits[2], bits[3]))
                T.buffer_store(sizes, T.reinterpret(largest, dtype="float32"), [i])
            if not self._scans:
                T.buffer_store(sizes, (lane_sum if act.is_sign else lane_max)(sizes[i], span), [i])
        if self._scans:
            self._scan(sizes, thread, scratch)
        if act.is_sign:
            for i in range(self.rounds):
                first = (i * self.threads + thread) // span * span * 4
                count = T.max(T.min(T.Cast("int32", self.columns - first), T.int32(4 * span)), T.int32(1))
                T.buffer_store(sizes, sizes[i] / T.Cast("float32", count), [i])

    def _scan(self, sizes: Any, thread: Any, scratch: Any) -> None:
        """Combine the sizes of a group's quads by way of shared memory."""
        act, span, first = self.act, self._span, 4 * WARP
        assert act is not None
        for i in range(self.rounds):
            with T.If(i * self.threads + thread < self.quads), T.Then():
                T.buffer_store(scratch, sizes[i], [first + i * self.threads + thread])
        T.evaluate(T.tvm_storage_sync("shared.dyn"))
        for i in range(self.rounds):
            T.buffer_store(sizes, T.float32(0), [i])
            with T.serial(span) as k:
                place = (i * self.threads + thread) // span * span + k
                with T.If(place < self.quads), T.Then():
                    value = scratch[first + place]
                    if act.is_sign:
                        T.buffer_store(sizes, sizes[i] + value, [i])
                    else:
                        bits = T.max(size_bits(sizes[i], 1), size_bits(value, 1))
                        T.buffer_store(sizes, T.reinterpret(bits, dtype="float32"), [i])

    def store_codes(self, at: Prepared, x: Any, scales: Any, m: Any, thread: Any) -> None:
        """Store the token's activations as int8, and the factors of their groups."""
        act, span = self.act, self._span
        assert act is not None
        word = T.alloc_buffer((1,), "uint32", scope="local")
        for i in range(self.rounds):
            quad = i * self.threads + thread
            inverse = held(inverse_scale(scales[i]))
            codes = [
                T.bitwise_and(T.Cast("uint32", T.Cast("int32", on_grid(x[4 * i + j], inverse, act, 1))), T.uint32(255))
                for j in range(4)
            ]
            if act.is_sign:  # zeros that fill up have a sign, too
                codes = [T.if_then_else(4 * quad + j < self.columns, code, T.uint32(0)) for j, code in enumerate(codes)]
            T.buffer_store(word, T.uint32(0), [0])
            for j, code in enumerate(codes):
                T.buffer_store(word, T.bitwise_or(word[0], T.shift_left(code, T.uint32(8 * j))), [0])
            with T.If(quad < self.quads), T.Then():
                step, vector, lane, place = self.fragments.place(quad)
                T.buffer_store(at.words, word[0], [at.index(m, 0, step, vector, lane, place)])
            is_first = T.And(quad % span == 0, 4 * quad < self.columns) if span else quad == 0
            with T.If(is_first), T.Then():
                T.buffer_store(at.factor, scales[i], [m, quad // span if span else 0])

    def round_floats(self, x: Any, scales: Any) -> None:
        """Round the thread's activations to floats on a grid."""
        act = self.act
        assert act is not None
        for i in range(self.rounds):
            inverse = held(inverse_scale(scales[i]))
            for j in range(4):
                T.buffer_store(x, on_grid(x[4 * i + j], inverse, act, 1) * scales[i], [4 * i + j])


def _finite(size: Any) -> Any:
    """Return a size, and NaN of infinity."""
    return finite_size(size_bits(size, 1))


def _activated(kind: Any, x: Any, factor: Any) -> Any:
    value = ACTIVATIONS[kind](x, 1)
    if kind == "relu":  # CUDA's max of NaN and a number is the number
        value = T.if_then_else(is_nan(x), x, value)
    return value if factor is None else value * factor
