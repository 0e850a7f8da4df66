"""Time linears of one token, or of a few, with tiles of a task side by side and a part of the weight apart.

    python benchmarks/tiles_apart.py [--threads 1] [--formats W8A8,W4A8_G128] [--rows 1] [--isa avx2] [--seconds 3]

prints the table of docs/decisions/0114-tiles-apart.md.  Kernels, clocks and weights are those of benchmarks/rows.py:
weights come from memory, all kernels of a shape take turns call by call, and one thread is timed by its CPU time.  Each
figure is a lower quartile, in parts of that of the kernel with four tiles side by side.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import numpy as np
import tvm
from compressor_runtime import configure_threads
from rows import QUANTILE, clock_of, weights

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import packed
from compressor.codegen.kernels.linear.weights import Apart, Weights
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.targets.x86 import ISAS, X86
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

SHAPES = ((8192, 2048), (4096, 4096), (2048, 8192))
KERNELS = ((4, "side by side"), (4, "apart"), (2, "side by side"), (2, "apart"), (1, "apart"))
"""Tiles of a task, and how they lie."""


def side_by_side(own: Weights, i: Any, n_tiles: int) -> tuple[Any, Apart]:
    weight, first = own.of_task(i, n_tiles)
    return weight, Apart(first, 1)


def compiled(fmt: Format, rows: int, columns: int, tiles: int, how: str, isa: Isa) -> Any:
    schedule = packed.gemm_space(rows // TILE_ROWS, tiles, fmt, isa)[0]
    with mock.patch.object(Weights, "apart", Weights.apart if how == "apart" else side_by_side):
        func = packed.packed_linear(rows, columns, fmt, False, isa, schedule).with_attr("global_symbol", "kernel")
    return tvm.compile(tvm.IRModule({"kernel": func}), X86().tvm_target(isa), tir_pipeline=PIPELINE)["kernel"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", default="W8A8,W8A8_P4,W4A8_G128,W8A16,W4A16_G128")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--isa", choices=sorted(ISAS), default=X86().resolve().name)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    configure_threads(given.threads)
    isa, clock, rng = ISAS[given.isa], clock_of(given.threads), np.random.default_rng(1)
    print("| format | shape | µs | " + " | ".join(f"{tiles} {how}" for tiles, how in KERNELS) + " | GB/s, best |")
    print("|---" * (len(KERNELS) + 4) + "|")
    for name in given.formats.split(","):
        fmt = Format.parse(name)
        for rows, columns in SHAPES:
            x = tvm.runtime.tensor(rng.standard_normal((1, given.rows, columns), dtype=np.float32))
            y = tvm.runtime.tensor(np.zeros((1, given.rows, rows), np.float32))
            copies, times = weights(fmt, rows, columns), {one: list[float]() for one in KERNELS}
            kernels = {one: compiled(fmt, rows, columns, *one, isa) for one in KERNELS}
            end = time.perf_counter() + given.seconds
            while time.perf_counter() < end:
                for one, kernel in kernels.items():
                    weight, begin = next(copies), clock()
                    kernel(x, *weight, y)
                    times[one].append(clock() - begin)
            found = [float(np.quantile(times[one], QUANTILE)) for one in KERNELS]
            cells = " | ".join(f"{each / found[0]:.2f}" for each in found)
            speed = fmt.packed_bytes(rows, columns) / min(found) * 1e-9
            print(f"| {name} | {rows}x{columns} | {found[0] * 1e6:.0f} | {cells} | {speed:.1f} |", flush=True)


if __name__ == "__main__":
    main()
