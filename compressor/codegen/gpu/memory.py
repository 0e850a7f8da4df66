"""Memory of a GPU: loads of what is read once, copies to shared memory, and registers."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import call

_POINTER = """
template <typename A>
__device__ inline A* compressor_choose(bool is_first, A* first, A* second) { return is_first ? first : second; }
"""

_LOADS = """
// Loads past the first-level cache, of what is read once.
__device__ inline void compressor_stream2(int* to, const int* from) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
#else
  to[0] = from[0], to[1] = from[1];
#endif
}
__device__ inline void compressor_stream4(int* to, const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
#else
  memcpy(to, from, 16);
#endif
}
__device__ inline int compressor_stream_word(const void* from) {
#ifdef __CUDA_ARCH__
  int word;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
#else
  return *(const int*)from;
#endif
}
__device__ inline int compressor_stream_pair(const void* from) {
#ifdef __CUDA_ARCH__
  unsigned short pair;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(pair) : "l"(from));
  return pair;
#else
  return *(const unsigned short*)from;
#endif
}
"""

_BYTES = """
// Bytes from any address: the words that hold them, shifted into place.
template <int Count>
__device__ inline void compressor_load_bytes(int* to, const unsigned char* from) {
  const unsigned offset = (unsigned)((unsigned long long)from % 4), shift = 8 * offset;
  const unsigned* words = (const unsigned*)(from - offset);
  unsigned long long both = words[0];
  for (int i = 0; i < Count / 4; ++i) {
    const unsigned next = i + 1 < Count / 4 || offset > 0 ? words[i + 1] : 0;  // no word without a byte of these
    both |= (unsigned long long)next << 32;
    to[i] = (int)(unsigned)(both >> shift);
    both >>= 32;
  }
}
__device__ inline int compressor_load_pair(const unsigned char* from) { return *(const unsigned short*)from; }
"""

_COPIES = """
// Copies of 16 bytes from global to shared memory, which go on beside what follows.
__device__ inline void compressor_copy16(void* to, const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
      : "memory");
#else
  memcpy(to, from, 16);
#endif
}
__device__ inline void compressor_copies_end() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int Newer>
__device__ inline void compressor_copies_wait() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" :: "n"(Newer) : "memory");
#endif
}
"""


def choose(is_first: Any, first: Any, second: Any) -> Any:
    """Return one of two pointers."""
    return call("compressor_choose", is_first, first, second, source=_POINTER, kind=first.ty)


def stream(to: Any, at: Any) -> None:
    """Load two int32 from a global address to a pointer."""
    T.evaluate(call("compressor_stream2", to, at, source=_LOADS))


def stream_four(to: Any, at: Any) -> None:
    """Load 16 bytes from a global address to a pointer to int32."""
    T.evaluate(call("compressor_stream4", to, at, source=_LOADS))


def stream_word(at: Any) -> Any:
    """Load 32 bits from a global address, as int32."""
    return call("compressor_stream_word", at, source=_LOADS, kind="int32")


def stream_pair(at: Any) -> Any:
    """Load 16 bits from a global address, as int32."""
    return call("compressor_stream_pair", at, source=_LOADS, kind="int32")


def load_bytes(to: Any, at: Any, count: int) -> None:
    """Load a multiple of four bytes from any global address to a pointer to int32."""
    T.evaluate(call(f"compressor_load_bytes<{count}>", to, at, source=_BYTES))


def load_pair(at: Any) -> Any:
    """Load two bytes from an even global address, as int32; they may be written by the same kernel."""
    return call("compressor_load_pair", at, source=_BYTES, kind="int32")


def copy16(to: Any, at: Any) -> None:
    """Begin to copy 16 bytes to shared memory."""
    T.evaluate(call("compressor_copy16", to, at, source=_COPIES))


def end_copies() -> None:
    """End a group of copies."""
    T.evaluate(call("compressor_copies_end", source=_COPIES))


def wait_copies(newer: int) -> None:
    """Wait for all groups of copies but the newest ``newer``."""
    T.evaluate(call(f"compressor_copies_wait<{newer}>", source=_COPIES))


def held(value: Any) -> Any:
    """Keep a value in a register; TVM's own variables cannot hold what is read from shared memory."""
    register = T.alloc_buffer((1,), str(value.ty.dtype), scope="local")
    T.buffer_store(register, value, [0])
    return register[0]


def shared(*buffers: tuple[tuple[int, ...], str]) -> list[Any]:
    """Allocate shared memory of a block, one buffer of 32-bit elements for each shape and type; once in a kernel.

    TVM's own search for places takes buffers whose first use is under a condition for missing.
    """
    sizes = [-(-prod(shape) // 4) * 4 for shape, _ in buffers]
    pool = T.alloc_buffer((sum(sizes),), "uint32", scope="shared.dyn")
    places = [0, *accumulate(sizes)]
    return [
        T.decl_buffer(shape, kind, data=pool.data, elem_offset=place, scope="shared.dyn")
        for (shape, kind), place in zip(buffers, places, strict=False)
    ]
