"""Rows of queries, keys and values as attention reads them: floats, permuted floats, and codes of packed caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import gcd
from typing import Any, Protocol

from tvm.script import tirx as T

from compressor.codegen.gpu.memory import held, load_bytes, load_pair
from compressor.codegen.kernels.vector import ramp
from compressor.formats.cache import CacheFormat

_RUN = 8  # codes that are loaded at once
_E4M3_HALF = 2.0**8  # E4M3's fields in float16's places are a number so much smaller


class Rows(Protocol):
    """Rows of heads, each of some channels.

    Attributes:
        unit: channels that can be loaded at once, at most; loads begin at multiples of what is loaded.
    """

    unit: int

    def one(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        """Return one channel of a row, float32."""

    def emit_load(self, to: Any, at: Sequence[Any], b: Any, head: Any, token: Any, channel: Any, count: int) -> None:
        """Emit stores of ``count`` channels of a row to a buffer, the first at ``at``."""


class DenseRows:
    """Rows of a buffer float32 [B, H, S, D], or [B, S, H, D] where ``tokens_first``."""

    unit = 4

    def __init__(self, buffer: Any, tokens_first: bool = False) -> None:
        self.buffer, self.tokens_first = buffer, tokens_first

    def one(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        """See :class:`Rows`."""
        return self.buffer[(b, token, head, channel) if self.tokens_first else (b, head, token, channel)]

    def emit_load(self, to: Any, at: Sequence[Any], b: Any, head: Any, token: Any, channel: Any, count: int) -> None:
        """See :class:`Rows`."""
        T.buffer_store(to, self.one(b, head, token, ramp(channel, count)), [*at[:-1], ramp(at[-1], count)])


class _Channels(ABC):
    """Rows that are loaded channel by channel."""

    @abstractmethod
    def one(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        """See :class:`Rows`."""

    def emit_load(self, to: Any, at: Sequence[Any], b: Any, head: Any, token: Any, channel: Any, count: int) -> None:
        """See :class:`Rows`."""
        for e in range(count):
            T.buffer_store(to, self.one(b, head, token, channel + e), [*at[:-1], at[-1] + e])


class PermutedRows(_Channels):
    """Rows of a buffer float32 [B, H, S, D] whose place ``d`` is the channel ``order[head of keys, d]``.

    Args:
        repeat: heads that share a head of keys.
    """

    unit = 4

    def __init__(self, buffer: Any, order: Any, repeat: int) -> None:
        self.buffer, self.order, self.repeat = buffer, order, repeat

    def one(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        """See :class:`Rows`."""
        return self.buffer[b, head, token, self.order[head // self.repeat, channel]]


class CodedRows(_Channels):
    """Rows of a buffer uint8 [B, Hkv, T, row_bytes], in the layout of :mod:`compressor.formats.cache`.

    Rows do not begin at multiples of anything: several bytes come as words that hold them, shifted into place.
    """

    def __init__(self, buffer: Any, width: int, fmt: CacheFormat) -> None:
        self.buffer, self.width, self.fmt = buffer, width, fmt
        self.half = fmt.code_bytes(width)
        self.unit = gcd(_RUN, fmt.span(width)) if fmt.bits == 8 else gcd(_RUN, fmt.span(width), self.half)

    def one(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        """See :class:`Rows`."""
        scale = self._scale(b, head, token, channel // self.fmt.span(self.width))
        is_high = channel >= self.half
        at = T.Select(is_high, channel - self.half, channel) if self.fmt.bits == 4 else channel
        word = T.Cast("int32", self.buffer[b, head, token, at])
        return self._value(self._lowered(word, is_high), 0) * scale

    def emit_load(self, to: Any, at: Sequence[Any], b: Any, head: Any, token: Any, channel: Any, count: int) -> None:
        """See :class:`Rows`."""
        if count % 4:
            super().emit_load(to, at, b, head, token, channel, count)
            return
        words = T.alloc_buffer((count // 4,), "int32", scope="local")
        is_high = channel >= self.half
        first = T.Select(is_high, channel - self.half, channel) if self.fmt.bits == 4 else channel
        load_bytes(T.address_of(words[0]), T.address_of(self.buffer[b, head, token, first]), count)
        scale = held(self._scale(b, head, token, channel // self.fmt.span(self.width)))
        for i in range(count // 4):
            T.buffer_store(words, self._lowered(words[i], is_high), [i])
        for e in range(count):
            T.buffer_store(to, self._value(words[e // 4], 8 * (e % 4)) * scale, [*at[:-1], at[-1] + e])

    def _lowered(self, word: Any, is_high: Any) -> Any:
        """Move codes of four bits that are in the high half of their bytes to the low one."""
        return T.Select(is_high, T.shift_right(word, T.int32(4)), word) if self.fmt.bits == 4 else word

    def _value(self, word: Any, bit: int) -> Any:
        """Return the value of the code from a bit of an int32 on; of E4M3, one that is smaller by a power of two."""
        if self.fmt.element is None:
            top = T.shift_left(word, T.int32(32 - self.fmt.bits - bit))
            return T.Cast("float32", T.shift_right(top, T.int32(32 - self.fmt.bits)))  # the sign comes along
        code = T.Cast("uint16", T.bitwise_and(T.shift_right(word, T.int32(bit)), T.int32(0xFF)))
        sign = T.shift_left(T.bitwise_and(code, T.uint16(0x80)), T.uint16(8))
        rest = T.shift_left(T.bitwise_and(code, T.uint16(0x7F)), T.uint16(7))
        return T.Cast("float32", T.reinterpret(T.bitwise_or(sign, rest), dtype="float16"))

    def _scale(self, b: Any, head: Any, token: Any, group: Any) -> Any:
        at = self.half + self.fmt.scale_bytes * group
        if self.fmt.scale_type == "E8M0":
            low = T.Cast("int32", self.buffer[b, head, token, at])
            return T.reinterpret(T.shift_left(low, T.int32(23)), dtype="float32")
        if self.half % 2 == 0 and self.fmt.row_bytes(self.width) % 2 == 0:
            both = load_pair(T.address_of(self.buffer[b, head, token, at]))
        else:
            low = T.Cast("int32", self.buffer[b, head, token, at])
            both = T.bitwise_or(low, T.shift_left(T.Cast("int32", self.buffer[b, head, token, at + 1]), T.int32(8)))
        scale = T.Cast("float32", T.reinterpret(T.Cast("uint16", both), dtype="float16"))
        return scale if self.fmt.element is None else scale * T.float32(_E4M3_HALF)
