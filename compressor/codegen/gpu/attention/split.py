"""Rows in shared memory whose numbers are each two of 16 bits, as tensor cores multiply them.

Rows that scores are made of become float16, of which two keep 22 bits.  Float16 ends at 65504 and is coarse below
6e-5, so a row is first multiplied by the power of two that brings its largest number close below that, and a score is
divided by those of its query and key.  Values become bfloat16, which has float32's range; two keep 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.halves import bfloat2, half2, low_bfloat, low_half
from compressor.codegen.gpu.intrinsics import WARP, call
from compressor.codegen.gpu.memory import held as in_register
from compressor.codegen.kernels.vector import ramp

RUN = 4
"""Channels that a thread converts together."""
SHRINK = 2.0**-28
"""A factor of scores, beside those of their query and key."""
_HIGH = 0xFFFF0000

_NORMALIZE = """
// Multiplies a row, of which each of some lanes holds a part, by the power of two that brings its largest number to
// 2^14 or more, below 2^15; returns 2^14 divided by that.  Of a row with infinities only these stay, as 1
// and -1, and of one with NaN nothing: infinity, or NaN, is returned, so that scores become what they are of such rows.
template <int Count>
__device__ inline float compressor_normalize(float* held, int lanes) {
  int top = 0;  // as whole numbers infinity is above all numbers, and NaN above that
  for (int i = 0; i < Count; ++i) {
    int bits;
    memcpy(&bits, held + i, 4);
    top = max(top, bits & 0x7FFFFFFF);
  }
  for (int step = lanes / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, step));
  const int exponent = max(top >> 23, 15), inverse = (268 - exponent) << 23, kept = exponent << 23;
  float factor, result;
  memcpy(&factor, &inverse, 4), memcpy(&result, top < 0x7F800000 ? &kept : &top, 4);
  if (top < 0x7F800000) {
    for (int i = 0; i < Count; ++i) held[i] *= factor;
  } else {
    for (int i = 0; i < Count; ++i) held[i] = isinf(held[i]) ? copysignf(1.0f, held[i]) : 0.0f;
  }
  return result;
}
"""

_MATRICES = """
// Four matrices of 8 x 8 numbers of 16 bits, from shared memory: lane i has the address of row i % 8 of matrix i / 8,
// and gets two neighbours of row lane / 4 of each; of their transposes by the other function.
#ifdef __CUDA_ARCH__
#define COMPRESSOR_LOAD_MATRICES(name, kind, is_transposed)                                                   \\
  __device__ inline void name(unsigned* to, const unsigned* row) {                                            \\
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];"                   \\
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                                                  \\
        : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");                                           \\
  }
#else
#define COMPRESSOR_LOAD_MATRICES(name, kind, is_transposed)                                                   \\
  __device__ inline void name(unsigned* to, const unsigned* row) {                                            \\
    const unsigned char* all = lockstep_exchange(&row, sizeof row);                                           \\
    const int g = lockstep_lane() / 4, t = lockstep_lane() % 4;                                               \\
    for (int i = 0; i < 8; ++i) {                                                                             \\
      const int line = is_transposed ? 2 * t + i % 2 : g, place = is_transposed ? g : 2 * t + i % 2;          \\
      const unsigned short* from;                                                                             \\
      memcpy(&from, all + 64 * (i / 2 * 8 + line), sizeof from);                                              \\
      memcpy((unsigned short*)to + i, from + place, 2);                                                       \\
    }                                                                                                         \\
  }
#endif
COMPRESSOR_LOAD_MATRICES(compressor_load_matrices, "", false)
COMPRESSOR_LOAD_MATRICES(compressor_load_transposed, ".trans", true)
"""


def load_matrices(to: Any, row: Any, *, transposed: bool = False) -> None:
    """Load four matrices of 8 x 8 numbers of 16 bits to a pointer to four uint32; ``row`` is each lane's address."""
    name = "compressor_load_transposed" if transposed else "compressor_load_matrices"
    T.evaluate(call(name, to, row, source=_MATRICES))


def normalize(held: Any, at: int, count: int, lanes: int) -> Any:
    """Return a call that makes a row, in ``lanes`` lanes, fit float16, and gives the factor of its scores."""
    pointer = T.address_of(held[at])
    return call(f"compressor_normalize<{count}>", pointer, T.int32(lanes), source=_NORMALIZE, kind="float32")


@dataclass(frozen=True)
class SplitRows:
    """A tile of rows: of each 8 channels a chunk of 16 bytes, all high halves before all low ones.

    Attributes:
        channels: of a row, a multiple of 16.
    """

    rows: int
    channels: int

    @cached_property
    def chunks(self) -> int:
        """Return how many chunks a half of a row has."""
        return self.channels // 8

    @cached_property
    def stride(self) -> int:
        """Return the words between rows.

        Eight rows of a matrix lie in different banks: an odd number of chunks apart, or each in an order of its own.
        """
        return 4 * (self.chunks if self.chunks % 8 == 0 else self.chunks | 1)

    @cached_property
    def words(self) -> int:
        """Return the size in words of 32 bits."""
        return 2 * self.rows * self.stride

    def at(self, half: Any, row: Any, chunk: Any) -> Any:
        """Return the word where a chunk of a row begins."""
        chunk = T.bitwise_xor(chunk, row % 8) if self.chunks % 8 == 0 else chunk
        return (half * self.rows + row) * self.stride + chunk * 4


@dataclass(frozen=True)
class Carrier:
    """How the threads of a block load ``rows`` rows into registers, and from there into shared memory.

    Attributes:
        width: of a row in global memory.
        channels: of a row in shared memory; those behind the width are 0.
        vec: channels that can be loaded at once.
    """

    threads: int
    rows: int
    width: int
    channels: int
    vec: int

    @cached_property
    def spread(self) -> int:
        """Return how many threads share a row."""
        return min(WARP, 1 << (self.channels // RUN - 1).bit_length())

    @cached_property
    def steps(self) -> int:
        """Return how many runs of a row each of these has."""
        return -(-self.channels // (RUN * self.spread))

    @cached_property
    def at_once(self) -> int:
        """Return how many rows the block's threads have together."""
        return self.threads // self.spread

    @cached_property
    def each(self) -> int:
        """Return how many rows a thread has a share of."""
        return -(-self.rows // self.at_once)

    @cached_property
    def registers(self) -> int:
        """Return how many floats a thread holds."""
        return self.each * self.steps * RUN

    def row(self, i: int, t: Any) -> Any:
        """Return a thread's i-th row."""
        return i * self.at_once + t // self.spread

    def channel(self, s: int, t: Any) -> Any:
        """Return the first channel of a thread's run."""
        return (s * self.spread + t % self.spread) * RUN

    def emit_load(self, to: Any, source: Any, place: Callable[[Any], Any], is_there: Any, b: Any, t: Any) -> None:
        """Emit loads of rows of ``source``; ``place(row)`` is a head and a token; zeros where ``is_there(row)`` is not.

        ``is_there`` may be None.
        """
        for i in range(self.each):
            row = self.row(i, t)
            head, token = place(row)
            known = row < self.rows if is_there is None else T.And(row < self.rows, is_there(row))
            for s in range(self.steps):
                for e in range(0, RUN, self.vec):
                    channel, at = self.channel(s, t) + e, (i * self.steps + s) * RUN + e
                    with T.If(T.And(known, channel < self.width)):
                        with T.Then():
                            source.emit_load(to, (at,), b, head, token, channel, self.vec)
                        with T.Else():
                            T.buffer_store(to, T.broadcast(T.float32(0), self.vec) if self.vec > 1 else T.float32(0),
                                           [ramp(at, self.vec)])  # fmt: skip

    def emit_store(self, held: Any, to: Any, tile: SplitRows, first: Any, scales: Any, t: Any) -> None:
        """Emit stores of the rows to a tile, from its row ``first`` on.

        Args:
            scales: float32, gets what each row's halves, times 2 ** -14, must be multiplied by; None makes bfloat16.
        """
        words = T.alloc_buffer((RUN,), "uint32", scope="local")
        for i in range(self.each):
            row = self.row(i, t)
            if scales is not None:
                at, count = i * self.steps * RUN, self.steps * RUN
                factor = in_register(normalize(held, at, count, self.spread))
                with T.If(T.And(t % self.spread == 0, row < self.rows)), T.Then():
                    T.buffer_store(scales, factor, [first + row])
            for s in range(self.steps):
                self._emit_split(held, (i * self.steps + s) * RUN, words, scales is None)
                channel = self.channel(s, t)
                with T.If(T.And(row < self.rows, channel < self.channels)), T.Then():
                    for half in range(2):
                        at = tile.at(half, first + row, channel // 8) + channel % 8 // 2
                        T.buffer_store(to, words[ramp(2 * half, 2)], [ramp(at, 2)])

    @staticmethod
    def _emit_split(held: Any, at: int, words: Any, is_bfloat: bool) -> None:
        """Emit the two halves of four floats: two words of high ones, two of low ones."""
        for i in range(2):
            pair = held[at + 2 * i], held[at + 2 * i + 1]
            emit_halves(pair, (words, i), (words, 2 + i), is_bfloat)


def emit_halves(pair: tuple[Any, Any], high: tuple[Any, int], low: tuple[Any, int], is_bfloat: bool) -> None:
    """Emit stores of two floats' high halves, and of their low ones, to places of buffers of uint32."""
    pack, unpack = (bfloat2, low_bfloat) if is_bfloat else (half2, low_half)
    T.buffer_store(high[0], pack(*pair), [high[1]])
    both = high[0][high[1]]
    if is_bfloat:
        second = T.reinterpret(T.bitwise_and(both, T.uint32(_HIGH)), dtype="float32")
    else:
        second = unpack(T.shift_right(both, T.uint32(16)))
    T.buffer_store(low[0], pack(pair[0] - unpack(both), pair[1] - second), [low[1]])
