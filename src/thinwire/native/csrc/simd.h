// Vectors of W lanes, W by level, and the conversions that the kernels need. Results are the same at
// every level: one rounding an operation, no fused multiply-add, no approximate instruction.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TW_INLINE inline __attribute__((always_inline))

namespace tw {
namespace TW_NS {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int16_t vs __attribute__((vector_size(4 * W)));
typedef uint16_t vw __attribute__((vector_size(4 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));

template <class V>
TW_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
TW_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

TW_INLINE vf splat(float x) { return x - vf{}; }  // + would lose the sign of -0.0
TW_INLINE vi splat(int32_t x) { return vi{} + x; }
TW_INLINE vi bits_of(vf x) { return reinterpret_cast<vi>(x); }
TW_INLINE vf float_of(vi x) { return reinterpret_cast<vf>(x); }
TW_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
TW_INLINE vi truncate(vf x) { return __builtin_convertvector(x, vi); }  // within int32
TW_INLINE vi nearest(vf x) {  // to even; within int32
#if defined(__AVX512F__)
  return reinterpret_cast<vi>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<vi>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(x)));
#elif defined(__x86_64__)
  return reinterpret_cast<vi>(_mm_cvtps_epi32(reinterpret_cast<__m128>(x)));
#elif defined(__aarch64__)
  return reinterpret_cast<vi>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(x)));
#else
  return bits_of(x + splat(12582912.0f)) - 0x4B400000;  // 1.5 * 2**23: |x| < 2**22
#endif
}
TW_INLINE vi shift_right(vi x, int by) {                                // logical
  return reinterpret_cast<vi>(reinterpret_cast<vu>(x) >> by);
}
TW_INLINE vf absolute(vf x) { return float_of(bits_of(x) & 0x7FFFFFFF); }

// a + b, where multiplication units exist that can add: additions and comparisons have the others to
// themselves. `one` is 1.0, hidden from the compiler, which would see through the product.
TW_INLINE vf hidden_one() {
  vf one = splat(1.0f);
#if defined(__AVX512F__) || defined(__FMA__)
  asm("" : "+v"(one));
#endif
  return one;
}
// code, with its last bit flipped where a > b.
TW_INLINE vi flipped_where_greater(vi code, vf a, vf b) {
#if defined(__AVX512F__)
  const __mmask16 greater = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GT_OQ);
  const __m512i c = reinterpret_cast<__m512i>(code);
  return reinterpret_cast<vi>(_mm512_mask_xor_epi32(c, greater, c, _mm512_set1_epi32(1)));
#else
  return code ^ ((a > b) & 1);
#endif
}

// Keeps a loaded vector in a register: three uses of it would else be three loads.
TW_INLINE vf pinned(vf x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#endif
  return x;
}
TW_INLINE vf plus(vf a, vf b, vf one) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(one),
                                              reinterpret_cast<__m512>(b)));
#elif defined(__FMA__)
  return reinterpret_cast<vf>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(one),
                                              reinterpret_cast<__m256>(b)));
#else
  (void)one;
  return a + b;
#endif
}

// a * scale + b, where the product is exact.
TW_INLINE vf plus_scaled(vf a, vf scale, vf b) {
#if defined(__AVX512F__) || defined(__FMA__)
  return plus(a, b, scale);
#else
  return a * scale + b;
#endif
}

TW_INLINE vf minus(vf a, vf b, vf one) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_fnmadd_ps(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(one),
                                               reinterpret_cast<__m512>(a)));
#elif defined(__FMA__)
  return reinterpret_cast<vf>(_mm256_fnmadd_ps(reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(one),
                                               reinterpret_cast<__m256>(a)));
#else
  (void)one;
  return a - b;
#endif
}

TW_INLINE int32_t bits_of(float x) {
  int32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
TW_INLINE float float_of(int32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}
TW_INLINE bool is_finite(float x) { return (bits_of(x) & 0x7F800000) != 0x7F800000; }

// Least and greatest of two; of no interest where one is a NaN.
TW_INLINE vf least(vf a, vf b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#elif defined(__x86_64__)
  return reinterpret_cast<vf>(_mm_min_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#elif defined(__aarch64__)
  return reinterpret_cast<vf>(vminq_f32(reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  return a < b ? a : b;
#endif
}
TW_INLINE vf greatest(vf a, vf b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#elif defined(__x86_64__)
  return reinterpret_cast<vf>(_mm_max_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#elif defined(__aarch64__)
  return reinterpret_cast<vf>(vmaxq_f32(reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  return a > b ? a : b;
#endif
}

TW_INLINE vf root(vf x) {  // correctly rounded
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_sqrt_ps(reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
#elif defined(__x86_64__)
  return reinterpret_cast<vf>(_mm_sqrt_ps(reinterpret_cast<__m128>(x)));
#elif defined(__aarch64__)
  return reinterpret_cast<vf>(vsqrtq_f32(reinterpret_cast<float32x4_t>(x)));
#else
  for (int k = 0; k < W; ++k) x[k] = std::sqrt(x[k]);
  return x;
#endif
}

// The greatest of integers, lane by lane; of 32 bits it is one instruction only where kMaxima says so.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool kMaxima = true;
#else
constexpr bool kMaxima = false;
#endif
template <class V>
TW_INLINE V maximum(V a, V b) {
  return a > b ? a : b;
}

// The sign bits of all lanes, the first lane's lowest.
TW_INLINE uint32_t signs_of(vi x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(x));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(x)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(x)));
#else
  uint32_t signs = 0;
  for (int k = 0; k < W; ++k) signs |= static_cast<uint32_t>(x[k] < 0) << k;
  return signs;
#endif
}
// Whether any lane is negative (as the lanes of a true comparison are).
TW_INLINE bool any_negative(vi x) {
#if defined(__aarch64__)
  return vminvq_s32(reinterpret_cast<int32x4_t>(x)) < 0;
#else
  return signs_of(x) != 0;
#endif
}
TW_INLINE bool all_true(vi mask) { return !any_negative(~mask); }
TW_INLINE bool all_finite(vf x) { return !any_negative((bits_of(x) & 0x7FFFFFFF) > 0x7F7FFFFF); }

// The first `count` lanes of x, or of its low halves.
TW_INLINE void store_first(void* p, vf x, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), reinterpret_cast<__m512>(x));
#else
  for (int k = 0; k < count; ++k) std::memcpy(static_cast<char*>(p) + 4 * k, reinterpret_cast<char*>(&x) + 4 * k, 4);
#endif
}

// Lanes rotated by half of `width`: folding with it reduces the first `width` lanes to half as many.
template <int width>
TW_INLINE vf upper(vf x) {
  vi index;
  for (int k = 0; k < W; ++k) index[k] = (k + width / 2) % W;
#if defined(__clang__)
  vf y;
  for (int k = 0; k < W; ++k) y[k] = x[(k + width / 2) % W];
  return y;
#else
  return __builtin_shuffle(x, index);
#endif
}

template <class Fold>
TW_INLINE float reduce(vf x, Fold fold) {
#if defined(__AVX512F__)
  x = fold(x, upper<16>(x));
#endif
#if defined(__AVX2__)
  x = fold(x, upper<8>(x));
#endif
  x = fold(x, upper<4>(x));
  x = fold(x, upper<2>(x));
  return x[0];
}

TW_INLINE vf sum(vf a, vf b) { return a + b; }

// Codes: lanes of 0 to 255.
TW_INLINE void store_codes(uint8_t* p, vi x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#else
  store(p, __builtin_convertvector(x, vb));
#endif
}

TW_INLINE vi load_codes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vi>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<vi>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__x86_64__)
  int32_t four;
  std::memcpy(&four, p, 4);
  const __m128i zero = _mm_setzero_si128();
  return reinterpret_cast<vi>(
      _mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero));
#else
  return __builtin_convertvector(load<vb>(p), vi);
#endif
}

// Two vectors hold 2 W values in one of two orders: in line (the first W, then the next), or
// alternating (those at even places, those at odd ones), in which 16-bit values come apart cheaply.
struct Two {
  vf a, b;
};

// Codes of two vectors, or of four (two pairs), which take fewer shuffles than one by one.
template <bool alternating>
TW_INLINE void store_codes2(uint8_t* p, vi a, vi b) {
  if constexpr (alternating) {
    store(p, __builtin_convertvector(a | (b << 8), vh));
  } else {
    store_codes(p, a);
    store_codes(p + W, b);
  }
}

template <bool alternating>
TW_INLINE void store_codes4(uint8_t* p, const vi* c) {
#if defined(__AVX512F__)
  __m512i packed;
  if constexpr (alternating) {
    const __m512i even = _mm512_packus_epi32(reinterpret_cast<__m512i>(c[0]), reinterpret_cast<__m512i>(c[2]));
    const __m512i odd = _mm512_packus_epi32(reinterpret_cast<__m512i>(c[1]), reinterpret_cast<__m512i>(c[3]));
    packed = _mm512_or_si512(even, _mm512_slli_epi32(odd, 8));
    packed = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
  } else {
    packed = _mm512_packus_epi16(
        _mm512_packus_epi32(reinterpret_cast<__m512i>(c[0]), reinterpret_cast<__m512i>(c[1])),
        _mm512_packus_epi32(reinterpret_cast<__m512i>(c[2]), reinterpret_cast<__m512i>(c[3])));
    packed = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
  }
  _mm512_storeu_si512(p, packed);
#elif defined(__AVX2__)
  __m256i packed;
  if constexpr (alternating) {
    packed = _mm256_packus_epi32(reinterpret_cast<__m256i>(c[0] | (c[1] << 8)), reinterpret_cast<__m256i>(c[2] | (c[3] << 8)));
    packed = _mm256_permute4x64_epi64(packed, 0xD8);
  } else {
    packed = _mm256_packus_epi16(
        _mm256_packus_epi32(reinterpret_cast<__m256i>(c[0]), reinterpret_cast<__m256i>(c[1])),
        _mm256_packus_epi32(reinterpret_cast<__m256i>(c[2]), reinterpret_cast<__m256i>(c[3])));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
#else
#if defined(__x86_64__)
  if constexpr (!alternating) {
    const __m128i low = _mm_packs_epi32(reinterpret_cast<__m128i>(c[0]), reinterpret_cast<__m128i>(c[1]));
    const __m128i high = _mm_packs_epi32(reinterpret_cast<__m128i>(c[2]), reinterpret_cast<__m128i>(c[3]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(low, high));
    return;
  }
#endif
  store_codes2<alternating>(p, c[0], c[1]);
  store_codes2<alternating>(p + 2 * W, c[2], c[3]);
#endif
}

#if defined(__AVX512F__)
constexpr bool kPacksSigns = true;
// Bytes with the signs of four vectors in line, in an order of their own, which the functions below mend.
TW_INLINE vi packed_signs(const vi* x) {
  return reinterpret_cast<vi>(_mm512_packs_epi16(
      _mm512_packs_epi32(reinterpret_cast<__m512i>(x[0]), reinterpret_cast<__m512i>(x[1])),
      _mm512_packs_epi32(reinterpret_cast<__m512i>(x[2]), reinterpret_cast<__m512i>(x[3]))));
}
TW_INLINE void store_packed(uint8_t* p, vi bytes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, reinterpret_cast<__m512i>(bytes)));
}
#else
constexpr bool kPacksSigns = false;
TW_INLINE vi packed_signs(const vi*) { return vi{}; }
TW_INLINE void store_packed(uint8_t*, vi) {}
#endif
// 1 for a sign of +, 0 for one of -.
TW_INLINE void store_codes_of_signs(uint8_t* p, vi sign) { store_packed(p, ~shift_right(sign, 7) & 0x01010101); }
// Twice that, and 1 more where just one of the two signs is -.
TW_INLINE void store_codes_of_signs(uint8_t* p, vi sign, vi other) {
  store_packed(p, (~shift_right(sign, 6) & 0x02020202) | (shift_right(sign ^ other, 7) & 0x01010101));
}

// Element types: exact to float, rounded to nearest even from it.

struct F32 {
  typedef float T;
  static TW_INLINE vf load(const T* p) { return TW_NS::load<vf>(p); }
  static TW_INLINE void store(T* p, vf x) { TW_NS::store(p, x); }
  static TW_INLINE void stream(T* p, vf x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, reinterpret_cast<__m512>(x));
#elif defined(__AVX2__)
    _mm256_stream_ps(p, reinterpret_cast<__m256>(x));
#elif defined(__x86_64__)
    _mm_stream_ps(p, reinterpret_cast<__m128>(x));
#else
    TW_NS::store(p, x);
#endif
  }
  template <bool alternating>
  static TW_INLINE Two load2(const T* p) {
    static_assert(!alternating, "32-bit values lie in line");
    return {load(p), load(p + W)};
  }
  template <bool alternating>
  static TW_INLINE void store2(T* p, Two x) {
    store(p, x.a);
    store(p + W, x.b);
  }
};

TW_INLINE vi load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vi>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<vi>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__x86_64__)
  return reinterpret_cast<vi>(
      _mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), _mm_setzero_si128()));
#else
  return __builtin_convertvector(load<vh>(p), vi);
#endif
}

TW_INLINE void store_halves(uint16_t* p, vi x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
#else
  store(p, __builtin_convertvector(x, vh));
#endif
}

// The low halves of a, then those of b.
TW_INLINE vi both_halves(vi a, vi b) {
  uint16_t halves[2 * W];
  store_halves(halves, a);
  store_halves(halves + W, b);
  return load<vi>(halves);
}

TW_INLINE void store_first_halves(void* p, vi x, int count) {
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1),
                           _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
#else
  for (int k = 0; k < count; ++k) std::memcpy(static_cast<char*>(p) + 2 * k, reinterpret_cast<char*>(&x) + 4 * k, 2);
#endif
}

// Both orders for the 16-bit types H, which round with H::halves (in the low 16 bits of each lane).
template <class H>
struct Half {
  typedef uint16_t T;
  static TW_INLINE void store(T* p, vf x) { store_halves(p, H::halves(x)); }
  template <bool alternating>
  static TW_INLINE Two load2(const T* p) {
    if constexpr (alternating)
      return H::alternating(TW_NS::load<vi>(p));
    else
      return {H::load(p), H::load(p + W)};
  }
  template <bool alternating>
  static TW_INLINE void store2(T* p, Two x) {
    if constexpr (alternating) {
      TW_NS::store(p, H::halves(x.a) | (H::halves(x.b) << 16));
    } else {
      store(p, x.a);
      store(p + W, x.b);
    }
  }
};

TW_INLINE vf clamped(vf x, float limit) { return least(greatest(x, splat(-limit)), splat(limit)); }

struct B16 : Half<B16> {
  static constexpr float kMax = 3.38953139e38f;
  static TW_INLINE vf load(const T* p) { return float_of(load_halves(p) << 16); }
  static TW_INLINE Two alternating(vi x) { return {float_of(x << 16), float_of(x & ~0xFFFF)}; }
  // In the high 16 bits of each lane; a value beyond the greatest becomes an infinity.
  static TW_INLINE vi rounded(vf x) {
    const vi u = bits_of(x);
    return u + 0x7FFF + (shift_right(u, 16) & 1);
  }
  // The same of two vectors, in the order of memory.
  template <bool alternating>
  static TW_INLINE vi rounded2(Two x) {
#if defined(__AVX512F__)
    // halves and what they leave are put in order by one shuffle each, and rounded all at once: the
    // carry of rest + 0x7FFF + the half's last bit is the top bit of their mean
    vs high, low;
    for (int k = 0; k < 2 * W; ++k) {
      const int from = alternating ? k / 2 * 2 + k % 2 * 2 * W : 2 * k;
      low[k] = static_cast<int16_t>(from);
      high[k] = static_cast<int16_t>(from + 1);
    }
    const __m512i a = reinterpret_cast<__m512i>(x.a), b = reinterpret_cast<__m512i>(x.b);
    const __m512i half = _mm512_permutex2var_epi16(a, reinterpret_cast<__m512i>(high), b);
    const __m512i rest = _mm512_permutex2var_epi16(a, reinterpret_cast<__m512i>(low), b);
    const __m512i odd = _mm512_ternarylogic_epi32(half, _mm512_set1_epi16(1), _mm512_set1_epi16(0x7FFE), 0xEA);
    const __m512i mean = _mm512_avg_epu16(rest, odd);
    return reinterpret_cast<vi>(_mm512_sub_epi16(half, _mm512_srai_epi16(mean, 15)));
#else
    const vi a = shift_right(rounded(x.a), 16), b = rounded(x.b);
    if constexpr (alternating) return a | (b & ~0xFFFF);
    return both_halves(a, shift_right(b, 16));
#endif
  }
  static TW_INLINE vi halves(vf x) { return shift_right(rounded(clamped(x, kMax)), 16); }
  template <bool alternating>
  static TW_INLINE void store2(T* p, Two x) {
    TW_NS::store(p, rounded2<alternating>({clamped(x.a, kMax), clamped(x.b, kMax)}));
  }
};

struct H16 : Half<H16> {
  static constexpr float kMax = 65504.0f;
  static TW_INLINE vf load(const T* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
    return reinterpret_cast<vf>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    const vi h = load_halves(p), em = h & 0x7FFF;
    const vi normal = (em << 13) + (112 << 23) + ((em >= 0x7C00) & (112 << 23));
    const vi small = bits_of(to_float(em) * splat(5.9604644775390625e-8f));  // 2**-24, exact
    const vi magnitude = em < 0x400 ? small : normal;
    return float_of(magnitude | ((h & 0x8000) << 16));
#endif
  }
  static TW_INLINE vi halves(vf x) {
    const vi u = bits_of(clamped(x, kMax));
    const vi a = u & 0x7FFFFFFF;
    const vi normal = shift_right(a + 0xFFF + (shift_right(a, 13) & 1) - (112 << 23), 13);
    // below 2**-14: multiples of 2**-24, rounded by adding 1.5 * 2**23
    const vi small = bits_of(float_of(a) * splat(16777216.0f) + splat(12582912.0f)) & 0x7FF;
    return (a < (113 << 23) ? small : normal) | (shift_right(u, 16) & 0x8000);
  }
};

// The first `k` values at p; the other lanes repeat the first.
template <class E>
TW_INLINE vf load_part(const typename E::T* p, int k) {
  typename E::T lanes[W];
  for (int j = 0; j < W; ++j) lanes[j] = p[j < k ? j : 0];
  return E::load(lanes);
}

template <class E>
TW_INLINE void store_part(typename E::T* p, vf x, int k) {
  typename E::T lanes[W];
  E::store(lanes, x);
  for (int j = 0; j < k; ++j) p[j] = lanes[j];
}

TW_INLINE vf pick(vf a, vf b, vi index) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_permutex2var_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512i>(index),
                                                     reinterpret_cast<__m512>(b)));
#elif defined(__clang__)
  vf y;
  for (int k = 0; k < W; ++k) y[k] = index[k] < W ? a[index[k]] : b[index[k] - W];
  return y;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

template <int segment, int live, class Fold>
TW_INLINE void fold_level(vf* v, const Fold& fold) {
  if constexpr (segment <= W) {
    vi low, high;
    for (int p = 0; p < W; ++p) {
      const int half = segment / 2, group = p / half, per = W / segment;
      low[p] = (group < per ? group * segment : W + (group - per) * segment) + p % half;
      high[p] = low[p] + half;
    }
#pragma GCC unroll 8
    for (int k = 0; k < (live + 1) / 2; ++k) {
      const vf a = v[2 * k], b = v[2 * k + 1 < live ? 2 * k + 1 : 2 * k];
      v[k] = fold(pick(a, b, low), pick(a, b, high));
    }
    if constexpr (segment > 2) fold_level<segment / 2, (live + 1) / 2>(v, fold);
  }
}

// Folds the lanes of each of `count` vectors (at most W) to one, by halves: lane k of the result is
// vector k's, and those beyond hold some of the same.
template <class Fold>
TW_INLINE vf fold_lanes(vf* v, int count, const Fold& fold) {
  if (count == 1) {
    fold_level<W, 1>(v, fold);
  } else if (count == W / 4) {
    fold_level<W, W / 4>(v, fold);
  } else if (count == W / 2) {
    fold_level<W, W / 2>(v, fold);
  } else {
    for (int k = count; k < W; ++k) v[k] = v[0];
    fold_level<W, W>(v, fold);
  }
  return v[0];
}
template <class Fold>
TW_INLINE vf fold_lanes(vf* v, const Fold& fold) {
  return fold_lanes(v, W, fold);
}

}  // namespace TW_NS
}  // namespace tw
