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

constexpr unsigned char LANES = 1, WARPS = 2;  // others of its warp, or of others, have read it as well

struct Access {
  std::uint32_t block, warp;  // how many barriers had been
  std::uint16_t thread;
};

struct Byte {
  Access write, read;
  unsigned char others;
};

constexpr std::size_t STATIC = 48 << 10;
Byte dynamic_bytes[LOCKSTEP_DYNAMIC], static_bytes[STATIC];
std::uintptr_t dynamic_first, static_first, static_size;

bool is_apart(const Access& a, const Access& b) {
  return a.block != b.block || a.thread == b.thread || (a.thread / 32 == b.thread / 32 && a.warp != b.warp);
}

[[noreturn]] void fail(const Access& before, bool was_write, bool is_write, std::size_t place) {
  char text[160];
  std::snprintf(text, sizeof text, "a race in shared memory at byte %zu: thread %u %s it, and another one %s it with no barrier in between",
                place, before.thread, was_write ? "writes" : "reads", is_write ? "writes" : "reads");
  lockstep_fail(text);
}

void visit(Byte& byte, const Access& now, bool is_write, std::size_t place) {
  if (!is_apart(byte.write, now)) fail(byte.write, true, is_write, place);
  const bool is_read_now = byte.read.block == now.block;
  if (is_write) {
    const bool same_turn = byte.read.thread / 32 == now.thread / 32 && byte.read.warp == now.warp;
    if (is_read_now && ((byte.others & WARPS) || !is_apart(byte.read, now) || (same_turn && (byte.others & LANES))))
      fail(byte.read, false, true, place);
    byte.write = now;
    return;
  }
  unsigned char others = is_read_now ? byte.others & WARPS : 0;
  if (is_read_now && byte.read.thread / 32 != now.thread / 32) others |= WARPS;
  if (is_read_now && byte.read.warp == now.warp && (byte.read.thread != now.thread || (byte.others & LANES))) others |= LANES;
  byte.read = now, byte.others = others;
}

void access(const void* address, std::size_t count, bool is_write) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const bool is_dynamic = at - dynamic_first < LOCKSTEP_DYNAMIC;
  if (!is_dynamic && at - static_first >= static_size) return;
  const std::size_t place = at - (is_dynamic ? dynamic_first : static_first);
  Byte* bytes = (is_dynamic ? dynamic_bytes : static_bytes) + place;
  const Access now{lockstep_block_turn, lockstep_warp_turns[lockstep_current / 32], std::uint16_t(lockstep_current)};
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
