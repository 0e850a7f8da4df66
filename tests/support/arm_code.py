"""Read the code of kernels for ARM: their innermost loops, as LLVM writes them."""

from __future__ import annotations

import re
from collections import Counter

import emulated_arm
import tvm

from compressor.codegen.isa import Isa


def innermost_loops(func: tvm.tirx.PrimFunc, isa: Isa) -> list[list[str]]:
    """Return the instructions of each loop that has no other within, the branch back last."""
    return loops_of(emulated_arm.compiled(func, isa).mod.inspect_source("asm"))


def loops_of(assembly: str) -> list[list[str]]:
    """Return the parts between a label and a branch back to it, without labels between."""
    found: list[list[str]] = []
    label, body = "", []
    for line in assembly.splitlines():
        if match := re.match(r"(\.LBB\w+):", line):
            label, body = match[1], []
        elif re.match(r"\t[a-z]", line):
            body.append(line.split("//")[0].strip())
            if label and re.search(rf"[\s,]{re.escape(label)}$", body[-1]):
                found.append(list(body))
    return found


def counts(loop: list[str]) -> Counter[str]:
    """Count a loop's instructions by name."""
    return Counter(line.split()[0] for line in loop)
