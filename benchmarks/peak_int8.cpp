// How many int8 operations a second this CPU does at most: by AMX tiles, and by AVX512-VNNI, from registers only.
//
//     g++ -O2 -pthread -mavx512f -mavx512vnni -mamx-tile -mamx-int8 peak_int8.cpp -o peak_int8 && ./peak_int8 THREADS
//
// Prints JSON: operations a second of one thread while THREADS of them run; 0 where the CPU lacks the instructions.
// A multiplication and its addition are two operations.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static volatile int sink;

// Four accumulators, two tiles on either side: the shape of a product of matrices.
static double tiles() {
  constexpr int kRounds = 200000;
  alignas(64) char config[64] = {1};
  alignas(64) int rows[256] = {};
  for (int tile = 0; tile < 8; tile++) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = 16;
  }
  asm volatile("" : : "r"(config), "r"(rows) : "memory");  // GCC 12 says that loading reads eight bytes, drops the rest
  _tile_loadconfig(config);
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_loadd(4, rows, 64); _tile_loadd(5, rows, 64); _tile_loadd(6, rows, 64); _tile_loadd(7, rows, 64);
  double begin = now();
  for (int i = 0; i < kRounds; i++) {
    _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
  }
  double seconds = now() - begin;
  _tile_stored(0, rows, 64); sink = rows[0];
  _tile_stored(3, rows, 64); sink = rows[0];
  _tile_release();
  return kRounds * 4.0 * 2 * 16 * 16 * 64 / seconds;
}

// Sixteen accumulators hide the latency.  Each is a variable: an array is kept in memory, at half the speed.
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)

static double vnni() {
  constexpr int kRounds = 5000000, kAccumulators = 16;
  __m512i a = _mm512_set1_epi8(sink | 1), b = _mm512_set1_epi8(sink | 2);
#define BEGIN(i) __m512i sum##i = _mm512_setzero_si512();
#define ADD(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum##i) : "v"(a), "v"(b));  // neither dropped nor folded
#define END(i) sink = _mm512_reduce_add_epi32(sum##i);
  EACH(BEGIN)
  double begin = now();
  for (int i = 0; i < kRounds; i++) { EACH(ADD) }
  double seconds = now() - begin;
  EACH(END)
  return kRounds * double(kAccumulators) * 2 * 64 / seconds;
}

// The mean of the threads, the best of five.
static double best(int threads, const std::function<double()>& once) {
  double most = 0;
  for (int repeat = 0; repeat < 5; repeat++) {
    std::vector<double> rates(threads);
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; t++) workers.emplace_back([&, t] { rates[t] = once(); });
    for (auto& worker : workers) worker.join();
    double sum = 0;
    for (double rate : rates) sum += rate;
    most = std::max(most, sum / threads);
  }
  return most;
}

static bool has(const char* feature) {
  static char text[1 << 16];
  if (!text[0]) {
    FILE* file = fopen("/proc/cpuinfo", "r");
    if (file) {
      size_t read = fread(text, 1, sizeof text - 1, file);
      text[read] = 0;
      fclose(file);
    }
  }
  return strstr(text, feature) != nullptr;
}

int main(int count, char** arguments) {
  int threads = count > 1 ? atoi(arguments[1]) : 1;
  bool allowed = has(" amx_int8") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ask for the tiles' registers
  printf("{\"amx_int8\": %.4g, \"avx512_vnni\": %.4g}\n", allowed ? best(threads, tiles) : 0.0,
         has(" avx512_vnni") ? best(threads, vnni) : 0.0);
}
