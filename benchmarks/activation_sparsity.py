"""One token on weights that come from memory: inputs that are skipped against the dense kernel of the same format.

    python benchmarks/activation_sparsity.py [--size 4096] [--turns 9] [--markdown FILE]

    python benchmarks/activation_sparsity.py --rows

prints the times of two to eight tokens, which read the columns that any of them leaves: CPU time, lower quartiles.

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
FEW, FEW_SHARES = (1, 2, 3, 4, 8, 16), (0.0, 0.5, 0.7)


def main() -> None:
    """Measure both formats and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rows", action="store_true", help="two to eight tokens")
    options = parser.parse_args()
    if options.rows:
        print(f"| format | skipped | {' | '.join(f'{n}, µs' for n in FEW)} |\n{'|---' * (2 + len(FEW))}|")
        for name in ("W8A16", "W4A16_G128"):
            print("\n".join(few_rows(name, options.size, options.turns)), flush=True)
        return
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


def few_rows(name: str, size: int, turns: int) -> Iterable[str]:
    """Yield a format's rows of the table of few tokens: the default dense schedule, and the layout that skips."""
    fmt, isa, weight = Format.parse(name), X86().resolve(), random_weight(name, size)
    schedule = packed.gemm_space(size // 16, packed.gemv_space(size // 16, fmt)[0].gemv_tiles, fmt, isa)[0]
    dense = build(packed.packed_linear(size, size, fmt, False, isa, schedule))
    skipping = build(skipping_linear([size], size, Format.parse(f"{name}_SKIP"), False, isa))
    every, tokens = {-1.0: (dense, weight)}, {n: torch.randn(1, n, size) for n in FEW}
    for share in FEW_SHARES:
        limit = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.5 + share / 2))
        every[share] = skipping, skip_inputs(weight, limit.expand(size).clone())
    held = {share: copies_of(one) for share, (_, one) in every.items()}
    calls = {
        (share, n): caller_of(kernel, held[share], size, x, time.thread_time)
        for share, (kernel, _) in every.items()
        for n, x in tokens.items()
    }
    found: dict[tuple[float, int], list[float]] = {key: [] for key in calls}
    for _ in range(turns):
        for key, call in calls.items():
            found[key] += call()
    for share in every:
        cells = " | ".join(f"{float(np.quantile(found[share, n], 0.25)) * 1e6:.0f}" for n in FEW)
        yield f"| {name}{'_SKIP' if share >= 0 else ''} | {'dense' if share < 0 else f'{share:.0%}'} | {cells} |"


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
    return caller_of(kernel, copies_of(weight), weight.shape[0], x, time.perf_counter)


def copies_of(weight: PackedWeight) -> list[list[tvm.runtime.Tensor]]:
    """Copy a weight so often that its copies exceed the caches."""
    count = max(2, COPIES_BYTES // weight.nbytes)
    return [[tvm.runtime.tensor(part.numpy()) for part in weight.parts.values()] for _ in range(count)]


def caller_of(
    kernel: tvm.runtime.Module,
    copies: list[list[tvm.runtime.Tensor]],
    rows: int,
    x: Tensor,
    clock: Callable[[], float],
) -> Callable[[], list[float]]:
    """Make a function that calls the kernel once on each of some copies of a weight of so many rows."""
    given, out = tvm.runtime.tensor(x.numpy()), tvm.runtime.tensor(np.zeros((1, x.shape[1], rows), np.float32))

    def call() -> list[float]:
        found = []
        for parts in copies:
            begin = clock()
            kernel(given, *parts, out)
            found.append(clock() - begin)
        return found

    return call


def cpu() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    main()
