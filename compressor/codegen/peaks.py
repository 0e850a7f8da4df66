"""Measure what this machine computes and reads at most, by kernels that do nothing else: the limits of every other.

A product of PyTorch's, or of any library's, is slower than its instructions by an unknown factor, so that a limit that
was measured with it is exceeded now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from compressor_runtime.vm import configure_threads
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.probe import PARTS, read_bandwidth
from compressor.codegen.targets.x86 import X86

_CHAINS = 12  # independent sums, for two units of four cycles' latency; they fit sixteen registers
_STEPS = 1000
_LANES = 16
_CACHED_BYTES, _LARGE_BYTES = 512 << 10, 128 << 20  # of one thread: a part of its second-level cache; memory
_REPEATS, _SECONDS_EACH = 5, 0.01
# Operations a cycle of Intel's matrix units over those of two vector units of 512 bits (Optimization Reference Manual,
# table 20-1): what a machine with AMX reaches at most follows from what its vectors reach.
_TILES_INT8, _TILES_BFLOAT16 = 8, 16


def measure_peaks(threads: int) -> dict[str, float]:
    """Return seconds, the least that were measured, of all threads together.

    Returns:
        ``peak_flop`` and ``peak_int8_op``: of an operation of a product, from registers alone (a multiplication and an
        addition are two); ``peak_read_byte``: of a byte read from memory; ``cached_read_byte``: from the second-level
        caches.
    """
    isa = X86().resolve()
    configure_threads(threads)
    tiles = (_TILES_BFLOAT16, _TILES_INT8) if isa.matrix_unit else (1, 1)
    dot4 = isa.dot4
    assert dot4 is not None  # every instruction set of x86 has one
    flop = _products(isa, threads, _fma, "float32", 2 * _LANES)
    int8 = _products(isa, threads, lambda acc, a, b: dot4(acc, a, b, 4), "int32", 8 * _LANES)
    return {
        "peak_flop": flop / tiles[0],
        "peak_int8_op": int8 / tiles[1],
        "peak_read_byte": _reading(isa, _LARGE_BYTES),
        "cached_read_byte": _reading(isa, _CACHED_BYTES * threads),
    }


def _build(func: tvm.tirx.PrimFunc, isa: Isa) -> Any:
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=X86().tvm_target(isa))["kernel"]


def _least(run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest repeat, after one to warm up."""
    run()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS_EACH * _REPEATS
    while len(times) < _REPEATS or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _fma(acc: Any, a: Any, b: Any) -> Any:
    number = T.llvm_lookup_intrinsic_id(f"llvm.fma.v{_LANES}f32")
    return T.call_llvm_pure_intrin(number, a, b, acc, dtype=f"float32x{_LANES}")


def _products(isa: Isa, threads: int, step: Callable[[Any, Any, Any], Any], dtype: str, ops: int) -> float:
    kernel, rounds = _build(_chains(step, dtype), isa), 1
    x, y = np.ones((2, _LANES), dtype), tvm.runtime.tensor(np.zeros((threads, _LANES), dtype))
    inputs = tvm.runtime.tensor(x)
    while True:  # until it takes long enough for the threads' start not to count
        counter = tvm.runtime.tensor(np.zeros(rounds, np.uint8))
        seconds = _least(lambda counter=counter: kernel(inputs, counter, y))  # type: ignore[misc]
        if seconds > _SECONDS_EACH:
            return seconds / (threads * rounds * _STEPS * _CHAINS * ops)
        rounds *= 4


def _chains(step: Callable[[Any, Any, Any], Any], dtype: str) -> tvm.tirx.PrimFunc:
    """TIR that repeats ``step`` on x [2, 16], ``len(counter)`` thousand times, in each thread; y [threads, 16]."""
    every = T.ramp(0, 1, _LANES)

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, counter_: T.handle, y_: T.handle) -> None:
        rounds = T.int64()
        threads = T.int64()
        x = T.match_buffer(x_, (2, _LANES), dtype)
        counter = T.match_buffer(counter_, (rounds,), "uint8")  # noqa: F841 (its length is what counts)
        y = T.match_buffer(y_, (threads, _LANES), dtype)
        for t in T.parallel(threads):
            a = T.alloc_buffer((_LANES,), dtype)
            b = T.alloc_buffer((_LANES,), dtype)
            acc = T.alloc_buffer((_CHAINS, _LANES), dtype)
            a[every] = x[0, every]
            b[every] = x[1, every]
            for i in T.unroll(_CHAINS):
                acc[i, every] = T.broadcast(T.Cast(dtype, 0), _LANES)
            for _ in range(rounds * _STEPS):
                for i in T.unroll(_CHAINS):
                    acc[i, every] = step(acc[i, every], a[every], b[every])
            y[t, every] = T.broadcast(T.Cast(dtype, 0), _LANES)
            for i in T.unroll(_CHAINS):
                y[t, every] = y[t, every] + acc[i, every]

    return kernel


def _reading(isa: Isa, size_bytes: int) -> float:
    kernel = _build(read_bandwidth(), isa)
    words = np.ones((PARTS, max(1, size_bytes // (PARTS * 256)), 4, _LANES), np.int32)
    x, y = tvm.runtime.tensor(words), tvm.runtime.tensor(np.zeros((PARTS, _LANES), np.int32))
    return _least(lambda: kernel(x, y)) / words.nbytes
