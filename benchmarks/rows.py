"""Time of a few rows against one row, v(T): what verifying T drafted tokens costs in a packed linear.

    python benchmarks/rows.py [--threads 1] [--formats W8A8,W4A8_G128] [--seconds 2]

prints the rows of benchmarks/results/rows.md.  Weights rotate over copies of 128 MiB, so that they come from memory,
and numbers of rows take turns call by call, so that what disturbs one disturbs all.  One thread is timed by its CPU
time, which other processes add little to; several by the clock.  Schedules are the first of each space: nothing is
tuned.

The bound is that of products: T a weight, at the rate of the kernel that only multiplies (compressor/codegen/peaks.py),
over one row's time.  Where it is below 1, bytes are what binds, which are read once: the bound is 1.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tvm
from compressor_runtime import configure_threads

from compressor.codegen.kernels.linear import packed
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.peaks import measure_peaks
from compressor.codegen.targets.x86 import X86
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

FORMATS = "W8A8,W4A8_G128,W8A16,W4A16_G128"
SHAPES = ((4096, 4096), (2048, 5632))
ROWS = (1, 2, 4, 5, 8, 16, 32)
WORKING_SET_BYTES = 128 << 20
QUANTILE = 0.25


def weights(fmt: Format, rows: int, columns: int) -> Iterator[list[Any]]:
    """Yield random weights, copy after copy, for ever."""
    rng, copies = np.random.default_rng(0), []
    for _ in range(max(2, -(-WORKING_SET_BYTES // fmt.packed_bytes(rows, columns)))):
        parts = [
            rng.random(shape).astype(kind) if kind == "float16" else rng.integers(0, 100, shape).astype(kind)
            for kind, shape in fmt.parts(rows, columns).values()
        ]
        copies.append([tvm.runtime.tensor(part) for part in parts])
    return itertools.cycle(copies)


def clock_of(threads: int) -> Callable[[], float]:
    return time.thread_time if threads == 1 else time.perf_counter


def measure(fmt: Format, rows: int, columns: int, threads: int, seconds: float) -> dict[int, float]:
    """Return seconds of a call by its number of rows: the lower quartile."""
    isa = X86().resolve()
    tiles = -(-rows // TILE_ROWS)
    schedule = packed.gemm_space(tiles, packed.gemv_space(tiles, fmt, isa)[0].gemv_tiles, fmt, isa)[0]
    func = packed.packed_linear(rows, columns, fmt, False, isa, schedule).with_attr("global_symbol", "kernel")
    kernel = tvm.compile(tvm.IRModule({"kernel": func}), X86().tvm_target(isa), tir_pipeline=PIPELINE)["kernel"]
    rng, given = np.random.default_rng(1), weights(fmt, rows, columns)
    x = {n: tvm.runtime.tensor(rng.standard_normal((1, n, columns), dtype=np.float32)) for n in ROWS}
    y = {n: tvm.runtime.tensor(np.zeros((1, n, rows), np.float32)) for n in ROWS}
    clock = clock_of(threads)
    for n in ROWS:
        kernel(x[n], *next(given), y[n])
    times: dict[int, list[float]] = {n: [] for n in ROWS}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for n in ROWS:
            weight, begin = next(given), clock()
            kernel(x[n], *weight, y[n])
            times[n].append(clock() - begin)
    return {n: float(np.quantile(found, QUANTILE)) for n, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    peaks = measure_peaks(given.threads, clock_of(given.threads))
    configure_threads(given.threads)
    print(f"read {1e-9 / peaks['peak_read_byte']:.1f} GB/s, {1e-9 / peaks['peak_int8_op']:.0f} int8 Gop/s, ", end="")
    print(f"{1e-9 / peaks['peak_flop']:.0f} float Gop/s; {X86().resolve().name}, threads: {given.threads}\n")
    print("| format | shape | one row, µs | GB/s |" + "".join(f" v({n}) | bound |" for n in ROWS[1:]))
    for name, (rows, columns) in itertools.product(given.formats.split(","), SHAPES):
        fmt = Format.parse(name)
        found, size = measure(fmt, rows, columns, given.threads, given.seconds), fmt.packed_bytes(rows, columns)
        product = 2 * rows * columns * peaks["peak_int8_op" if fmt.integer_products else "peak_flop"]
        cells = "".join(f" {found[n] / found[1]:.2f} | {max(1.0, n * product / found[1]):.2f} |" for n in ROWS[1:])
        print(f"| {name} | {rows}x{columns} | {found[1] * 1e6:.0f} | {size / found[1] * 1e-9:.1f} |{cells}", flush=True)


if __name__ == "__main__":
    main()
