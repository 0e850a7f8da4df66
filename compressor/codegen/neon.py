"""ARM's vectors of 128 bits and their levels, as instruction sets; TVM is imported when a kernel is written.

A register has four lanes of 32 bits, and each level has the one before it::

    neon      smull, addp, sadalp: four instructions for sixteen products of bytes      Cortex-A53, Raspberry Pi 4
    dotprod   sdot: one for sixteen                                                     Cortex-A55, Raspberry Pi 5
    i8mm      usdot: of unsigned by signed bytes; smmla: one for 32, 2 x 8 by 8 x 2       Neoverse V1, Cortex-A510

Code with ``sdot`` is in the order that suits a Cortex-A55, which is slow to wait: larger cores run it up to 29% faster
than LLVM's order for no core in particular (benchmarks/results/arm_mca.md).  Its arithmetic in float16 stays off.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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


def _codes(dot: Callable[[Any, Any, Any], Any], acc: Any, codes: Any, activation: Any, bits: int) -> Any:
    """Multiply unsigned codes by products of signed bytes.

    Those of 8 bits are multiplied less 128, and 128 times the activations are added: less their products with -128.
    """
    from compressor.codegen.kernels.codes import less_128
    from compressor.codegen.kernels.vector import splat

    if bits < 8:
        return dot(acc, codes, activation)
    more = dot(splat(0, _LANES), splat(0x80808080, _LANES), activation)
    return dot(acc, less_128(codes, _LANES), activation) - more


def _smull(acc: Any, one: Any, other: Any) -> Any:
    """Add pairs of products in 16 bits, which hold two of 127 by -128, the largest: codes of activations end at 127."""
    from tvm.script import tirx as T

    halves = []
    for half in (list(range(8)), list(range(8, 16))):
        operands = (T.Shuffle([_octets(value)], half) for value in (one, other))
        halves.append(_call("smull", "int16x8", *operands))
    return acc + _call("saddlp", "int32x4", _call("addp", "int16x8", *halves))


def _sdot(acc: Any, one: Any, other: Any) -> Any:
    """Add four products a lane; the second operand may be one lane of a register."""
    return _call("sdot", "int32x4", acc, _octets(one), _octets(other))


def _usdot(acc: Any, codes: Any, activation: Any, _bits: int) -> Any:
    return _call("usdot", "int32x4", acc, _octets(codes), _octets(activation))


def _smmla(acc: Any, codes: Any, activation: Any) -> Any:
    return _call("smmla", "int32x4", acc, _octets(codes), _octets(activation))


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
    """Spread eight bytes: a byte takes the one whose number is that of the flags before its own.

    What is not set asks for byte 255, which no table has; ``tbx`` leaves the other there.  Numbers are computed in a
    register of 64 bits, since TVM takes selections of bytes for the same whose conditions differ.
    """
    from tvm.script import tirx as T

    def octets(value: Any) -> Any:
        return T.reinterpret(value, dtype="int8x8")

    def constant(value: int) -> Any:  # TVM has none above 2^63
        return T.reinterpret(T.int64(value - (value >> 63 << 64)), dtype="uint64")

    every = T.uint64(0x0101010101010101)
    own, low = T.bind(flags * every & constant(0x8040201008040201)), constant(0x7F7F7F7F7F7F7F7F)
    ones = T.bind(T.shift_right(T.bitwise_or(T.bitwise_and(own, low) + low, own), T.uint64(7)) & every)
    before = ones * every - ones  # a product with ones is the sum of the bytes up to each
    unset = T.bitwise_not(T.shift_left(ones, T.uint64(8)) - ones)
    table = T.reinterpret(T.Shuffle([values, T.uint64(0)], [0, 1]), dtype="int8x16")
    place = octets(T.bind(T.bitwise_or(before, unset)))
    # TVM reinterprets no constant zero.
    kept = T.broadcast(T.int8(0), 8) if getattr(others, "value", None) == 0 else octets(others)
    return T.reinterpret(_call("tbx1", "int8x8", kept, table, place), dtype="uint64")


NEON = Isa(
    "neon",
    _LANES,
    cpu_flags=("asimd",),
    mattr=("+neon",),
    registers=32,
    dot4=partial(_codes, _smull),
    signed4=_smull,
    lookup16=_tbl4,
    count_ones=_cnt,
    spread_eight=_tbx,
)
DOTPROD = replace(
    NEON,
    name="dotprod",
    cpu_flags=("asimd", "asimddp"),
    mcpu="cortex-a55",
    mattr=("-fullfp16", "+neon", "+dotprod"),
    dot4=partial(_codes, _sdot),
    signed4=_sdot,
)
I8MM = replace(
    DOTPROD,
    name="i8mm",
    cpu_flags=("asimd", "asimddp", "i8mm"),
    mattr=("-fullfp16", "+neon", "+dotprod", "+i8mm"),
    dot4=_usdot,
    signed4=None,
    mmla=_smmla,
)

ISAS = {isa.name: isa for isa in (I8MM, DOTPROD, NEON)}
"""The levels, the best first."""
