"""One token on weights that come from memory: inputs that are skipped against the dense kernel of the same format.

    python benchmarks/activation_sparsity.py [--size 4096] [--turns 9] [--markdown FILE]

One thread.  Every kernel goes through copies of its weight that together exceed the caches; kernels take turns, and a
figure is the median of all calls of all turns.  The dense kernel has the fastest of its schedules.  The bound of a
speed-up is that of bytes: those that the dense kernel reads over those that are left, thresholds and scales included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ["TVM_NUM_THREADS"] = "1"

import numpy as np
import torch
import tvm
from torch import Tensor

from compressor.codegen.kernels.linear import packed
from compressor.codegen.kernels.skipping.linear import skipping_linear
from compressor.codegen.targets.x86 import X86
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, pack, skip_inputs

TOKENS = 128
SHARES = (0.0, 0.3, 0.4, 0.5, 0.7, 0.9)
COPIES_BYTES = 200_000_000


def main() -> None:
    """Measure both formats and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = [
        "# Inputs that are skipped, one token, one thread",
        "",
        f"`python benchmarks/activation_sparsity.py`: {options.size} x {options.size} from memory, {cpu()}, kernels",
        f"for {X86().resolve().name}; medians of {options.turns} turns, in brackets the lower and upper quartile; load",
        f"average before {load:.1f}. Bound: bytes of the dense weight over bytes that are left.",
        "",
        "| format | skipped | microseconds | times as fast as dense | bound | of the bound |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("W8A16", "W4A16_G128"):
        lines += rows(name, options.size, options.turns)
    lines += ["", f"{TOKENS} tokens, whose small inputs are multiplied as zero; processor time, medians.", ""]
    lines += ["| format | milliseconds | times as fast as dense |", "|---|---|---|"]
    for name in ("W8A16", "W4A16_G128"):
        lines += prompt_rows(name, options.size, options.turns)
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def rows(name: str, size: int, turns: int) -> Iterable[str]:
    """Yield a format's rows of the table."""
    fmt, rng, weight = Format.parse(name), torch.Generator().manual_seed(1), random_weight(name, size)
    x, isa = torch.randn(1, 1, size, generator=rng), X86().resolve()
    tried = {s: build(packed.packed_linear(size, size, fmt, False, isa, s)) for s in packed.gemv_space(size // 16, fmt)}
    calls = {s: caller(kernel, weight, x) for s, kernel in tried.items()}
    best = min(calls, key=lambda s: statistics.median(t for _ in range(3) for t in calls[s]()))
    skipping = build(skipping_linear([size], size, Format.parse(f"{name}_SKIP"), False, isa))
    every = {-1.0: calls[best]}
    for share in SHARES:
        limit = float(x.abs().flatten().sort().values[round(share * size)]) if share else 0.0
        every[share] = caller(skipping, skip_inputs(weight, torch.full((size,), limit)), x)
    found: dict[float, list[float]] = {share: [] for share in every}
    for _ in range(turns):
        for share, call in every.items():
            found[share] += call()
    dense = statistics.median(found[-1.0])
    for share, seconds in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        times = f"{middle * 1e6:.0f} ({low * 1e6:.0f}-{high * 1e6:.0f})"
        if share < 0:
            yield f"| {name} | dense | {times} | 1.00 | | |"
            continue
        left = weight.nbytes - share * weight.parts["codes"].numel() * 4 + 4 * size
        bound, ratio = weight.nbytes / left, dense / middle
        yield f"| {name}_SKIP | {share:.0%} | {times} | {ratio:.2f} | {bound:.2f} | {ratio / bound:.0%} |"


def prompt_rows(name: str, size: int, turns: int) -> Iterable[str]:
    """Yield a format's rows of the table of prompts: the fastest dense schedule, and the layout that skips."""
    fmt, isa, weight = Format.parse(name), X86().resolve(), random_weight(name, size)
    x = tvm.runtime.tensor(np.random.default_rng(0).standard_normal((1, TOKENS, size), np.float32))
    y = tvm.runtime.tensor(np.zeros((1, TOKENS, size), np.float32))
    dense = [packed.packed_linear(size, size, fmt, False, isa, s) for s in packed.gemm_space(size // 16, 4, fmt, isa)]
    skipping = skipping_linear([size], size, Format.parse(f"{name}_SKIP"), False, isa)
    every = [(build(func), weight) for func in dense] + [(build(skipping), skip_inputs(weight, torch.zeros(size)))]
    operands = [[tvm.runtime.tensor(part.numpy()) for part in one.parts.values()] for _, one in every]
    found: list[list[float]] = [[] for _ in every]
    for _ in range(turns):
        for seconds, (kernel, _), parts in zip(found, every, operands, strict=True):
            begin = time.thread_time()
            kernel(x, *parts, y)
            seconds.append(time.thread_time() - begin)
    *plain, skipped = map(statistics.median, found)
    yield f"| {name} | {min(plain) * 1e3:.1f} | 1.00 |"
    yield f"| {name}_SKIP | {skipped * 1e3:.1f} | {min(plain) / skipped:.2f} |"


def random_weight(name: str, size: int) -> PackedWeight:
    """Pack random codes with random scales, the same in every run."""
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(0)
    codes = torch.randint(fmt.levels, (size, size), generator=rng, dtype=torch.uint8)
    return pack(codes, torch.rand(size, fmt.groups(size), generator=rng) + 0.1, None, fmt)


def build(func: tvm.tirx.PrimFunc) -> tvm.runtime.Module:
    """Compile a kernel for this machine."""
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=X86().tvm_target(X86().resolve()))["kernel"]


def caller(kernel: tvm.runtime.Module, weight: PackedWeight, x: Tensor) -> Callable[[], list[float]]:
    """Make a function that calls the kernel once on each copy of the weight: the seconds of each call."""
    copies = [
        [tvm.runtime.tensor(part.numpy()) for part in weight.parts.values()]
        for _ in range(max(2, COPIES_BYTES // weight.nbytes))
    ]
    given, out = tvm.runtime.tensor(x.numpy()), tvm.runtime.tensor(np.zeros((1, 1, weight.shape[0]), np.float32))

    def call() -> list[float]:
        found = []
        for parts in copies:
            begin = time.perf_counter()
            kernel(given, *parts, out)
            found.append(time.perf_counter() - begin)
        return found

    return call


def cpu() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    main()
