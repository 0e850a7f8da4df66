"""Model the inner loops of kernels for ARM with llvm-mca: multiply-accumulates a cycle on cores that are not here.

    python benchmarks/arm_mca.py [FILE.md]

FILE.md is benchmarks/results/arm_mca.md where it is not given.  Needs Debian's llvm-19.  The model has the core's pipes
and latencies, and no caches: every load hits.  The bound is what the same model gives for the products alone, with as
many sums as hide their latency.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from arm_code import counts, innermost_loops
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.kernel import Epilogue, convolution
from compressor.codegen.kernels.linear import digits, packed
from compressor.codegen.neon import DOTPROD, I8MM, NEON
from compressor.formats.format import Format

RESULTS = Path(__file__).parent / "results" / "arm_mca.md"
CORES = {"neon": ("cortex-a53", "cortex-a72"), "dotprod": ("cortex-a55", "cortex-a76", "neoverse-n1", "neoverse-v2"),
         "i8mm": ("neoverse-v2",)}  # fmt: skip
PRODUCTS = {"sdot": 16, "usdot": 16, "sudot": 16, "smmla": 32, "smull": 8, "smull2": 8, "fmla": 4}
"""Multiply-accumulates of an instruction."""
_ROUNDS = 300
_SIZE = 1024


@dataclass(frozen=True)
class Loop:
    """An inner loop of a kernel.

    Attributes:
        family: of kernels.
        tokens: that one round serves; ``prompt`` beyond INDEPENDENT_ROWS.
        product: the instruction that multiplies.
        digits: numbers that an activation is: products of each count once.
    """

    family: str
    tokens: str
    isa: Isa
    product: str
    lines: list[str]
    digits: int = 1

    @property
    def products(self) -> int:
        """Multiply-accumulates of a round; of integers, without the floats that scale their sums."""
        found = {name: count * PRODUCTS[name] for name, count in counts(self.lines).items() if name in PRODUCTS}
        return (sum(found.values()) - (found.get("fmla", 0) if len(found) > 1 else 0)) // self.digits


def modelled(lines: list[str], isa: Isa, core: str) -> float:
    """Return the cycles of a round of a loop on a core, many rounds one after the other."""
    command = ["llvm-mca-19", "-mtriple=aarch64", f"-mcpu={core}", f"-iterations={_ROUNDS}"]
    command += [f"-mattr={','.join(isa.mattr)}", "-instruction-info=0", "-resource-pressure=0"]
    text = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    found = re.search(r"Total Cycles:\s+(\d+)", text)
    assert found is not None, text
    return int(found[1]) / _ROUNDS


def bound(isa: Isa, product: str, core: str) -> float:
    """Return the multiply-accumulates a cycle of the products alone."""
    if product == "smull":  # with what adds its products to sums of 32 bits
        each = ["smull v{0}.8h, v30.8b, v31.8b", "smull2 v{1}.8h, v30.16b, v31.16b", "addp v{0}.8h, v{0}.8h, v{1}.8h"]
        each.append("sadalp v{2}.4s, v{0}.8h")
        lines = [line.format(2 * n, 2 * n + 1, 16 + n) for line in each for n in range(7)]  # v30 and v31 are read
        return 7 * 16 / modelled(lines, isa, core)
    kinds = {"fmla": "fmla v{}.4s, v30.4s, v31.s[0]", "smmla": "smmla v{}.4s, v30.16b, v31.16b"}
    line = kinds.get(product, f"{product} v{{}}.4s, v30.16b, v31.4b[0]")
    return 24 * PRODUCTS[product] / modelled([line.format(n) for n in range(24)], isa, core)


def plain(isa: Isa) -> Loop:
    """Return what LLVM makes of a product of signed bytes as one writes it down."""

    @T.prim_func(s_tir=True, private=True)
    def kernel(a_: T.handle, b_: T.handle, c_: T.handle) -> None:
        a = T.match_buffer(a_, (_SIZE,), "int8")
        b = T.match_buffer(b_, (_SIZE, _SIZE), "int8")
        c = T.match_buffer(c_, (_SIZE,), "int32")
        for i in range(_SIZE):
            c[i] = 0
            for k in range(_SIZE):
                c[i] = c[i] + T.Cast("int32", a[k]) * T.Cast("int32", b[i, k])

    loops = innermost_loops(kernel, isa)
    return Loop("plain loop", "1", isa, "", max(loops, key=len))


def linear(name: str, isa: Isa) -> list[Loop]:
    """Return the loops of a packed linear: one token, few, and a prompt."""
    fmt, tiles = Format.parse(name), _SIZE // 16
    gemv = packed.gemv_space(tiles, fmt, isa)[0]
    schedule = packed.gemm_space(tiles, gemv.gemv_tiles, fmt, isa)[0]
    loops = innermost_loops(packed.packed_linear(_SIZE, _SIZE, fmt, False, isa, schedule), isa)
    found = [Loop(name, "", isa, _product(loop), loop, 1 + digits.reads(fmt, isa)) for loop in loops if _product(loop)]
    found = [loop for loop in found if loop.products >= 128 and not counts(loop.lines)["frinti"]]  # which rounds
    labels = ["1", *["few"] * (len(found) - 2), "prompt"]
    return [replace(one, tokens=label) for label, one in zip(labels, found, strict=True)]


def images(name: str, isa: Isa) -> list[Loop]:
    """Return the inner loop of a convolution of 3 x 3 pixels."""
    geometry = Geometry((28, 28), 64, (3, 3), (1, 1), (1, 1), (1, 1))
    kernel = convolution(64, geometry, Format.parse(name), True, False, Epilogue(), isa)
    loops = [loop for loop in innermost_loops(kernel, isa) if _product(loop)]
    best = max(loops, key=lambda loop: sum(counts(loop)[name] for name in PRODUCTS))
    return [Loop(f"convolution {name}", "3x3", isa, _product(best), best)]


def _product(loop: list[str]) -> str:
    return max((name for name in PRODUCTS if name in counts(loop)), key=lambda name: counts(loop)[name], default="")


def table() -> str:
    """Model every loop, and format the results as Markdown."""
    rows = []
    for isa in (NEON, DOTPROD, I8MM):
        of_plain = plain(isa)
        loops = [loop for name in ("W8A8", "W4A8_G128", "W4A8_G32", "W4A16_G128") for loop in linear(name, isa)]
        loops += images("W8A8_STATIC", isa)
        for core in CORES[isa.name]:
            macs = _plain_products(of_plain) / modelled(of_plain.lines, isa, core)
            for loop in loops:
                most = bound(isa, loop.product, core) / loop.digits
                rate, product = loop.products / modelled(loop.lines, isa, core), "2 " * (loop.digits - 1) + loop.product
                rows.append((isa.name, core, loop.family, loop.tokens, product, macs, rate, most, rate / most))
    lines = [
        f"| {level} | {core} | {family} | {tokens} | {product} | {macs:.2f} | {rate:.2f} | {most:.2f} | {part:.0%} |"
        for level, core, family, tokens, product, macs, rate, most, part in rows
    ]
    return _HEADING + "\n".join(lines) + "\n"


def _plain_products(loop: Loop) -> int:
    """Return the products of a round of the plain loop: one where LLVM left it scalar."""
    found = counts(loop.lines)
    vectors = sum(found[name] * 4 for name in ("smlal", "smlal2", "mla", "mul"))
    return loop.products + vectors or found["madd"] + found["smaddl"]


_HEADING = """\
# Inner loops for ARM, modelled

Made by `python benchmarks/arm_mca.py`: llvm-mca 19 on what LLVM writes for our kernels; evidence: modelled. Rates are
multiply-accumulates a cycle of a core. `plain` is what LLVM makes of a product as one writes it down, `bound` what the
same model gives for the products alone (of `smull`, with what adds them up), half of it where an activation is two
digits (`2 sdot`, [decision 0150](../../docs/decisions/0150-digits.md)). Caches are not modelled, every load hits:
one token waits for memory on most machines. Loops end with their group where LLVM unrolled it (groups of 32 columns),
so scales are part of them; elsewhere what follows a group is not. Weights are 1024x1024, convolutions have 64 channels.

| level | core | kernel | tokens | product | plain | ours | bound | of it |
|---|---|---|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    path.write_text(table())
    print(path.read_text())
