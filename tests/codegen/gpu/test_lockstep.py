"""CUDA on a CPU: barriers, shuffles, shared and device memory act as on a GPU, and errors in their use are found."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lockstep
import numpy as np
import pytest
import tvm
from lockstep.compile import ptxas_report
from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import barrier, warp_max, warp_sum
from compressor.codegen.kernels.linear.weights import parameter


def reversed_rows(threads: int, scope: str = "shared") -> tvm.tirx.PrimFunc:
    """Turn each row [threads] around through shared memory; its first warp's sum and maximum go to the row's end."""

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        d0 = T.int64()
        x = T.meta_var(parameter((d0, threads), "float32"))
        y = T.meta_var(parameter((d0, threads + 2), "float32"))
        with T.launch_thread("blockIdx.x", d0) as row, T.launch_thread("threadIdx.x", threads) as t:
            held = T.alloc_buffer((threads,), "float32", scope=scope)
            held[t] = x[row, t]
            barrier()
            y[row, t] = held[threads - 1 - t]
            if t < 32:
                total = T.alloc_buffer((2,), "float32", scope="local")
                total[0] = warp_sum(x[row, t])
                total[1] = warp_max(x[row, t])
                if t == 0:
                    y[row, threads] = total[0]
                    y[row, threads + 1] = total[1]

    return kernel


def check_reversed(kernel: Any, threads: int) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (3, threads)).astype(np.float32)
    got = lockstep.run(kernel, x, out=(3, threads + 2)).numpy()
    assert (got[:, :threads] == x[:, ::-1]).all()
    assert (got[:, threads] == x[:, :32].sum(1)).all() and (got[:, threads + 1] == x[:, :32].max(1)).all()


@pytest.mark.parametrize("scope", ["shared", "shared.dyn"])
def test_a_block_exchanges_its_rows(scope: str) -> None:
    check_reversed(lockstep.build(reversed_rows(96, scope)), 96)


def test_a_barrier_that_is_missing_is_seen() -> None:
    lockstep.start()
    with lockstep.changed("__syncthreads();", ""):
        kernel = lockstep.build(reversed_rows(64))
    with pytest.raises(Exception, match=r"a race in shared memory at byte .* with no barrier in between"):
        check_reversed(kernel, 64)


@pytest.mark.parametrize(
    ("new", "error"),
    [
        ("__syncthreads(); if (threadIdx.x < 40) __syncthreads();", "divergence: of 64 threads"),
        ("*(float2*)(_ptr + 1) = make_float2(0, 0); __syncthreads();", "misaligned"),
        ("__shared__ float other[4]; __syncthreads(); _ptr[-1] = other[0] = 1;", "outside device memory"),
    ],
)
def test_errors_of_a_launch(new: str, error: str) -> None:
    lockstep.start()
    with lockstep.changed("__syncthreads();", new):
        kernel = lockstep.build(reversed_rows(64))
    with pytest.raises(Exception, match=error):
        kernel(np.zeros((1, 64), np.float32), np.zeros((1, 66), np.float32))


def test_memory_of_the_host_and_too_much_of_it_are_refused() -> None:
    kernel = lockstep.build(reversed_rows(32))
    lockstep.start()
    held = tvm.runtime.empty((1 << 19,), "float32", tvm.cuda(0))
    lockstep.start(memory=1 << 20)  # less than is held
    with pytest.raises(Exception, match="out of device memory"):
        tvm.runtime.empty((1 << 20,), "float32", tvm.cuda(0))
    del held
    lockstep.start()
    fresh = tvm.runtime.empty((64,), "float32", tvm.cuda(0))
    assert np.isnan(fresh.numpy()).all()
    with pytest.raises(Exception, match="device"):
        kernel.executable["kernel"](*(tvm.runtime.tensor(np.zeros((1, n), np.float32)) for n in (32, 34)))


def test_a_graph_replays_what_a_stream_captured() -> None:
    kernel = lockstep.build(reversed_rows(32))
    driver, gpu = kernel.driver, tvm.cuda(0)
    x, y = tvm.runtime.tensor(np.ones((1, 32), np.float32), gpu), tvm.runtime.empty((1, 34), "float32", gpu)
    stream, graph, ready = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    driver.cudaStreamCreate(ctypes.byref(stream))
    gpu.set_raw_stream(stream.value)
    assert driver.cudaStreamBeginCapture(stream, 0) == 0
    kernel.executable["kernel"](x, y)
    assert driver.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8)) != 0
    assert driver.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    gpu.set_raw_stream(0)
    assert np.isnan(y.numpy()).all()
    assert driver.cudaGraphInstantiate(ctypes.byref(ready), graph, ctypes.c_uint64(0)) == 0
    for value in (1, 2):
        x.copyfrom(np.full((1, 32), value, np.float32))
        assert driver.cudaGraphLaunch(ready, stream) == 0
        assert (y.numpy()[0, :33] == [value] * 32 + [32 * value]).all()
    driver.cudaGetLastError()
    for made, end in ((ready, "cudaGraphExecDestroy"), (graph, "cudaGraphDestroy"), (stream, "cudaStreamDestroy")):
        getattr(driver, end)(made)


def test_threads_of_the_host_take_turns() -> None:
    kernel = lockstep.build(reversed_rows(64))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: check_reversed(kernel, 64), range(8)))


def test_what_g_plus_plus_compiles_is_cuda_too() -> None:
    report = ptxas_report(lockstep.build(reversed_rows(64)).text)
    assert "0 bytes spill stores" in report
