// Between the fake driver, the fibers and a compiled kernel: see __init__.py.
#pragma once
#include <cstddef>

struct lockstep_uint3 {
  unsigned x, y, z;
};

// One kernel of a compiled module, under the symbol lockstep_kernel_NAME.
struct lockstep_kernel {
  void (*call)(void** arguments);  // runs one thread
  unsigned count;                  // of parameters
  const unsigned* sizes;           // of each in bytes
  const unsigned char* pointers;   // whether each is a pointer
};

extern "C" {
extern lockstep_uint3 lockstep_thread, lockstep_block, lockstep_block_size, lockstep_grid_size;

// Wait for all threads of the block.
void lockstep_barrier();
// Leave up to 64 bytes for the other lanes of the warp, and return what all 32 left: lane i's begin at byte 64 * i.
// They stay until this lane's next exchange.  Lanes that the block does not have left zeros.
const unsigned char* lockstep_exchange(const void* mine, unsigned bytes);
// The lane of this thread in its warp.
unsigned lockstep_lane();
// The block's dynamic shared memory.
void* lockstep_dynamic();
// End the launch with an error.
[[noreturn]] void lockstep_fail(const char* reason);
}

constexpr std::size_t LOCKSTEP_DYNAMIC = 228 << 10;  // bytes of dynamic shared memory, at most

// For races.cpp: the thread that runs, and how many barriers its block, and each warp, have passed.
extern unsigned lockstep_current, lockstep_block_turn, lockstep_warp_turns[32];
// Look for races between these addresses, and in dynamic shared memory.
void lockstep_watch(const char* first, const char* last);

// Run all threads of one block; null, or the reason why it failed.
const char* lockstep_run_block(const lockstep_kernel& kernel, void** arguments, unsigned threads, bool is_descending);
// Fill dynamic shared memory with 0xFF, and tell whether a block wrote beyond its end.
void lockstep_fill_dynamic(std::size_t bytes);
bool lockstep_overran_dynamic(std::size_t bytes);
