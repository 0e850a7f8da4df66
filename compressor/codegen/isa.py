"""Describe instruction sets as kernels see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """An instruction set as the kernels see it."""

    name: str
    lanes: int  # 32-bit lanes of a register
    vnni: bool  # has vpdpbusd
    vpopcnt: bool  # has vpopcntd
    cpu_flags: tuple[str, ...]  # what /proc/cpuinfo must list, of x86
    mcpu: str
    tiles: bool = False  # has AMX: registers that hold matrices of int8 or bfloat16
    mattr: tuple[str, ...] = ()  # LLVM's names of what ``mcpu`` lacks
