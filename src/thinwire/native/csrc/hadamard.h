// The randomized Hadamard rotation of native/hadamard.py, in place on floats.
//
// Strides of half a block down to a register combine whole vectors, eight at a time; those within a
// register are shuffles. A large block is halved (or cut into 4 or 8) depth first, so that what is
// left of it fits the caches.
#pragma once

#include <cstdint>

#include "noise.h"
#include "simd.h"

namespace tw {
namespace TW_NS {

constexpr uint32_t kSignSeed = 0x3C6EF372;

// The signs of positions 32 i … 32 i + 31: bit k is set where that of position 32 i + k is -1.
TW_INLINE uint32_t sign_word(int64_t i) { return mix(static_cast<uint32_t>(i) ^ kSignSeed); }

// x with the signs of lanes turned where the lowest bits of `word` are set.
TW_INLINE vf turned_by(vf x, uint32_t word) {
#if defined(__AVX512F__)
  const __m512i bits = reinterpret_cast<__m512i>(x);
  return reinterpret_cast<vf>(
      _mm512_mask_xor_epi32(bits, static_cast<__mmask16>(word), bits, _mm512_set1_epi32(INT32_MIN)));
#else
  vi bit;
  for (int k = 0; k < W; ++k) bit[k] = 1 << k;
  return float_of(bits_of(x) ^ (((splat(static_cast<int32_t>(word)) & bit) == bit) & INT32_MIN));
#endif
}

// Lanes `h` apart change places; 2 h <= W.
template <int h>
TW_INLINE vf swapped(vf x) {
#if defined(__AVX512F__)
  const __m512 v = reinterpret_cast<__m512>(x);
  if constexpr (h == 1) return reinterpret_cast<vf>(_mm512_permute_ps(v, 0xB1));
  if constexpr (h == 2) return reinterpret_cast<vf>(_mm512_permute_ps(v, 0x4E));
  if constexpr (h == 4) return reinterpret_cast<vf>(_mm512_shuffle_f32x4(v, v, 0xB1));
  return reinterpret_cast<vf>(_mm512_shuffle_f32x4(v, v, 0x4E));
#elif defined(__AVX2__)
  const __m256 v = reinterpret_cast<__m256>(x);
  if constexpr (h == 1) return reinterpret_cast<vf>(_mm256_permute_ps(v, 0xB1));
  if constexpr (h == 2) return reinterpret_cast<vf>(_mm256_permute_ps(v, 0x4E));
  return reinterpret_cast<vf>(_mm256_permute2f128_ps(v, v, 1));
#elif defined(__x86_64__)
  const __m128 v = reinterpret_cast<__m128>(x);
  return reinterpret_cast<vf>(h == 1 ? _mm_shuffle_ps(v, v, 0xB1) : _mm_shuffle_ps(v, v, 0x4E));
#elif defined(__aarch64__)
  const float32x4_t v = reinterpret_cast<float32x4_t>(x);
  return reinterpret_cast<vf>(h == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2));
#else
  vf y;
  for (int k = 0; k < W; ++k) y[k] = x[k ^ h];
  return y;
#endif
}

// The butterfly of lanes `h` apart: a + b in the lower one, a - b in the upper.
template <int h>
TW_INLINE vf crossed(vf x) {
#if defined(__AVX512F__) || defined(__FMA__)
  vf one;
  for (int k = 0; k < W; ++k) one[k] = k & h ? -1.0f : 1.0f;
  return plus(x, swapped<h>(x), one);  // ± x is exact: one rounding
#else
  vi sign;
  for (int k = 0; k < W; ++k) sign[k] = k & h ? INT32_MIN : 0;
  return swapped<h>(x) + float_of(bits_of(x) ^ sign);
#endif
}

// Strides below `size` (at most W) within each register.
template <int size>
TW_INLINE vf crossed_below(vf x) {
  if constexpr (size > 8) x = crossed<8>(x);
  if constexpr (size > 4) x = crossed<4>(x);
  if constexpr (size > 2) x = crossed<2>(x);
  if constexpr (size > 1) x = crossed<1>(x);
  return x;
}

// Butterflies of whole vectors, with strides of count / 2 … 1 vectors.
template <int count>
TW_INLINE void cross_vectors(vf* v) {
#pragma GCC unroll 3
  for (int h = count / 2; h; h /= 2)
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k)
      if (!(k & h)) {
        const vf a = v[k], b = v[k + h];
        v[k] = a + b;
        v[k + h] = a - b;
      }
}

// 2**(-k/2) for a block of 2**k values, rounded to float32 as a square root is.
TW_INLINE float hadamard_scale(int64_t size) {
  float scale = 1.0f;
  for (; size >= 4; size /= 4) scale *= 0.5f;
  return size == 2 ? scale * 0.70710678118654752f : scale;
}

// Whole blocks of count * W values.
template <int count>
TW_INLINE void transform_in_registers(float* x, int64_t blocks, vf scale) {
  for (; blocks; --blocks, x += count * W) {
    vf v[count];
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k) v[k] = load<vf>(x + k * W);
    cross_vectors<count>(v);
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k) store(x + k * W, crossed_below<W>(v[k]) * scale);
  }
}

// The first strides of a block of `size` values, down to size / count: of vectors far apart.
template <int count>
TW_INLINE void cross_far(float* x, int64_t size) {
  const int64_t step = size / count;
  for (int64_t i = 0; i < step; i += W) {
    vf v[count];
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k) v[k] = load<vf>(x + i + k * step);
    cross_vectors<count>(v);
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k) store(x + i + k * step, v[k]);
  }
}

// `blocks` blocks of `size` values, less than W: several to a register.
template <int size>
TW_INLINE void transform_small(float* x, int64_t blocks, vf scale) {
  int64_t i = 0;
  const int64_t n = blocks * size;
  for (; i + W <= n; i += W) store(x + i, crossed_below<size>(load<vf>(x + i)) * scale);
  if (i < n) {
    const int k = static_cast<int>(n - i);
    store_part<F32>(x + i, crossed_below<size>(load_part<F32>(x + i, k)) * scale, k);
  }
}

// One after the other, `blocks` blocks of `size` values, a power of two; all are multiplied by scale.
inline void transform_scaled(float* x, int64_t size, int64_t blocks, vf scale) {
  if (size < W) {
    switch (size) {
      case 1: return transform_small<1>(x, blocks, scale);
      case 2: return transform_small<2>(x, blocks, scale);
      case 4: return transform_small<(W > 4 ? 4 : 1)>(x, blocks, scale);
      default: return transform_small<(W > 8 ? 8 : 1)>(x, blocks, scale);
    }
  }
  switch (size / W) {
    case 1: return transform_in_registers<1>(x, blocks, scale);
    case 2: return transform_in_registers<2>(x, blocks, scale);
    case 4: return transform_in_registers<4>(x, blocks, scale);
    case 8: return transform_in_registers<8>(x, blocks, scale);
    default: break;
  }
  const int64_t whole = size / (8 * W);
  const int64_t parts = whole < 8 ? whole : 8;
  for (; blocks; --blocks, x += size) {
    if (parts == 2)
      cross_far<2>(x, size);
    else if (parts == 4)
      cross_far<4>(x, size);
    else
      cross_far<8>(x, size);
    transform_scaled(x, size / parts, parts, scale);
  }
}

inline void transform_blocks(float* x, int64_t size, int64_t blocks) {
  transform_scaled(x, size, blocks, splat(hadamard_scale(size)));
}

// Steps 2 and 3 on n values in groups, of which the last may be short.
inline void transform_groups(float* x, int64_t n, int64_t group) {
  if (!(group & (group - 1))) {
    transform_blocks(x, group, n / group);
    x += n / group * group;
    n %= group;
  }
  while (n > 0) {
    int64_t left = n < group ? n : group;
    n -= left;
    for (int64_t size = int64_t{1} << 62; left; size /= 2)
      if (left & size) {
        transform_blocks(x, size, 1);
        x += size;
        left -= size;
      }
  }
}

// Calls f(i, word) for the vectors at i = a, a + W, … below b, where `word` holds their signs in its
// lowest bits; `a` is a multiple of 32.
template <class F>
TW_INLINE void for_signs(int64_t a, int64_t b, const F& f) {
  for (int64_t i = a; i < b; i += 32) {
    uint32_t word = sign_word(i / 32);
    for (int k = 0; k < 32 && i + k < b; k += W, word >>= W & 31) f(i + k, word);
  }
}

}  // namespace TW_NS
}  // namespace tw
