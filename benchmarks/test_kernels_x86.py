"""Time of single kernels: the packed linear by format, shape, tokens and instruction set; attention; RMS norm.

    pip install 'compressor[bench]'
    pytest --dist=no benchmarks/test_kernels_x86.py --benchmark-json out.json -q
    python benchmarks/kernels_table.py out.json

The last line writes benchmarks/results/kernels_x86.md.  ``-k 'W4A8_G128 and 2048x2048'`` chooses some; ``--dist=no``
overrides the project's setting for pytest-xdist, beside which pytest-benchmark measures nothing.  The tests of the
project do not collect this file.  KERNEL_THREADS=1 in the environment sets the threads, which are the physical cores
otherwise; the machine should do nothing else meanwhile.

Schedules are the first of each kernel's space: nothing is tuned.  Operands rotate over copies that add up to 256 MiB,
more than processors cache, so that weights come from memory as in a model; the bandwidth that they are held against is
that of the kernel that only reads (compressor/codegen/kernels/probe.py), over as many bytes, before the first
benchmark.  Bytes are those that a kernel must read at least once.  Operations are those of the products, two for a
multiplication with its addition, and four for an element of a norm.  Both are counted from shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from compressor_runtime import available_cores, configure_threads

from compressor.codegen.isa import Isa
from compressor.codegen.kernels import dense as dense_linear
from compressor.codegen.kernels import norm, probe
from compressor.codegen.kernels.attention import cached as attention
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.targets.x86 import AMX, AVX2, AVX512_VNNI, X86
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

FORMATS = (
    "W4A8_G128", "W8A8", "W4A16_G128", "W2A8_G64", "W3A16_G128", "W6A8_G128", "FP4_E2M1_G32", "NVFP4", "FP6_E3M2_G128",
    "NF4_G64",
)  # fmt: skip
ON_EACH_ISA = ("W4A8_G128", "W8A8", "W4A16_G128", "NVFP4")
SHAPES = ((2048, 2048), (11264, 2048), (2048, 5632))  # rows and columns: of a Llama of 1.1 billion parameters
TOKENS = (1, 16, 128)
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 64  # of the same
WORKING_SET_BYTES = 256 << 20
MOST_COPIES = 1024  # more are of little use to arrays that small: calls alone take longer than reading them
SECONDS = 0.5
THREADS = int(os.environ.get("KERNEL_THREADS") or available_cores())


def best_isa() -> Isa | None:
    try:
        return X86().resolve()
    except UsageError:
        return None


BEST = best_isa()


def compiled(func: tvm.tirx.PrimFunc, isa: Isa | None) -> Any:
    """Compile one kernel for ``isa``; skip if this machine cannot execute it."""
    if isa is None or not X86().executes(isa):
        pytest.skip(f"this machine has no {isa.name if isa else 'instruction set that kernels are made for'}")
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    code = tvm.compile(module, target=X86().tvm_target(isa))["kernel"]
    configure_threads(THREADS)
    return code


@pytest.fixture(scope="session")
def read_bandwidth() -> float:
    """Measure bytes per second of the kernel that only reads: the best of four turns through pieces as large as a
    weight.

    A call over all of the bytes would take so long that on a shared machine something interrupts each.
    """
    kernel, pieces = compiled(probe.read_bandwidth(), BEST), 16
    words = np.ones((probe.PARTS, WORKING_SET_BYTES // pieces >> 14, 4, 16), "int32")
    copies = [tvm.runtime.tensor(words) for _ in range(pieces)]
    sums, seconds = tvm.runtime.tensor(np.zeros((probe.PARTS, 16), "int32")), []
    for piece in 5 * copies:
        begin = time.perf_counter()
        kernel(piece, sums)
        seconds.append(time.perf_counter() - begin)
    return words.nbytes / min(seconds[pieces:])


@pytest.fixture
def measure(benchmark: Any, read_bandwidth: float) -> Callable[..., None]:
    """Return ``measure(kernel, arrays, bytes_read, operations, facts)``, which records the time and derived figures for
    the table.
    """

    def run(kernel: Any, arrays: Sequence[Any], bytes_read: int, operations: int, facts: dict[str, Any]) -> None:
        if benchmark.disabled:  # --benchmark-disable: whether everything runs
            benchmark(kernel, *map(tvm.runtime.tensor, arrays))
            return
        count = max(2, min(MOST_COPIES, -(-WORKING_SET_BYTES // sum(a.nbytes for a in arrays))))
        copies = [tuple(tvm.runtime.tensor(a) for a in arrays) for _ in range(count)]
        turns = itertools.cycle(copies)
        once = []
        for _ in range(5):
            begin = time.perf_counter()
            kernel(*next(turns))
            once.append(time.perf_counter() - begin)
        rounds = max(20, min(1000, int(SECONDS / statistics.median(once))))
        benchmark.pedantic(kernel, setup=lambda: (next(turns), {}), rounds=rounds, warmup_rounds=2)
        outputs = copies[0][-1].numpy()
        assert np.isfinite(outputs).all() and outputs.any()  # other numbers might take another time
        benchmark.extra_info.update(facts, threads=THREADS, copies=count, bytes_read=bytes_read, operations=operations)
        seconds = benchmark.stats.stats.median
        benchmark.extra_info.update(
            gb_per_s=bytes_read / seconds / 1e9,
            read_bandwidth_gb_per_s=read_bandwidth / 1e9,
            bandwidth_fraction=bytes_read / seconds / read_bandwidth,
            gop_per_s=operations / seconds / 1e9,
        )

    return run


@functools.lru_cache(maxsize=2)
def packed_kernel(rows: int, columns: int, name: str, isa: Isa) -> tuple[Any, packed_linear.Schedule]:
    """Compile one kernel, which serves all numbers of tokens; that takes seconds."""
    fmt, tiles = Format.parse(name), -(-rows // TILE_ROWS)
    schedule = packed_linear.gemm_space(tiles, packed_linear.gemv_space(tiles, fmt, isa)[0].gemv_tiles, fmt, isa)[0]
    return compiled(packed_linear.packed_linear(rows, columns, fmt, False, isa, schedule), isa), schedule


@functools.lru_cache(maxsize=1)
def packed_parts(rows: int, columns: int, name: str) -> list[Any]:
    """Make the stored parts of a weight: any bits are codes of these formats; scales are ones and small numbers."""
    fmt, random = Format.parse(name), np.random.default_rng(0)
    arrays = []
    for part, (kind, shape) in fmt.parts(rows, columns).items():
        if part == "codes":
            arrays.append(random.integers(0, 1 << 32, shape, "uint32").view(kind))
        elif part == "scales" and kind == "uint8":  # NVFP4's: E4M3 from 0.5 to 1.9
            arrays.append(random.integers(0x30, 0x40, shape, kind))
        elif part == "scales":
            arrays.append(random.uniform(0.01, 0.02, shape).astype(kind))
        elif part == "tensor_scale":
            arrays.append(np.ones(shape, kind))
        else:
            raise NotImplementedError(f"{name}: {part}")
    return arrays


def linear_cases() -> list[Any]:
    """Yield all formats on the best instruction set, and some of them on each other one; tokens last, to compile
    once.
    """
    cases = [(name, *shape, BEST) for name in FORMATS for shape in SHAPES]
    others = [isa for isa in (AMX, AVX512_VNNI, AVX2) if isa != BEST and X86().executes(isa)]
    cases += [(name, *SHAPES[-1], isa) for isa in others for name in ON_EACH_ISA]
    return [
        pytest.param(*case, tokens, id=f"{name}-{rows}x{columns}-{isa.name if isa else 'none'}-{tokens}")
        for case in cases
        for name, rows, columns, isa in [case]
        for tokens in TOKENS
    ]


@pytest.mark.parametrize(("name", "rows", "columns", "isa", "tokens"), linear_cases())
def test_packed_linear(
    name: str, rows: int, columns: int, isa: Isa | None, tokens: int, measure: Callable[..., None]
) -> None:
    if isa is None:
        pytest.skip("this machine has no instruction set that kernels are made for")
    kernel, schedule = packed_kernel(rows, columns, name, isa)
    x = np.random.default_rng(1).standard_normal((1, tokens, columns), "float32")
    read = [x, *packed_parts(rows, columns, name)]
    arrays = [*read, np.zeros((1, tokens, rows), "float32")]
    facts = {"family": "packed linear", "format": name, "shape": f"{rows}x{columns}", "tokens": tokens}
    facts |= {"isa": isa.name, "schedule": dataclasses.asdict(schedule)}
    measure(kernel, arrays, sum(a.nbytes for a in read), 2 * tokens * rows * columns, facts)


@functools.lru_cache(maxsize=1)
def dense_kernel(rows: int, columns: int) -> tuple[Any, dense_linear.Schedule]:
    schedule = dense_linear.gemm_space(dense_linear.gemv_space()[0].gemv_rows)[0]
    return compiled(dense_linear.dense_linear(rows, columns, "float16", False, schedule), BEST), schedule


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=["x".join(map(str, shape)) for shape in SHAPES])
def test_dense_linear(rows: int, columns: int, tokens: int, measure: Callable[..., None]) -> None:
    kernel, schedule = dense_kernel(rows, columns)
    random = np.random.default_rng(0)
    weight = random.standard_normal((rows, columns), "float32").astype("float16")
    read = [random.standard_normal((1, tokens, columns), "float32"), weight]
    facts = {"family": "dense linear", "format": "float16", "shape": f"{rows}x{columns}", "tokens": tokens}
    facts |= {"isa": BEST.name, "schedule": dataclasses.asdict(schedule)}
    arrays = [*read, np.zeros((1, tokens, rows), "float32")]
    measure(kernel, arrays, sum(a.nbytes for a in read), 2 * tokens * rows * columns, facts)


@functools.lru_cache(maxsize=1)
def attention_kernel() -> Any:
    return compiled(attention.cached_attention(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, 0, 0.0, False), BEST)


@pytest.mark.parametrize(
    ("past", "new"),
    [(127, 1), (1023, 1), (0, 128), (0, 512)],
    ids=["decode-128", "decode-1024", "prompt-128", "prompt-512"],
)
def test_attention(past: int, new: int, measure: Callable[..., None]) -> None:
    """Time attention of a decoded token, which sees itself as well, or of a prompt, in which each token sees those
    before it.
    """
    kernel, random = attention_kernel(), np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, "float32")

    seen = sum(past + i + 1 for i in range(new))
    q, k, v = normal(1, HEADS, new, HEAD_DIM), *(normal(1, KV_HEADS, new, HEAD_DIM) for _ in range(2))
    caches = [normal(1, KV_HEADS, past + new, HEAD_DIM) for _ in range(2)]
    position, out = np.arange(past, past + new), np.zeros((1, new, HEADS, HEAD_DIM), "float32")
    bytes_read = q.nbytes + k.nbytes + v.nbytes + 2 * 4 * KV_HEADS * past * HEAD_DIM
    shape = f"{HEADS} heads, {KV_HEADS} of keys, of {HEAD_DIM}; {past} tokens before"
    facts = {"family": "attention", "format": "float32", "shape": shape, "tokens": new, "isa": BEST.name}
    measure(kernel, [q, k, v, *caches, position, out], bytes_read, 4 * HEADS * HEAD_DIM * seen, facts)


@functools.lru_cache(maxsize=1)
def norm_kernel(width: int) -> Any:
    return compiled(norm.norm(width, 1e-5, False, False), BEST)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm(tokens: int, measure: Callable[..., None]) -> None:
    """Time RMS norm; for one token the call itself is a large part of the time."""
    width, random = 2048, np.random.default_rng(0)
    read = [random.standard_normal(shape, "float32") for shape in ((1, tokens, width), (width,))]
    facts = {"family": "RMS norm", "format": "float32", "shape": str(width), "tokens": tokens, "isa": BEST.name}
    arrays = [*read, np.zeros((1, tokens, width), "float32")]
    measure(norm_kernel(width), arrays, sum(a.nbytes for a in read), 4 * tokens * width, facts)
