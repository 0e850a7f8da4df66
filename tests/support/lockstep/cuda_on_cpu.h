// CUDA C++ as the kernels use it, for g++: qualifiers, indices, barriers, shuffles, vectors and arithmetic.
//
// __CUDA_ARCH__ is not defined, so device functions with PTX take their other branch, which may call
// lockstep_exchange() and lockstep_lane() (lockstep.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "cuda_numbers.h"
#include "lockstep.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__  // a kernel may read after a barrier what another thread wrote
// All static shared memory of a module is one section, which the driver fills before each block.
#define __shared__ static __attribute__((section("lockstep_shared")))

#define threadIdx lockstep_thread
#define blockIdx lockstep_block
#define blockDim lockstep_block_size
#define gridDim lockstep_grid_size
constexpr int warpSize = 32;

#define CUDART_INF_F std::numeric_limits<float>::infinity()
#define CUDART_NAN_F std::numeric_limits<float>::quiet_NaN()
#define CUDART_INF std::numeric_limits<double>::infinity()
#define CUDART_NAN std::numeric_limits<double>::quiet_NaN()

inline void __syncthreads() { lockstep_barrier(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __trap() { lockstep_fail("__trap()"); }

inline void lockstep_full(unsigned mask) {
  if (mask != 0xFFFFFFFFu) lockstep_fail("a mask with fewer lanes than the warp has");
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  lockstep_full(mask);
  lockstep_exchange(nullptr, 0);
}

// The value of the lane that `source` names, among `width` lanes; the own value where that is outside them.
template <typename T, typename Source>
T lockstep_shuffle(unsigned mask, T value, int width, Source source) {
  lockstep_full(mask);
  const int lane = static_cast<int>(lockstep_lane()), first = lane / width * width, from = source(lane);
  const unsigned char* all = lockstep_exchange(&value, sizeof value);
  if (from < first || from >= first + width) return value;
  T result;
  std::memcpy(&result, all + 64 * from, sizeof result);
  return result;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return lockstep_shuffle(mask, value, width, [=](int own) { return own / width * width + lane % width; });
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step, int width = 32) {
  return lockstep_shuffle(mask, value, width, [=](int own) { return own ^ step; });
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32) {
  return lockstep_shuffle(mask, value, width, [=](int own) { return own + static_cast<int>(step); });
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32) {
  return lockstep_shuffle(mask, value, width, [=](int own) { return own - static_cast<int>(step); });
}

inline unsigned __ballot_sync(unsigned mask, int is_set) {
  lockstep_full(mask);
  const unsigned char one = is_set != 0, *all = lockstep_exchange(&one, 1);
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= unsigned(all[64 * lane]) << lane;
  return result;
}

inline unsigned __activemask() { return 0xFFFFFFFFu; }

// Threads are switched at barriers only, so a plain change is atomic.  These do not race with each other.
#define LOCKSTEP_ATOMIC __attribute__((no_sanitize("thread"), noinline))
template <typename T>
LOCKSTEP_ATOMIC T atomicAdd(T* at, std::type_identity_t<T> value) {
  const T before = *at;
  *at = before + value;
  return before;
}

template <typename T>
LOCKSTEP_ATOMIC T atomicMax(T* at, std::type_identity_t<T> value) {
  const T before = *at;
  if (value > before) *at = value;
  return before;
}

// Of a module: see driver.cpp.
extern "C" {
__attribute__((weak, visibility("hidden"))) extern char __start_lockstep_shared[];
__attribute__((weak, visibility("hidden"))) extern char __stop_lockstep_shared[];
inline __attribute__((used)) void lockstep_shared_bounds(char** first, char** last) {
  *first = __start_lockstep_shared, *last = __stop_lockstep_shared;
}
}

template <auto Kernel>
struct lockstep_describe;

template <typename... Types, void (*Kernel)(Types...)>
struct lockstep_describe<Kernel> {
  static constexpr unsigned sizes[sizeof...(Types) + 1] = {sizeof(Types)..., 0};
  static constexpr unsigned char pointers[sizeof...(Types) + 1] = {std::is_pointer_v<Types>..., 0};

  template <std::size_t... I>
  static void spread(void** arguments, std::index_sequence<I...>) {
    Kernel(*static_cast<Types*>(arguments[I])...);
  }
  static void call(void** arguments) { spread(arguments, std::index_sequence_for<Types...>{}); }
};

#define LOCKSTEP_KERNEL(name)                                                               \
  extern "C" __attribute__((used)) const lockstep_kernel lockstep_kernel_##name = {         \
      &lockstep_describe<&name>::call, sizeof(lockstep_describe<&name>::sizes) / 4 - 1,     \
      lockstep_describe<&name>::sizes, lockstep_describe<&name>::pointers};
