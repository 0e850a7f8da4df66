"""Rows of queries, keys and values as attention reads them: floats, permuted floats, and codes of packed caches."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, Protocol

from tvm.script import tirx as T

from compressor.codegen.kernels.vector import ramp
from compressor.formats.cache import CacheFormat

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


class _Channels:
    """Rows that are loaded channel by channel."""

    def one(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        raise NotImplementedError

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

    Bytes are loaded one by one: rows do not begin at multiples of anything.
    """

    def __init__(self, buffer: Any, width: int, fmt: CacheFormat) -> None:
        self.buffer, self.width, self.fmt = buffer, width, fmt
        self.half = fmt.code_bytes(width)
        self.unit = gcd(4, fmt.span(width)) if fmt.bits == 8 else gcd(4, fmt.span(width), self.half)

    def one(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        """See :class:`Rows`."""
        scale = self._scale(b, head, token, channel // self.fmt.span(self.width))
        return T.Cast("float32", self._code(b, head, token, channel)) * scale

    def _code(self, b: Any, head: Any, token: Any, channel: Any) -> Any:
        """Load the value of a code; of E4M3, a float16 that is smaller by a power of two."""
        if self.fmt.bits == 4:
            is_high = channel >= self.half
            octet = self.buffer[b, head, token, T.Select(is_high, channel - self.half, channel)]
            top = T.shift_left(T.Cast("int32", octet), T.Select(is_high, T.int32(24), T.int32(28)))
            return T.shift_right(top, T.int32(28))  # arithmetic: the sign comes along
        octet = self.buffer[b, head, token, channel]
        if self.fmt.element is None:
            return T.Cast("int32", T.reinterpret(octet, dtype="int8"))
        code = T.Cast("uint16", octet)
        sign = T.shift_left(T.bitwise_and(code, T.uint16(0x80)), T.uint16(8))
        rest = T.shift_left(T.bitwise_and(code, T.uint16(0x7F)), T.uint16(7))
        return T.reinterpret(T.bitwise_or(sign, rest), dtype="float16")

    def _scale(self, b: Any, head: Any, token: Any, group: Any) -> Any:
        at = self.half + self.fmt.scale_bytes * group
        low = T.Cast("int32", self.buffer[b, head, token, at])
        if self.fmt.scale_type == "E8M0":
            return T.reinterpret(T.shift_left(low, T.int32(23)), dtype="float32")
        high = T.shift_left(T.Cast("int32", self.buffer[b, head, token, at + 1]), T.int32(8))
        half = T.reinterpret(T.Cast("uint16", T.bitwise_or(low, high)), dtype="float16")
        scale = T.Cast("float32", half)
        return scale if self.fmt.element is None else scale * T.float32(_E4M3_HALF)
