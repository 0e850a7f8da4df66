"""Time of codes in two planes: of both, beside the format without planes, of the upper one alone, and what drafts gain.

    python benchmarks/planes.py [--threads 1] [--formats W8A8,W8A8_G128,W8A16] [--acceptance 0.9] [--seconds 3]

prints the rows of benchmarks/results/planes.md.  Kernels, clocks and weights are those of benchmarks/rows.py: weights
come from memory, all kernels of a shape take turns call by call, and one thread is timed by its CPU time.  The gain is
predicted (:func:`compressor_runtime.speculation.cost.forecast`) from the times measured here and an acceptance that was
measured elsewhere: a drafted token costs a read of the upper plane, k of them are verified by one call of k + 1 rows of
both planes, and a plain step is the format without planes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import tvm
from compressor_runtime import configure_threads
from compressor_runtime.speculation.cost import forecast
from rows import QUANTILE, clock_of, weights

from compressor.codegen.kernels.linear import packed
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.targets.x86 import X86
from compressor.formats.extras import TwoPlanes
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

SIDE = 4096
VERIFIED = (2, 3, 4, 5, 6, 7)
"""Rows of verifications: one more than was drafted."""


class Timed:
    """A kernel of a format, its weights, and what its calls took by their rows."""

    def __init__(self, fmt: Format, rows: tuple[int, ...]) -> None:
        isa, tiles, rng = X86().resolve(), SIDE // TILE_ROWS, np.random.default_rng(1)
        schedule = packed.gemm_space(tiles, packed.gemv_space(tiles, fmt, isa)[0].gemv_tiles, fmt, isa)[0]
        func = packed.packed_linear(SIDE, SIDE, fmt, False, isa, schedule).with_attr("global_symbol", "kernel")
        module = tvm.IRModule({"kernel": func})
        self.kernel = tvm.compile(module, X86().tvm_target(isa), tir_pipeline=PIPELINE)["kernel"]
        self.weights, self.bytes = weights(fmt, SIDE, SIDE), fmt.packed_bytes(SIDE, SIDE)
        self.x = {n: tvm.runtime.tensor(rng.standard_normal((1, n, SIDE), dtype=np.float32)) for n in rows}
        self.y = {n: tvm.runtime.tensor(np.zeros((1, n, SIDE), np.float32)) for n in rows}
        self.times: dict[int, list[float]] = {n: [] for n in rows}

    def turn(self, clock: Any) -> None:
        """Call the kernel once for each number of rows."""
        for n, times in self.times.items():
            weight, begin = next(self.weights), clock()
            self.kernel(self.x[n], *weight, self.y[n])
            times.append(clock() - begin)

    def seconds(self, rows: int) -> float:
        """Return the lower quartile."""
        return float(np.quantile(self.times[rows], QUANTILE))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", default="W8A8,W8A8_G128,W8A16")
    parser.add_argument("--acceptance", type=float, default=0.9)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    configure_threads(given.threads)
    print(f"{X86().resolve().name}, threads: {given.threads}, {SIDE}x{SIDE}, acceptance {given.acceptance:g}\n")
    print("| format | one row, µs | both planes | upper plane | GB/s of these |", end="")
    print("".join(f" v({n}) |" for n in VERIFIED) + " gain expected | tokens a draft |")
    for name in given.formats.split(","):
        plain = Format.parse(name)
        planes = plain.with_extra(TwoPlanes())
        whole, both, upper = kernels = (
            Timed(plain, (1,)), Timed(planes, (1, *VERIFIED)), Timed(planes.upper, (1,))
        )  # fmt: skip
        end = time.perf_counter() + given.seconds
        while time.perf_counter() < end:
            for one in kernels:
                one.turn(clock_of(given.threads))
        step = whole.seconds(1)
        best = forecast(given.acceptance, upper.seconds(1) / step, [both.seconds(n) / step for n in VERIFIED])
        cells = [f"{step * 1e6:.0f}", *(f"{one.seconds(1) / step:.2f}" for one in (both, upper))]
        cells.append(" ".join(f"{one.bytes / one.seconds(1) * 1e-9:.1f}" for one in kernels))
        cells += [*(f"{both.seconds(n) / step:.2f}" for n in VERIFIED), f"{best.speedup:.2f}", str(best.length)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
