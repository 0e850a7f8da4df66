"""Emit what turns stored codes, scales and floats into numbers, and the dot product of four bytes a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.vector import splat, splat_float, widen
from compressor.formats.format import Format


def code_quad(word: Any, fmt: Format, quad: int, lanes: int) -> Any:
    """Codes of columns ``4 * quad .. 4 * quad + 3`` of a chunk, one a byte, one row a lane.

    Args:
        word: callable from the index of a chunk's word to its int32 vector.
    """
    result, offset, first = None, 0, 0
    for width in fmt.planes:
        index, j = divmod(quad, 8 // width)
        bits, down = word(first + index), width * j - offset  # at once to where they belong; masks keep bytes apart
        if offset == 0 and 0 < down == 8 - width and lanes < 8:  # registers of 128 bits shift bytes: nothing is masked
            octets, by = T.reinterpret(bits, dtype=f"uint8x{4 * lanes}"), T.broadcast(T.uint8(down), 4 * lanes)
            bits = T.reinterpret(T.shift_right(octets, by), dtype=f"int32x{lanes}")
        else:
            if down:
                bits = T.shift_right(bits, splat(down, lanes)) if down > 0 else T.shift_left(bits, splat(-down, lanes))
            if width < 8:
                bits = T.bitwise_and(bits, splat((((1 << width) - 1) << offset) * 0x01010101, lanes))
        result = bits if result is None else T.bitwise_or(result, bits)
        offset, first = offset + width, first + fmt.chunk_columns * width // 32
    return result


def centred(codes: Any, centre: int, lanes: int) -> Any:
    """Codes, one a byte, minus their zero point: signed bytes."""
    octets = T.reinterpret(codes, dtype=f"int8x{4 * lanes}")
    byte = T.int8(centre - 256 * (centre > 127))  # of 8 bits, 128 and -128 are the same
    return T.reinterpret(octets - T.broadcast(byte, 4 * lanes), dtype=f"int32x{lanes}")


def less_128(octets: Any, lanes: int) -> Any:
    """Return unsigned bytes less 128, as signed ones: their highest bit is turned."""
    return T.bitwise_xor(octets, splat(0x80808080, lanes))


def code_values(codes: Any, byte: int, fmt: Format, isa: Isa, table: Callable[[int], Any]) -> Any:
    """Emit the values of the codes in one byte of each lane, but for the constant factor that :func:`scale_values` has.

    Args:
        table: code -> a codebook's vector of values, one a lane.

    A float of few bits is, with its fields in the places of float16's, a float16 that is smaller by a power of two:
    subnormals as well, which that conversion takes at full speed.
    """
    lanes = isa.lanes
    if fmt.codebook:
        return _pick([table(level) for level in range(fmt.levels)], codes, 8 * byte, lanes)
    element = fmt.element
    code = codes if byte == 0 else T.shift_right(codes, splat(8 * byte, lanes))
    if element is None and fmt.bits <= 4 and isa.quick_lookup:  # in place of a mask and a conversion
        return _lookup16(range(16), code, isa)
    if element is None:
        return T.Cast(f"float32x{lanes}", T.bitwise_and(code, splat(0xFF, lanes)))
    if not element.is_float:
        return _lookup16(element.values, code, isa)
    sign = T.shift_left(T.bitwise_and(code, splat(1 << (fmt.bits - 1), lanes)), splat(16 - fmt.bits, lanes))
    rest = T.shift_left(
        T.bitwise_and(code, splat((1 << (fmt.bits - 1)) - 1, lanes)), splat(10 - element.mantissa_bits, lanes)
    )
    half = T.Cast(f"uint16x{lanes}", T.bitwise_or(sign, rest))
    return T.Cast(f"float32x{lanes}", T.reinterpret(half, dtype=f"float16x{lanes}"))


def _pick(found: Sequence[Any], codes: Any, shift: int, lanes: int) -> Any:
    """Select, for each lane, the vector whose number some bits of its code give, by choices between two."""
    for bit in range(shift, shift + (len(found) - 1).bit_length()):
        unset = T.EQ(T.bitwise_and(codes, splat(1 << bit, lanes)), splat(0, lanes))
        found = [T.Select(unset, low, high) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _lookup16(values: Sequence[float], index: Any, isa: Isa) -> Any:
    """Emit ``values[index % 16]``: the machine's own way, or by choices between two."""
    if isa.lookup16 is not None:
        return isa.lookup16(values, index)
    return _pick([splat_float(value, isa.lanes) for value in values], index, 0, isa.lanes)


def scale_values(stored: Any, fmt: Format, lanes: int) -> Any:
    """Convert a loaded vector of stored scales to float32, times what :func:`code_values` leaves out."""
    floats = f"float32x{lanes}"
    if fmt.scale_type == "F16":
        scale = T.Cast(floats, stored)
    elif fmt.scale_type == "E8M0":  # float32's exponent field; byte 0, 2^-127, would be a subnormal
        bits = T.shift_left(T.Cast(f"int32x{lanes}", stored), splat(23, lanes))
        scale = T.reinterpret(bits, dtype=floats)
    else:  # E4M3, never negative: float16's fields, 2^8 too small
        bits = T.shift_left(T.Cast(f"uint16x{lanes}", stored), widen(T.uint16(7), lanes))
        half = T.Cast(floats, T.reinterpret(bits, dtype=f"float16x{lanes}"))
        scale = half * widen(T.float32(2.0**8), lanes)
    if fmt.factor != 1:
        return scale * widen(T.float32(fmt.factor), lanes)
    if fmt.element is None or not fmt.element.is_float:
        return scale
    return scale * widen(T.float32(2.0 ** (15 - fmt.element.bias)), lanes)


def dot4(acc: Any, codes: Any, activation: Any, fmt: Format, isa: Isa) -> Any:
    """Emit ``acc + sum over 4 bytes of codes (unsigned) * activation (signed)`` in int32.

    Args:
        codes: int32 vector of four unsigned bytes a lane.
        activation: int32 vector of four signed bytes a lane.
    """
    if isa.dot4 is not None:
        return isa.dot4(acc, codes, activation, fmt.bits)
    lanes = isa.lanes
    for byte in range(4):
        unsigned = T.bitwise_and(T.shift_right(codes, splat(8 * byte, lanes)), splat(0xFF, lanes))
        signed = T.shift_right(T.shift_left(activation, splat(24 - 8 * byte, lanes)), splat(24, lanes))
        acc = acc + unsigned * signed
    return acc


def to_float(value: Any, storage: str, lanes: int) -> Any:
    """Convert a loaded vector (or scalar, one lane) of stored floats to float32; bfloat16 is stored as uint16."""
    suffix = f"x{lanes}" if lanes > 1 else ""
    if storage == "float32":
        return value
    if storage == "float16":
        return T.Cast(f"float32{suffix}", value)
    sixteen = T.broadcast(T.uint32(16), lanes) if lanes > 1 else T.uint32(16)
    return T.reinterpret(T.shift_left(T.Cast(f"uint32{suffix}", value), sixteen), dtype=f"float32{suffix}")
