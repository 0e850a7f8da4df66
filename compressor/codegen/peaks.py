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

_ROWS, _COLUMNS = 5, 2  # of independent sums, for two units of five cycles' latency; they fit sixteen registers
_CHAINS = _ROWS * _COLUMNS
_STEPS = 64  # whose operands fit a first-level cache
_LANES = 16
_CACHED_BYTES, _LARGE_BYTES = 512 << 10, 128 << 20  # of one thread: a part of its second-level cache; memory
_REPEATS, _SECONDS_EACH = 5, 0.01
# Operations a cycle of Intel's matrix units over those of two vector units of 512 bits (Optimization Reference Manual,
# table 20-1): what a machine with AMX reaches at most follows from what its vectors reach.
_TILES_INT8, _TILES_BFLOAT16 = 8, 16


def measure_peaks(threads: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Return seconds, the least that were measured, of all threads together.

    Args:
        clock: CPU time suits one thread beside other processes.
    Returns:
        ``peak_flop`` and ``peak_int8_op``: of an operation of a product, from registers alone (a multiplication and an
        addition are two); ``peak_read_byte``: of a byte read from memory; ``cached_read_byte``: from the second-level
        caches.
    """
    isa = X86().resolve()
    configure_threads(threads)
    tiles = (_TILES_BFLOAT16, _TILES_INT8) if isa.matrix_unit else (1, 1)
    flop, int8 = measure_vectors(isa, threads, clock)
    return {
        "peak_flop": flop / tiles[0],
        "peak_int8_op": int8 / tiles[1],
        "peak_read_byte": _reading(isa, _LARGE_BYTES, clock),
        "cached_read_byte": _reading(isa, _CACHED_BYTES * threads, clock),
    }


def measure_vectors(isa: Isa, threads: int, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Return the least seconds of an operation of a product in vectors: float32, and int8."""
    dot4 = isa.dot4
    assert dot4 is not None  # every instruction set of x86 has one
    flop = _products(isa, threads, _fma(isa.lanes), "float32", 2, clock)
    return flop, _products(isa, threads, lambda acc, a, b: dot4(acc, a, b, 4), "int32", 8, clock)


def _build(func: tvm.tirx.PrimFunc, isa: Isa) -> Any:
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=X86().tvm_target(isa))["kernel"]


def _least(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest repeat, after one to warm up."""
    run()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS_EACH * _REPEATS
    while len(times) < _REPEATS or time.perf_counter() < end:
        begin = clock()
        run()
        times.append(clock() - begin)
    return min(times)


def _fma(lanes: int) -> Callable[[Any, Any, Any], Any]:
    def step(acc: Any, a: Any, b: Any) -> Any:
        number = T.llvm_lookup_intrinsic_id(f"llvm.fma.v{lanes}f32")
        return T.call_llvm_pure_intrin(number, a, b, acc, dtype=f"float32x{lanes}")

    return step


def _products(
    isa: Isa,
    threads: int,
    step: Callable[[Any, Any, Any], Any],
    dtype: str,
    ops: int,
    clock: Callable[[], float],
) -> float:
    """Return the seconds of an operation, of which ``step`` does ``ops`` in each lane of a register."""
    kernel, rounds = _build(_chains(step, dtype, isa.lanes), isa), 1
    x = tvm.runtime.tensor(np.ones((_STEPS * _ROWS + _COLUMNS, isa.lanes), dtype))
    y = tvm.runtime.tensor(np.zeros((threads, isa.lanes), dtype))
    while True:  # until it takes long enough for the threads' start not to count
        counter = tvm.runtime.tensor(np.zeros(rounds, np.uint8))
        seconds = _least(lambda counter=counter: kernel(x, counter, y), clock)  # type: ignore[misc]
        if seconds > _SECONDS_EACH:
            return seconds / (threads * rounds * _STEPS * _CHAINS * ops * isa.lanes)
        rounds *= 4


def _chains(step: Callable[[Any, Any, Any], Any], dtype: str, lanes: int) -> tvm.tirx.PrimFunc:
    """TIR that multiplies pairs of x [vectors, lanes], ``len(counter)`` times in each thread; y [threads, lanes].

    Every step has vectors of its own: a product of the same two would be taken out of the loop, and only its addition
    timed, where ``step`` takes several instructions (AVX2's int8).
    """
    every = T.ramp(0, 1, lanes)

    def pair(acc: Any, x: Any, k: Any, i: Any) -> Any:
        return step(acc, x[k * _ROWS + i // _COLUMNS, every], x[_STEPS * _ROWS + i % _COLUMNS, every])

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, counter_: T.handle, y_: T.handle) -> None:
        rounds = T.int64()
        threads = T.int64()
        x = T.match_buffer(x_, (_STEPS * _ROWS + _COLUMNS, lanes), dtype)
        counter = T.match_buffer(counter_, (rounds,), "uint8")  # noqa: F841 (its length is what counts)
        y = T.match_buffer(y_, (threads, lanes), dtype)
        for t in T.parallel(threads):
            acc = T.alloc_buffer((_CHAINS, lanes), dtype)
            for i in T.unroll(_CHAINS):
                acc[i, every] = T.broadcast(T.Cast(dtype, 0), lanes)
            for _, k in T.grid(rounds, _STEPS):
                for i in T.unroll(_CHAINS):
                    acc[i, every] = pair(acc[i, every], x, k, i)
            y[t, every] = T.broadcast(T.Cast(dtype, 0), lanes)
            for i in T.unroll(_CHAINS):
                y[t, every] = y[t, every] + acc[i, every]

    return kernel


def _reading(isa: Isa, size_bytes: int, clock: Callable[[], float]) -> float:
    kernel = _build(read_bandwidth(), isa)
    words = np.ones((PARTS, max(1, size_bytes // (PARTS * 256)), 4, _LANES), np.int32)
    x, y = tvm.runtime.tensor(words), tvm.runtime.tensor(np.zeros((PARTS, _LANES), np.int32))
    return _least(lambda: kernel(x, y), clock) / words.nbytes
