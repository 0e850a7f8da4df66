// Races in shared memory: of each byte, who wrote and who read it last, and between which barriers.
//
// Kernels are compiled with g++'s -fsanitize=thread, and these are the functions that it calls before each access; its
// own library, which knows nothing of fibers, is not linked.  Two threads that access a byte, one of them to write,
// need a barrier of the block in between, or of their warp (__syncwarp) where they are of one.  Shuffles, votes and
// products of a warp are no such barriers: they do not order memory.
#include <cstdint>
#include <cstdio>

#include "lockstep.h"

namespace {

// An access in 64 bits: barriers of the block (32), of the warp (20), others that have read it too (2), thread (10).
using Access = std::uint64_t;
constexpr Access LANES = 1 << 10, WARPS = 2 << 10;  // others of the thread's warp, or of others

struct Byte {
  Access write, read;
};

constexpr std::size_t STATIC = 48 << 10;
Byte dynamic_bytes[LOCKSTEP_DYNAMIC], static_bytes[STATIC];
std::uintptr_t dynamic_first, static_first, static_size;

unsigned thread(Access a) { return a & 1023; }
bool same_block_turn(Access a, Access b) { return a >> 32 == b >> 32; }
bool same_warp(Access a, Access b) { return thread(a) / 32 == thread(b) / 32; }
bool same_warp_turn(Access a, Access b) { return same_warp(a, b) && a >> 12 == b >> 12; }

// Of two accesses between the same barriers of the block.
bool is_race(Access a, Access b) { return thread(a) != thread(b) && (!same_warp(a, b) || same_warp_turn(a, b)); }

[[noreturn]] void fail(Access before, bool was_write, bool is_write, std::size_t place) {
  char text[160];
  std::snprintf(text, sizeof text,
                "a race in shared memory at byte %zu: thread %u %s it, and another one %s it with no barrier in between",
                place, thread(before), was_write ? "writes" : "reads", is_write ? "writes" : "reads");
  lockstep_fail(text);
}

void visit(Byte& byte, Access now, bool is_write, std::size_t place) {
  if (same_block_turn(byte.write, now) && is_race(byte.write, now)) fail(byte.write, true, is_write, place);
  const Access read = byte.read;
  if (!same_block_turn(read, now)) {
    (is_write ? byte.write : byte.read) = now;
  } else if (is_write) {
    if ((read & WARPS) || is_race(read, now) || ((read & LANES) && same_warp_turn(read, now)))
      fail(read, false, true, place);
    byte.write = now;
  } else {
    Access others = read & WARPS;
    if (!same_warp(read, now)) others |= WARPS;
    if (same_warp_turn(read, now) && (thread(read) != thread(now) || (read & LANES))) others |= LANES;
    byte.read = now | others;
  }
}

void access(const void* address, std::size_t count, bool is_write) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const bool is_dynamic = at - dynamic_first < LOCKSTEP_DYNAMIC;
  if (!is_dynamic && at - static_first >= static_size) return;
  const std::size_t place = at - (is_dynamic ? dynamic_first : static_first);
  Byte* bytes = (is_dynamic ? dynamic_bytes : static_bytes) + place;
  const Access warp_turn = lockstep_warp_turns[lockstep_current / 32] & 0xFFFFF;
  const Access now = Access(lockstep_block_turn) << 32 | warp_turn << 12 | lockstep_current;
  for (std::size_t i = 0; i < count; ++i) visit(bytes[i], now, is_write, place + i);
}

}  // namespace

void lockstep_watch(const char* first, const char* last) {
  dynamic_first = reinterpret_cast<std::uintptr_t>(lockstep_dynamic());
  static_first = reinterpret_cast<std::uintptr_t>(first);
  static_size = std::size_t(last - first) < STATIC ? last - first : STATIC;
}

#define LOCKSTEP_ACCESS(size)                                                            \
  void __tsan_read##size(void* at) { access(at, size, false); }                          \
  void __tsan_write##size(void* at) { access(at, size, true); }                          \
  void __tsan_unaligned_read##size(void* at) { access(at, size, false); }                \
  void __tsan_unaligned_write##size(void* at) { access(at, size, true); }                \
  void __tsan_volatile_read##size(void* at) { access(at, size, false); }                 \
  void __tsan_volatile_write##size(void* at) { access(at, size, true); }

extern "C" {
LOCKSTEP_ACCESS(1)
LOCKSTEP_ACCESS(2)
LOCKSTEP_ACCESS(4)
LOCKSTEP_ACCESS(8)
LOCKSTEP_ACCESS(16)
void __tsan_read_range(void* at, std::size_t count) { access(at, count, false); }
void __tsan_write_range(void* at, std::size_t count) { access(at, count, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
