// Scale and offset of a group, the careful way: any size, any values.
#pragma once

#include <vector>

#include "quantize.h"
#include "values.h"

namespace tw {
namespace TW_NS {

// Sum by halving: zeros pad to a power of two, then the upper half is added to the lower.
inline float fold(float* v, int64_t width) {
  while (width > W) {
    width /= 2;
    for (int64_t j = 0; j < width; j += W) store(v + j, load<vf>(v + j) + load<vf>(v + j + width));
  }
  while (width > 1) {
    width /= 2;
    for (int64_t j = 0; j < width; ++j) v[j] = v[j] + v[j + width];
  }
  return v[0];
}

inline int64_t padded_width(int64_t n) {
  int64_t width = 1;
  while (width < n) width *= 2;
  return width;
}

constexpr int64_t kFoldBlock = 1024;

// The same sum of `count` blocks of kFoldBlock values, of which fill(t, into) makes block t: blocks
// t and t + count / 2 are added first, so the sum is that of even blocks plus that of odd ones.
template <class Fill>
void fold_blocks(int64_t first, int64_t step, int64_t count, const Fill& fill, float* into,
                 std::vector<std::vector<float>>& spare, size_t depth) {
  if (count == 1) {
    fill(first, into);
    return;
  }
  fold_blocks(first, 2 * step, count / 2, fill, into, spare, depth + 1);
  if (spare[depth].empty()) spare[depth].resize(kFoldBlock);
  float* const other = spare[depth].data();
  fold_blocks(first + step, 2 * step, count / 2, fill, other, spare, depth + 1);
  for (int64_t j = 0; j < kFoldBlock; j += W) store(into + j, load<vf>(into + j) + load<vf>(other + j));
}

// The halving sum of f(value) over [a, b).
template <class S, class F>
float tree_sum(const S& source, int64_t a, int64_t b, const F& f) {
  alignas(64) float block[kFoldBlock];
  const auto fill = [&](int64_t from, int64_t width, float* into) {
    int64_t j = 0;
    const int64_t there = std::max<int64_t>(0, std::min(width, b - from));
    for (; j + W <= there; j += W) store(into + j, f(source.at(from + j)));
    if (j < there) {
      const int k = static_cast<int>(there - j);
      store_part<F32>(into + j, f(source.part(from + j, k)), k);
    }
    for (j = there; j < width; ++j) into[j] = 0.0f;
  };
  const int64_t width = padded_width(b - a);
  if (width <= kFoldBlock) {
    fill(a, width, block);
    return fold(block, width);
  }
  std::vector<std::vector<float>> spare(64);
  fold_blocks(
      0, 1, width / kFoldBlock,
      [&](int64_t t, float* into) { fill(a + t * kFoldBlock, kFoldBlock, into); }, block, spare, 0);
  return fold(block, kFoldBlock);
}

struct Range {
  float lo, hi;
  bool finite;
};

// One pass over [a, b): least and greatest value; a NaN makes the running sum one too.
template <class S>
TW_INLINE void range2(const S& source, int64_t a, int64_t b, vf* lo, vf* hi, Two* total) {
  const vf one = hidden_one();
  Two x = source.at2(a);
  x = {pinned(x.a), pinned(x.b)};
  Two l = x, h = x, t = {plus(x.a, total->a, one), plus(x.b, total->b, one)};
  for (int64_t i = a + 2 * W; i < b; i += 2 * W) {
    Two y = source.at2(i);
    y = {pinned(y.a), pinned(y.b)};
    l = {least(l.a, y.a), least(l.b, y.b)};
    h = {greatest(h.a, y.a), greatest(h.b, y.b)};
    t = {plus(y.a, t.a, one), plus(y.b, t.b, one)};
  }
  *lo = least(l.a, l.b);
  *hi = greatest(h.a, h.b);
  *total = t;
}

template <class S>
Range range_of(const S& source, int64_t a, int64_t b) {
  vf lo = source.part(a, 1), hi = lo;
  Two total{};
  const int64_t whole = a + (b - a) / (2 * W) * (2 * W);
  if (whole > a) range2(source, a, whole, &lo, &hi, &total);
  for (int64_t i = whole; i < b; i += W) {
    const vf x = source.part(i, static_cast<int>(std::min<int64_t>(b - i, W)));
    lo = least(lo, x);
    hi = greatest(hi, x);
    total.a += x;
  }
  // + 0.0, since the least of 0.0 and -0.0 is either
  Range r = {reduce(lo, least) + 0.0f, reduce(hi, greatest) + 0.0f, true};
  if (!all_finite(total.a + total.b))  // a NaN, which least and greatest may have lost, or a sum beyond float32
    for (int64_t i = a; i < b && r.finite; ++i) r.finite = is_finite(source.part(i, 1)[0]);
  r.finite = r.finite && is_finite(r.hi - r.lo);
  return r;
}

// Scale and offset of the group [a, b), the careful way; false where it cannot be coded.
template <Mode mode, class S>
bool measure(const S& source, int64_t a, int64_t b, int bits, bool symmetric, Group* g) {
  const Range r = range_of(source, a, b);
  if (!r.finite) return false;
  if constexpr (mode == kAffine) {
    g->scale = round_up_bf16((r.hi - r.lo) / static_cast<float>((1 << bits) - 1));
    g->offset = r.lo;
    g->divide_by(g->scale);
    g->plain = g->lift == 1.0f && (r.hi - r.lo) * g->inverse < static_cast<float>((1 << bits) - 1) + 0.5f;
  } else if constexpr (mode == kSymmetric) {
    const float peak = std::fabs(std::max(r.hi, -r.lo));
    const float half = static_cast<float>((1 << (bits - 1)) - 1);
    g->scale = round_up_bf16(peak / half);
    g->offset = 0.0f;
    g->divide_by(g->scale);
    g->plain = g->lift == 1.0f && peak * g->inverse < half + 0.5f;
  } else {
    const float size = static_cast<float>(b - a);
    float unit = 1.0f, mean = 0.0f, squares = 0.0f;
    const auto sums = [&] {
      const vf inverse = splat(1.0f / unit);
      const auto scaled = [&](vf x) __attribute__((always_inline)) { return x * inverse; };
      if (!symmetric) mean = tree_sum(source, a, b, scaled) / size;
      const vf middle = splat(mean);
      squares = tree_sum(source, a, b, [&](vf x) __attribute__((always_inline)) {
        const vf c = x * inverse - middle;
        return c * c;
      });
    };
    sums();
    if (!(squares >= kLeastSquares && squares <= kMostSquares)) {
      const int32_t exponent = bits_of(std::max(r.hi, -r.lo)) & 0x7F800000;
      unit = exponent > 0 ? float_of(exponent) : 1.0f;
      sums();
    }
    g->scale = round_up_bf16(std::sqrt(squares / size) * unit);
    g->offset = mean * unit + 0.0f;
    if constexpr (mode == kStdMany) g->divide_by(g->scale * kUniformStep[bits]);
    g->plain = g->lift == 1.0f;
  }
  return decodable(mode, bits, g->scale, g->offset);
}

// The first value of [a, b) that is not finite, else the first of the greatest magnitude.
template <class S>
int64_t worst_of(const S& source, int64_t a, int64_t b) {
  int64_t worst = a;
  int32_t most = -1;
  for (int64_t i = a; i < b; ++i) {
    const int32_t magnitude = bits_of(source.part(i, 1)[0]) & 0x7FFFFFFF;
    if (magnitude >= 0x7F800000) return i;
    if (magnitude > most) most = magnitude, worst = i;
  }
  return worst;
}

}  // namespace TW_NS
}  // namespace tw
