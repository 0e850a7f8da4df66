"""Device functions that TIR has no words for: C++ that TVM puts before the kernels which call them.

A function with PTX has two bodies: ``#ifdef __CUDA_ARCH__`` with the instruction, and ``#else`` what it does, for the
tests on a CPU (``tests/support/lockstep``).  There a function that reads other lanes' registers calls
``lockstep_exchange(&mine, sizeof mine)``, which returns what all 32 lanes left, lane i's from byte 64 * i.
"""

from __future__ import annotations

from hashlib import md5
from typing import Any

from tvm.script import tirx as T

WARP = 32  # lanes

_LANE_SUM = """
__device__ inline float compressor_lane_sum(float value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
"""

_LANE_MAX = """
__device__ inline float compressor_lane_max(float value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, value, step);
    value = other > value || other != other ? other : value;
  }
  return value;
}
"""

_WARP_BEST = """
__device__ inline int compressor_warp_best(float value, int place) {
  for (int step = 16; step > 0; step /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, value, step);
    int there = __shfl_xor_sync(0xffffffffu, place, step);
    bool above = other > value || (other != other && value == value);
    bool below = value > other || (value != value && other == other);
    if (there >= 0 && (place < 0 || above || (!below && there < place))) value = other, place = there;
  }
  return place;
}
"""


_ATOMIC_MAX = """
__device__ inline void compressor_atomic_max(int* at, int value) { atomicMax(at, value); }
"""

_WARP_BARRIER = """
__device__ inline void compressor_warp_barrier() { __syncwarp(); }
"""


def call(name: str, *arguments: Any, source: str, kind: Any = "void") -> Any:
    """Return a call of a device function that ``source`` defines."""
    guard = f"COMPRESSOR_{md5(source.encode(), usedforsecurity=False).hexdigest()}"  # TVM repeats it for each name
    source = f"#ifndef {guard}\n#define {guard}\n{source}\n#endif\n"
    return T.cuda.func_call(name, *arguments, source_code=source, return_type=kind)


def warp_sum(value: Any) -> Any:
    """Return the sum of a float32 over a warp's lanes, the same bits in each; all 32 lanes must call it."""
    return lane_sum(value, WARP)


def lane_sum(value: Any, lanes: int) -> Any:
    """Return the sum of a float32 over each ``lanes`` lanes in a row, a power of two; all of a warp must call it."""
    return call("compressor_lane_sum", value, T.int32(lanes), source=_LANE_SUM, kind="float32")


def lane_max(value: Any, lanes: int) -> Any:
    """Return the largest float32 of each ``lanes`` lanes, NaN if one is NaN; as :func:`lane_sum`."""
    return call("compressor_lane_max", value, T.int32(lanes), source=_LANE_MAX, kind="float32")


def warp_max(value: Any) -> Any:
    """Return the largest float32 of a warp's lanes, NaN if one is NaN; all 32 lanes must call it."""
    return lane_max(value, WARP)


def warp_best(value: Any, place: Any) -> Any:
    """Return the place (int32) of a warp's largest float32, NaN being above all and the first of equals the best.

    Lanes whose place is negative take no part, but must call it as well.
    """
    return call("compressor_warp_best", value, place, source=_WARP_BEST, kind="int32")


def atomic_max(at: Any, value: Any) -> Any:
    """Return a call that makes an int32 in shared or global memory at least as large as a value."""
    return call("compressor_atomic_max", at, value, source=_ATOMIC_MAX)


def barrier() -> Any:
    """Return a statement that waits for all threads of the block."""
    return T.evaluate(T.tvm_storage_sync("shared"))


def warp_barrier() -> Any:
    """Return a statement that waits for the warp's lanes, and lets each see what the others wrote before.

    Shuffles do not: a lane that writes what others read needs this in between.
    """
    return T.evaluate(call("compressor_warp_barrier", source=_WARP_BARRIER))
