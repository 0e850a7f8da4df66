"""ARM's vectors of 128 bits and their levels, as instruction sets; TVM is imported when a kernel is written.

A register has four lanes of 32 bits, and each level has the one before it::

    neon      smull, addp, sadalp: four instructions for sixteen products of bytes      Cortex-A53, Raspberry Pi 4
    dotprod   sdot: one for sixteen                                                     Cortex-A55, Raspberry Pi 5
    i8mm      usdot: of unsigned by signed bytes; usmmla: one for 32, 2 x 8 by 8 x 2      Neoverse V1, Cortex-A510
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from compressor.codegen.isa import Isa

_LANES = 4


def _call(name: str, dtype: str, *operands: Any) -> Any:
    from tvm.script import tirx as T

    number = T.llvm_lookup_intrinsic_id(f"llvm.aarch64.neon.{name}")
    return T.call_llvm_pure_intrin(number, *operands, dtype=dtype)


def _octets(value: Any) -> Any:
    from tvm.script import tirx as T

    return T.reinterpret(value, dtype="int8x16")


def _signed(dot: Callable[[Any, Any, Any], Any], acc: Any, codes: Any, activation: Any) -> Any:
    """Multiply codes less 128, and add 128 times the activations: less their products with -128."""
    from compressor.codegen.kernels.codes import less_128
    from compressor.codegen.kernels.vector import splat

    more = dot(splat(0, _LANES), splat(0x80808080, _LANES), activation)
    return dot(acc, less_128(codes, _LANES), activation) - more


def _products(one: Any, other: Any) -> tuple[Any, Any]:
    """Return sixteen products of signed bytes, int16x8 twice."""
    from tvm.script import tirx as T

    pairs = []
    for half in (list(range(8)), list(range(8, 16))):
        operands = (T.Shuffle([_octets(value)], half) for value in (one, other))
        pairs.append(_call("smull", "int16x8", *operands))
    return pairs[0], pairs[1]


def _smull(acc: Any, one: Any, other: Any) -> Any:
    """Add four products a lane; two of -128 by -128 need 17 bits, so they are added in 32."""
    low, high = (_call("saddlp", "int32x4", part) for part in _products(one, other))
    return acc + _call("addp", "int32x4", low, high)


def _smull_codes(acc: Any, codes: Any, activation: Any, bits: int) -> Any:
    """Add pairs of products in 16 bits, which 2 * 127 * 128 fits; then pairs of those."""
    if bits == 8:
        return _signed(_smull, acc, codes, activation)
    low, high = _products(codes, activation)
    return acc + _call("saddlp", "int32x4", _call("addp", "int16x8", low, high))


def _sdot(acc: Any, one: Any, other: Any) -> Any:
    return _call("sdot", "int32x4", acc, _octets(one), _octets(other))


def _sdot_codes(acc: Any, codes: Any, activation: Any, bits: int) -> Any:
    if bits < 8:
        return _sdot(acc, codes, activation)
    return _signed(_sdot, acc, codes, activation)


def _usdot(acc: Any, codes: Any, activation: Any, _bits: int) -> Any:
    return _call("usdot", "int32x4", acc, _octets(codes), _octets(activation))


def _usmmla(acc: Any, codes: Any, activation: Any) -> Any:
    return _call("usmmla", "int32x4", acc, _octets(codes), _octets(activation))


def _tbl4(values: Sequence[float], index: Any) -> Any:
    """Look up four bytes a lane in a table of 64: the bytes of sixteen floats."""
    from tvm.script import tirx as T

    from compressor.codegen.kernels.vector import splat

    words = [T.int32(struct.unpack("<i", struct.pack("<f", value))[0]) for value in values]
    table = [_octets(T.Shuffle(words[first : first + 4], list(range(4)))) for first in range(0, 16, 4)]
    place = T.bitwise_and(index, splat(15, _LANES)) * splat(0x04040404, _LANES) + splat(0x03020100, _LANES)
    return T.reinterpret(_call("tbl4", "int8x16", *table, _octets(place)), dtype="float32x4")


def _cnt(word: Any) -> Any:
    """Count the ones in bytes (``cnt``), and add four of them: LLVM takes a dot product where there is one."""
    from tvm.script import tirx as T

    return T.popcount(word)


def _tbx(values: Any, flags: Any, others: Any) -> Any:
    """Spread eight bytes: a byte's place among those set is the number of ones up to it, less one.

    What is not set asks for byte 255, which no table has; ``tbx`` leaves the other there.
    """
    from tvm.script import tirx as T

    def octets(value: Any) -> Any:
        return T.reinterpret(value, dtype="int8x8")

    bits = T.Shuffle([T.int8((1 << i) - 256 * (i == 7)) for i in range(8)], list(range(8)))
    every = T.broadcast(T.Cast("int8", flags), 8)
    is_set = T.NE(T.bitwise_and(every, bits), T.broadcast(T.int8(0), 8))
    ones = T.Select(is_set, T.broadcast(T.int8(1), 8), T.broadcast(T.int8(0), 8))
    count = T.reinterpret(ones, dtype="uint64")
    for step in (8, 16, 32):  # sums of the bytes up to each
        count = T.bind(count + T.shift_left(count, T.uint64(step)))
    place = T.Select(is_set, octets(count) - T.broadcast(T.int8(1), 8), T.broadcast(T.int8(-1), 8))
    table = T.reinterpret(T.Shuffle([values, T.uint64(0)], [0, 1]), dtype="int8x16")
    return T.reinterpret(_call("tbx1", "int8x8", octets(others), table, place), dtype="uint64")


NEON = Isa(
    "neon",
    _LANES,
    cpu_flags=("asimd",),
    mattr=("+neon",),
    registers=32,
    dot4=_smull_codes,
    signed4=_smull,
    lookup16=_tbl4,
    count_ones=_cnt,
    spread_eight=_tbx,
)
DOTPROD = replace(
    NEON,
    name="dotprod",
    cpu_flags=("asimd", "asimddp"),
    mattr=("+neon", "+dotprod"),
    dot4=_sdot_codes,
    signed4=_sdot,
)
I8MM = replace(
    DOTPROD,
    name="i8mm",
    cpu_flags=("asimd", "asimddp", "i8mm"),
    mattr=("+neon", "+dotprod", "+i8mm"),
    dot4=_usdot,
    signed4=None,
    mmla=_usmmla,
)

ISAS = {isa.name: isa for isa in (I8MM, DOTPROD, NEON)}
"""The levels, the best first."""
