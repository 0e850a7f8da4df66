// SHA-256 (FIPS 180-4).  Weights are gigabytes, so CPUs with instructions for it use them: several times as fast.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace sha256 {

alignas(16) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

inline void blocks_portable(uint32_t state[8], const uint8_t* data, size_t count) {
  for (; count != 0; --count, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      const uint8_t* p = data + 4 * i;
      w[i] = uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3];
    }
    for (int i = 16; i < 64; ++i) {
      uint32_t low = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
      uint32_t high = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      uint32_t first = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      uint32_t second = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first;
      d = c, c = b, b = a, a = first + second;
    }
    const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += sums[i];
  }
}

#if defined(__x86_64__)
__attribute__((target("sha,sse4.1"))) inline void blocks_sha_ni(uint32_t state[8], const uint8_t* data, size_t count) {
  const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
  // The instructions take the state as (f e b a) and (h g d c), lowest word first.
  __m128i feba = _mm_set_epi32(state[0], state[1], state[4], state[5]);
  __m128i hgdc = _mm_set_epi32(state[2], state[3], state[6], state[7]);
  for (; count != 0; --count, data += 64) {
    __m128i w[4], before_feba = feba, before_hgdc = hgdc;
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), swap);
    }
    for (int i = 0; i < 16; ++i) {  // four rounds each
      __m128i& now = w[i % 4];
      __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRounds) + i));
      hgdc = _mm_sha256rnds2_epu32(hgdc, feba, sum);
      feba = _mm_sha256rnds2_epu32(feba, hgdc, _mm_shuffle_epi32(sum, 0x0e));
      if (i < 12) {  // the words for four steps later
        __m128i next = _mm_sha256msg1_epu32(now, w[(i + 1) % 4]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4));
        now = _mm_sha256msg2_epu32(next, w[(i + 3) % 4]);
      }
    }
    feba = _mm_add_epi32(feba, before_feba);
    hgdc = _mm_add_epi32(hgdc, before_hgdc);
  }
  alignas(16) uint32_t s[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(s), feba);
  _mm_store_si128(reinterpret_cast<__m128i*>(s) + 1, hgdc);
  const uint32_t ordered[8] = {s[3], s[2], s[7], s[6], s[1], s[0], s[5], s[4]};
  std::memcpy(state, ordered, sizeof ordered);
}
#elif defined(__aarch64__)
__attribute__((target("+crypto"))) inline void blocks_armv8(uint32_t state[8], const uint8_t* data, size_t count) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count != 0; --count, data += 64) {
    uint32x4_t w[4], before_abcd = abcd, before_efgh = efgh;
    for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
    for (int i = 0; i < 16; ++i) {  // four rounds each
      uint32x4_t& now = w[i % 4];
      uint32x4_t sum = vaddq_u32(now, vld1q_u32(kRounds + 4 * i)), previous = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, previous, sum);
      if (i < 12) {  // the words for four steps later
        now = vsha256su1q_u32(vsha256su0q_u32(now, w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
      }
    }
    abcd = vaddq_u32(abcd, before_abcd);
    efgh = vaddq_u32(efgh, before_efgh);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}
#endif

inline void blocks(uint32_t state[8], const uint8_t* data, size_t count) {
#if defined(__x86_64__)
  unsigned a, b = 0, c, d;
  bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0 && __builtin_cpu_supports("sse4.1");
  if (has) return blocks_sha_ni(state, data, count);
#elif defined(__aarch64__)
  if ((getauxval(AT_HWCAP) >> 6 & 1) != 0) return blocks_armv8(state, data, count);  // HWCAP_SHA2
#endif
  blocks_portable(state, data, count);
}

// Hexadecimal, as in the manifest.
inline std::string hex(const uint8_t* data, size_t size) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t tail[128] = {};
  size_t rest = size % 64, padded = rest < 56 ? 64 : 128;
  blocks(state, data, size / 64);
  if (rest != 0) std::memcpy(tail, data + (size - rest), rest);
  tail[rest] = 0x80;
  for (int i = 0; i < 8; ++i) tail[padded - 1 - i] = uint8_t(uint64_t(size) * 8 >> 8 * i);
  blocks(state, tail, padded / 64);
  std::string text;
  for (uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  }
  return text;
}

}  // namespace sha256
