"""Describe instruction sets by what their machines can do; each target's file defines its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

INDEPENDENT_ROWS = 32
"""Rows up to which a row's outputs have the same bits whatever is computed with it, in every kernel but attention's."""


@dataclass(frozen=True)
class Isa:
    """Hold what kernels know of a machine: how wide its registers are, and which instructions it has.

    An instruction is a function that emits it into the kernel that is being written.  Where a machine lacks one,
    kernels emit vector expressions that LLVM turns into code for any CPU.

    Attributes:
        name: in manifests and in the tuner's database.
        lanes: 32-bit lanes of a register.
        registers: how many there are; of WebAssembly, as many as the machines below it have.
        mcpu: LLVM's name of the CPU.
        cpu_flags: what /proc/cpuinfo must list; they go into the manifest, and the run-time checks them.
        mattr: LLVM's names of what ``mcpu`` lacks.
        dot4: (accumulator, codes, activations, bits of a code) -> accumulator + the sum over the four bytes of each
            lane of codes (unsigned) * activations (signed), int32.
        signed4: (accumulator, bytes, bytes) -> the same of bytes that are both signed, where the machine multiplies no
            others: kernels subtract 128 from unsigned bytes, and from their zero points.
        dot2: (accumulator, pairs, pairs) -> accumulator + the sum over the two int16 of each lane of their products,
            int32.  Where there is one, convolutions keep weights as int16: ``dot4`` would widen them again and again.
        byte_floats: (int32 vector of 0 to 255) -> the same as float32.
        lookup16: (sixteen floats, index) -> ``values[index % 16]`` of each lane, float32.
        quick_lookup: ``lookup16`` is one instruction, and beats a mask and a conversion.
        count_ones: (int32 vector) -> the ones in each lane.
        ones_of_bytes: (int32 vector) -> the ones in each byte, as bytes of a vector of the same type.
        squeeze: (int32 vector of 16, uint16) -> the elements whose bit is set, one after another, then zeros.
        squeeze_bytes: the same of 64 int8 and a uint64.
        spread: (64 int8, uint64, 64 int8) -> the elements, from the first on, where a bit is set, and those of the
            third where it is not.
        spread_eight: the same of eight bytes: (uint64, uint64 of eight bits, uint64).
        mmla: (accumulator, bytes, bytes) -> accumulator + the products of 2 x 8 by 8 x 2 signed bytes, in a
            register of four int32: first those of the first row.
        ahead_bytes: how far ahead codes are prefetched where several tokens read them slowly; 0 where they are not.
        matrix_unit: ``amx`` where registers hold matrices of int8 or bfloat16.
        archs: of GPUs, what the bundle has machine code for, as nvcc names them ("sm_90"), the least first.
    """

    name: str
    lanes: int
    mcpu: str = "generic"
    cpu_flags: tuple[str, ...] = ()
    mattr: tuple[str, ...] = ()
    registers: int = 16
    dot4: Callable[[Any, Any, Any, int], Any] | None = None
    signed4: Callable[[Any, Any, Any], Any] | None = None
    dot2: Callable[[Any, Any, Any], Any] | None = None
    byte_floats: Callable[[Any], Any] | None = None
    lookup16: Callable[[Sequence[float], Any], Any] | None = None
    quick_lookup: bool = False
    count_ones: Callable[[Any], Any] | None = None
    ones_of_bytes: Callable[[Any], Any] | None = None
    squeeze: Callable[[Any, Any], Any] | None = None
    squeeze_bytes: Callable[[Any, Any], Any] | None = None
    spread: Callable[[Any, Any, Any], Any] | None = None
    spread_eight: Callable[[Any, Any, Any], Any] | None = None
    mmla: Callable[[Any, Any, Any], Any] | None = None
    ahead_bytes: int = 0
    matrix_unit: str = ""
    archs: tuple[str, ...] = ()
