// Values to codes, and codes to values, of groups whose scales are known.
#pragma once

#include <algorithm>
#include <cstring>

#include "format.h"
#include "noise.h"
#include "planes.h"

namespace tw {
namespace TW_NS {

// One group's codes to values: from a table where it fits into a vector, else by arithmetic.
template <Mode mode, bool table>
struct Dequantizer {
  vf scale, offset;
  vf levels;  // the group's values by code, or the format's by code until `group` is called
  int bits;
  bool symmetric;

  Dequantizer(int bits_, bool symmetric_) : bits(bits_), symmetric(symmetric_) {
    if constexpr (table) {
      float all[16];
      fill_levels(mode, bits, all);
      levels = load<vf>(all);
    }
  }
  TW_INLINE Dequantizer group(float scale_, float offset_) const {
    Dequantizer g = *this;
    g.scale = splat(scale_);
    g.offset = splat(offset_);
    if constexpr (table) {
      g.levels = levels * g.scale;
      if (!symmetric) g.levels += g.offset;
    }
    return g;
  }
  TW_INLINE vf operator()(vi code) const {
    if constexpr (table) {
#if defined(__AVX512F__)
      return reinterpret_cast<vf>(
          _mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), reinterpret_cast<__m512>(levels)));
#endif
    }
    vf level;
    if constexpr (mode == kAffine) level = to_float(code);
    if constexpr (mode == kSymmetric) level = to_float(code) - splat(static_cast<float>((1 << (bits - 1)) - 1));
    if constexpr (mode == kStd1) level = code != 0 ? splat(kLloyd1) : splat(-kLloyd1);
    if constexpr (mode == kStd2) {
      const vf magnitude = ((code == 0) | (code == 3)) ? splat(kLloyd2[1]) : splat(kLloyd2[0]);
      level = float_of(bits_of(magnitude) | ((code < 2) & INT32_MIN));
    }
    if constexpr (mode == kStdMany)
      level = (to_float(code) - splat(static_cast<float>(1 << (bits - 1)) - 0.5f)) * splat(kUniformStep[bits]);
    level = level * scale;
    return symmetric ? level : level + offset;
  }
};

// Whether tables pay at this level, and hold the format's codes.
TW_INLINE bool has_table(int bits) { return W == 16 && bits <= 4; }

// What quantizing one group needs. `plain`: no lift, and no code can exceed the greatest one.
struct Group {
  float scale, offset;
  float lift = 1.0f, inverse = 0.0f;
  bool plain = false;

  // x / step by a reciprocal; 0 where step is 0.
  void divide_by(float step) {
    lift = step < kTiny ? kLift : 1.0f;
    step *= lift;
    inverse = step > 0 ? 1.0f / step : 0.0f;
  }
};

// Values to codes.
template <Mode mode, bool stochastic, bool plain>
struct Quantizer {
  vf minus_offset, lift, inverse, bottom, top, threshold, one = hidden_one(), unit = splat(kNoiseUnit);
  int bias, half;

  Quantizer(const Group& g, int bits)
      : minus_offset(splat(-g.offset)), lift(splat(g.lift)), inverse(splat(g.inverse)),
        threshold(splat(g.scale * kLloyd2Threshold)) {
    half = (1 << (bits - 1)) - 1;
    bias = mode == kSymmetric ? half : 0;
    bottom = splat(-static_cast<float>(bias));
    top = splat(static_cast<float>(mode == kAffine ? (1 << bits) - 1 : half));
  }

  TW_INLINE vi operator()(vf x, vf noise) const {
    if constexpr (is_range(mode)) {
      vf t = mode == kAffine ? plus(x, minus_offset, one) : x;
      if constexpr (!plain) t *= lift;
      t *= inverse;
      if constexpr (stochastic) {
        // a little more than the top level, and noise near 1, would pass it
        t = least(plus_scaled(noise, unit, t), top);
        if constexpr (mode == kSymmetric || !plain) t = greatest(t, bottom);
        vi floor = truncate(t);
        if constexpr (mode == kSymmetric) floor += (to_float(floor) > t) + bias;  // true is -1
        return floor;
      } else {
        if constexpr (!plain) t = clamp(t);
        return mode == kSymmetric ? nearest(t) + bias : nearest(t);
      }
    } else {
      const vf d = centred(x);
      const vi negative = bits_of(d) >> 31;  // -1 or 0
      if constexpr (mode == kStd1) return negative + 1;
      if constexpr (mode == kStd2) return flipped_where_greater(negative + 2, absolute(d), threshold);
      vf t = absolute(d);
      if constexpr (!plain) t *= lift;
      return truncate(least(t * inverse, top)) ^ (negative + (1 + half));
    }
  }

  // Four vectors at once, where codes are made of signs: of d, and of threshold - |d|.
  static constexpr bool by_signs = kPacksSigns && (mode == kStd1 || mode == kStd2);
  TW_INLINE void store4(uint8_t* codes, const vf* x) const {
    vi sign[4], far[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      sign[k] = bits_of(centred(x[k]));
      far[k] = bits_of(threshold) - (sign[k] & 0x7FFFFFFF);
    }
    if constexpr (mode == kStd1)
      store_codes_of_signs(codes, packed_signs(sign));
    else
      store_codes_of_signs(codes, packed_signs(sign), packed_signs(far));
  }

 private:
  TW_INLINE vf centred(vf x) const { return plus(x, minus_offset, one); }
  TW_INLINE vf clamp(vf t) const { return least(greatest(t, bottom), top); }
};

// The codes of values [a, b) into codes[0 …] (and up to W - 1 bytes beyond), their values into sink.
template <bool stochastic, bool watched, class Q, class D, class S, class Sink>
TW_INLINE void quantize(const Q& quantizer, const D& dequantizer, const S& source, int64_t a, int64_t b,
                        const Noise& noise, uint8_t* codes, Sink& sink, int64_t ahead) {
  constexpr bool alternating = S::alternating;
  const auto pair = [&](int64_t i, vi* code) __attribute__((always_inline)) {
    source.prefetch(i + ahead);
    Two m{};
    const Two x = source.at2(i, &m);
    Two r{};
    if constexpr (stochastic) r = noise.template at2<alternating>(i);
    code[0] = quantizer(x.a, r.a);
    code[1] = quantizer(x.b, r.b);
    if constexpr (Sink::wants) sink.template move2<alternating, watched>(i, m, {dequantizer(code[0]), dequantizer(code[1])});
  };
  int64_t i = a;
  if constexpr (Q::by_signs && !Sink::wants && !alternating) {
    for (; i + 4 * W <= b; i += 4 * W) {
      source.prefetch(i + ahead);
      source.prefetch(i + 2 * W + ahead);
      const Two p = source.at2(i), q = source.at2(i + 2 * W);
      const vf x[4] = {p.a, p.b, q.a, q.b};
      quantizer.store4(codes + (i - a), x);
    }
  }
  for (; i + 4 * W <= b; i += 4 * W) {
    vi code[4];
    pair(i, code);
    pair(i + 2 * W, code + 2);
    store_codes4<alternating>(codes + (i - a), code);
  }
  if (i + 2 * W <= b) {
    vi code[2];
    pair(i, code);
    store_codes2<alternating>(codes + (i - a), code[0], code[1]);
    i += 2 * W;
  }
  for (; i < b; i += W) {
    const int k = static_cast<int>(std::min<int64_t>(b - i, W));
    const vi p = quantizer(source.part(i, k), stochastic ? noise.at(i) : vf{});
    store_codes(codes + (i - a), p);
    if constexpr (Sink::wants) {
      if (k == W)
        sink.put(i, dequantizer(p));
      else
        sink.put_part(i, dequantizer(p), k);
    }
  }
}

// The values of codes[0 …], which stand at [a, b), into the sink.
template <class D, class Sink>
TW_INLINE void dequantize(const D& dequantizer, const uint8_t* codes, int64_t a, int64_t b, Sink& sink) {
  int64_t i = a;
  for (; i + 2 * W <= b; i += 2 * W)
    sink.template put2<false>(i, {dequantizer(load_codes(codes + (i - a))), dequantizer(load_codes(codes + (i - a) + W))});
  for (; i + W <= b; i += W) sink.put(i, dequantizer(load_codes(codes + (i - a))));
  if (i < b) {
    uint8_t rest[W] = {};
    std::memcpy(rest, codes + (i - a), b - i);
    sink.put_part(i, dequantizer(load_codes(rest)), static_cast<int>(b - i));
  }
}

// The values of a whole block of 4-bit codes at `start`: both halves of a byte index a table as they
// are. `first` and `second` give the groups of the block's halves, 128 values each.
template <class D, class Sink>
TW_INLINE void dequantize_nibbles(const D& first, const D& second, const uint8_t* packed, int64_t start, int64_t a,
                                  int64_t b, Sink& sink) {
  for (int64_t j = a; j < b; j += 2 * W) {
    const vi p = load_codes(packed + j), q = load_codes(packed + j + W);
    sink.template put2<false>(start + j, {first(p), first(q)});
    sink.template put2<false>(start + kBlock / 2 + j, {second(shift_right(p, 4)), second(shift_right(q, 4))});
  }
}

}  // namespace TW_NS
}  // namespace tw
