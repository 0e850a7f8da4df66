"""AMX's eight registers of 16 rows of 64 bytes, and its instructions, one of which multiplies two registers.

Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

REGISTERS = 8
SIDE = 16
"""Rows of a register."""
ROW_BYTES = 64


def configure() -> None:
    """All eight registers are full: palette 1, 64 bytes in each of 16 rows."""
    words = [1, *[0] * 3, *[ROW_BYTES << 16 | ROW_BYTES] * 4, *[0] * 4, *[SIDE * 0x01010101] * 2, 0, 0]
    memory = T.alloc_buffer((16,), "int32")
    T.buffer_store(memory, T.Shuffle([T.int32(word) for word in words], list(range(16))), [T.ramp(0, 1, 16)])
    tile("ldtilecfg", T.address_of(memory[0]))


def release() -> None:
    """Give the registers back, so that nobody saves them."""
    tile("tilerelease")


def load(register: int, first: Any, stride_bytes: int) -> None:
    """Load a register: 16 rows, so far from one another."""
    tile("tileloadd64", T.uint8(register), T.address_of(first), T.int64(stride_bytes))


def tile(name: str, *arguments: Any) -> None:
    """Emit one of the instructions, which take register numbers as constants."""
    _emit(f"x86.{name}", *arguments)


def prefetch(element: Any, offset_bytes: Any, writes: bool = False, level: int = 1) -> None:
    """Ask a cache for the line so far behind an element; an address that is not there does no harm."""
    place = T.handle_add_byte_offset(T.address_of(element), offset_bytes)
    _emit("prefetch", place, T.int32(writes), T.int32(4 - level), T.int32(1))


def _emit(name: str, *arguments: Any) -> None:
    number = T.llvm_lookup_intrinsic_id(f"llvm.{name}")
    T.evaluate(T.call_llvm_intrin(number, *arguments, dtype="void"))
