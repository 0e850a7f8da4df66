// Threads of a block as fibers of one thread of the CPU, each of which runs until it must wait for others.
//
// A fiber that has finished a thread goes on with the next one that nobody has begun, so a kernel without barriers is
// a plain loop.  A warp goes on as long as it can, so that warps are as far apart as barriers let them.  makecontext()
// makes a fiber's stack; switches are _setjmp and _longjmp, which need no system call.
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <vector>

#include "lockstep.h"

lockstep_uint3 lockstep_thread, lockstep_block, lockstep_block_size, lockstep_grid_size;
unsigned lockstep_current, lockstep_block_turn = 1, lockstep_warp_turns[32];

namespace {

constexpr std::size_t STACK = 256 << 10, ZONE = 1 << 10;

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool is_started = false;
  unsigned thread = 0;
};

struct Warp {
  unsigned char left[2][32][64];
  unsigned turn = 0;
  std::vector<Fiber*> waiting;
};

std::vector<Fiber*> idle;
std::deque<Fiber*> ready;
std::vector<Fiber*> at_barrier;
std::vector<Warp> warps;
Fiber* current;
jmp_buf scheduler;
const lockstep_kernel* kernel;
void** arguments;
unsigned threads, begun, finished;
bool is_descending;
char failure[512];
alignas(1024) unsigned char dynamic[LOCKSTEP_DYNAMIC + ZONE];

void show_thread() {
  const lockstep_uint3& size = lockstep_block_size;
  const unsigned t = lockstep_current = current->thread;
  lockstep_thread = {t % size.x, t / size.x % size.y, t / size.x / size.y};
}

void live();

Fiber* idle_fiber() {
  if (!idle.empty()) {
    Fiber* fiber = idle.back();
    idle.pop_back();
    return fiber;
  }
  Fiber* fiber = new Fiber;
  getcontext(&fiber->start);
  fiber->start.uc_stack.ss_sp =
      mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  fiber->start.uc_stack.ss_size = STACK;
  fiber->start.uc_link = nullptr;
  return fiber;
}

[[noreturn]] void go_on() {
  if (!ready.empty()) {
    current = ready.front();
    ready.pop_front();
    show_thread();
    _longjmp(current->at, 1);
  }
  if (begun < threads) {
    current = idle_fiber();
    if (current->is_started) _longjmp(current->at, 1);
    current->is_started = true;
    makecontext(&current->start, live, 0);
    setcontext(&current->start);
  }
  if (finished < threads) {
    unsigned in_warps = 0;
    for (const Warp& warp : warps) in_warps += warp.waiting.size();
    std::snprintf(failure, sizeof failure,
                  "divergence: of %u threads %u ended, %zu wait at a barrier of the block and %u at one of their warp",
                  threads, finished, at_barrier.size(), in_warps);
  }
  _longjmp(scheduler, 1);
}

void wait() {
  if (!_setjmp(current->at)) go_on();
}

void live() {
  for (;;) {
    while (begun < threads) {
      current->thread = is_descending ? threads - 1 - begun : begun;
      ++begun;
      show_thread();
      kernel->call(arguments);
      ++finished;
    }
    idle.push_back(current);
    wait();
  }
}

// A kernel that touches memory which is not there ends its launch, not the process.
class Guard {
 public:
  Guard() {
    static char stack[64 << 10];
    const stack_t own{stack, 0, sizeof stack};
    sigaltstack(&own, &before_);
    struct sigaction action {};
    action.sa_handler = [](int) {
      std::snprintf(failure, sizeof failure, "illegal or misaligned address, or division by 0 (thread %u)", current->thread);
      _longjmp(scheduler, 1);
    };
    action.sa_flags = SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &actions_[i]);
  }
  ~Guard() {
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &actions_[i], nullptr);
    sigaltstack(&before_, nullptr);
  }

 private:
  static constexpr int SIGNALS[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  stack_t before_;
  struct sigaction actions_[4];
};

unsigned lanes(unsigned warp) { return threads - warp * 32 < 32 ? threads - warp * 32 : 32; }

}  // namespace

void lockstep_barrier() {
  at_barrier.push_back(current);
  if (at_barrier.size() == threads) {
    ready.insert(ready.end(), at_barrier.begin(), at_barrier.end());
    at_barrier.clear();
    ++lockstep_block_turn;
  }
  wait();
}

unsigned lockstep_lane() { return current->thread % 32; }

const unsigned char* lockstep_exchange(const void* mine, unsigned bytes) {
  if (bytes > 64) lockstep_fail("an exchange of more than 64 bytes");
  Warp& warp = warps[current->thread / 32];
  auto& left = warp.left[warp.turn % 2];
  std::memcpy(left[lockstep_lane()], mine, bytes);
  warp.waiting.push_back(current);
  if (warp.waiting.size() == lanes(current->thread / 32)) {
    ready.insert(ready.begin(), warp.waiting.begin(), warp.waiting.end());
    warp.waiting.clear();
    ++warp.turn;
    if (bytes == 0) ++lockstep_warp_turns[current->thread / 32];
  }
  wait();
  return left[0];
}

void* lockstep_dynamic() { return dynamic; }

void lockstep_fail(const char* reason) {
  std::snprintf(failure, sizeof failure, "%s (thread %u)", reason, current->thread);
  _longjmp(scheduler, 1);
}

const char* lockstep_run_block(const lockstep_kernel& run, void** given, unsigned count, bool descending) {
  kernel = &run, arguments = given, threads = count, is_descending = descending;
  begun = finished = 0;
  ++lockstep_block_turn;
  failure[0] = 0;
  warps.resize((count + 31) / 32);
  for (Warp& warp : warps) std::memset(warp.left, 0, sizeof warp.left), warp.turn = 0, warp.waiting.clear();
  const Guard guard;
  if (!_setjmp(scheduler)) go_on();
  if (!failure[0]) return nullptr;
  // Fibers in the middle of a kernel cannot be used again; their stacks are few, and stay.
  ready.clear(), at_barrier.clear(), idle.clear();
  return failure;
}

void lockstep_fill_dynamic(std::size_t bytes) { std::memset(dynamic, 0xFF, bytes + ZONE); }

bool lockstep_overran_dynamic(std::size_t bytes) {
  for (std::size_t i = 0; i < ZONE; ++i)
    if (dynamic[bytes + i] != 0xFF) return true;
  return false;
}
