// CUDA's vectors, halves and arithmetic: see cuda_on_cpu.h.
#pragma once

#define LOCKSTEP_VECTORS(type, name, align1, align2, align4)                          \
  struct alignas(align1) name##1 { type x; };                                         \
  struct alignas(align2) name##2 { type x, y; };                                      \
  struct name##3 { type x, y, z; };                                                   \
  struct alignas(align4) name##4 { type x, y, z, w; };                                \
  inline name##1 make_##name##1(type x) { return {x}; }                               \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                    \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }         \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

LOCKSTEP_VECTORS(signed char, char, 1, 2, 4)
LOCKSTEP_VECTORS(unsigned char, uchar, 1, 2, 4)
LOCKSTEP_VECTORS(short, short, 2, 4, 8)
LOCKSTEP_VECTORS(unsigned short, ushort, 2, 4, 8)
LOCKSTEP_VECTORS(int, int, 4, 8, 16)
LOCKSTEP_VECTORS(unsigned, uint, 4, 8, 16)
LOCKSTEP_VECTORS(long, long, 8, 16, 16)
LOCKSTEP_VECTORS(unsigned long, ulong, 8, 16, 16)
LOCKSTEP_VECTORS(long long, longlong, 8, 16, 16)
LOCKSTEP_VECTORS(unsigned long long, ulonglong, 8, 16, 16)
LOCKSTEP_VECTORS(float, float, 4, 8, 16)
LOCKSTEP_VECTORS(double, double, 8, 16, 16)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

template <typename To, typename From>
To lockstep_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct half {
  _Float16 value;
  half() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  half(T x) : value(static_cast<_Float16>(x)) {}
  operator float() const { return static_cast<float>(value); }
};

struct nv_bfloat16 {
  std::uint16_t bits;
  nv_bfloat16() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  nv_bfloat16(T x) {
    const float y = static_cast<float>(x);
    const auto u = lockstep_bits<std::uint32_t>(y);
    bits = std::isnan(y) ? 0x7FFF : std::uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
  }
  operator float() const { return lockstep_bits<float>(std::uint32_t(bits) << 16); }
};

using __half = half;
using __nv_bfloat16 = nv_bfloat16;

// Both operands in one small type: the result is rounded to it.  Templates, so that half + float adds floats.
template <typename T>
constexpr bool lockstep_is_small = std::is_same_v<T, half> || std::is_same_v<T, nv_bfloat16>;

#define LOCKSTEP_OPERATOR(op)                                                  \
  template <typename T, typename = std::enable_if_t<lockstep_is_small<T>>>     \
  T operator op(T a, T b) { return T(float(a) op float(b)); }

LOCKSTEP_OPERATOR(+)
LOCKSTEP_OPERATOR(-)
LOCKSTEP_OPERATOR(*)
LOCKSTEP_OPERATOR(/)

struct alignas(4) __half2 { half x, y; };
struct alignas(4) __nv_bfloat162 { nv_bfloat16 x, y; };
using half2 = __half2;
using nv_bfloat162 = __nv_bfloat162;

inline bool __hgt(half a, half b) { return float(a) > float(b); }
inline bool __hlt(half a, half b) { return float(a) < float(b); }
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return x; }
inline half __float2half_rn(float x) { return x; }
inline unsigned short __half_as_ushort(half x) { return lockstep_bits<unsigned short>(x); }
inline half __ushort_as_half(unsigned short x) { return lockstep_bits<half>(x); }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline float2 __half22float2(half2 x) { return {float(x.x), float(x.y)}; }
inline half __low2half(half2 x) { return x.x; }
inline half __high2half(half2 x) { return x.y; }
inline float __bfloat162float(nv_bfloat16 x) { return x; }
inline nv_bfloat16 __float2bfloat16(float x) { return x; }

inline float __int_as_float(int x) { return lockstep_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return lockstep_bits<float>(x); }
inline int __float_as_int(float x) { return lockstep_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return lockstep_bits<unsigned>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __tanf(float x) { return std::tan(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float exp10f(float x) { return std::pow(10.0f, x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
using std::isfinite;
using std::isinf;
using std::isnan;

// As CUDA's: the other operand where one is NaN.
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }

template <typename A, typename B, typename = std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>>>
std::common_type_t<A, B> max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}

template <typename A, typename B, typename = std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>>>
std::common_type_t<A, B> min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t(a) * b) >> 32); }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = std::uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> 4 * i & 0xF, byte = both >> 8 * (which & 7) & 0xFF;
    result |= (which & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return result;
}

template <typename A, typename B, typename C>
C lockstep_dot4(A a, B b, C c) {
  using Byte = std::conditional_t<std::is_signed_v<A>, signed char, unsigned char>;
  using Other = std::conditional_t<std::is_signed_v<B>, signed char, unsigned char>;
  for (int i = 0; i < 4; ++i) c += C(Byte(a >> 8 * i)) * C(Other(b >> 8 * i));
  return c;
}

inline int __dp4a(int a, int b, int c) { return lockstep_dot4(a, b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { return lockstep_dot4(a, b, c); }

template <typename T>
T __ldg(const T* at) {
  return *at;
}

template <typename T>
T __ldcs(const T* at) {
  return *at;
}
