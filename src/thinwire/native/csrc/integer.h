// The integer codecs: groups of values to codes and back, as native/reference.py defines them.
//
// Two ways lead to the same bytes. The fast one takes W groups at a time, so that scales are computed
// in vectors, and leaves out what ordinary groups do not need. Groups that might (values that are not
// finite, scales near the ends of float32, odd sizes) go the careful way, one at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "level.h"
#include "noise.h"
#include "planes.h"

namespace tw {
namespace TW_NS {

constexpr float kTiny = 8.6736173798840355e-19f;  // 2**-60: below, 1 / scale would overflow
constexpr float kLift = 18446744073709551616.0f;  // 2**64
constexpr float kLloyd1 = 0.7978845608028654f;
constexpr float kLloyd2[2] = {0.4527800f, 1.5104176f};
constexpr float kLloyd2Threshold = 0.9815988f;
constexpr float kUniformStep[9] = {0,          0,          0,           0.5860194f, 0.3352006f,
                                   0.1881388f, 0.1040630f, 0.05686768f, 0.03076238f};
// Sums of squares within these bounds, 2**-60 and 2**100, need no scaling of the values.
constexpr float kLeastSquares = 8.6736173798840355e-19f;
constexpr float kMostSquares = 1.2676506002282294e30f;
// 2**100, less than half a unit in the last place of the greatest float32, let alone bfloat16.
constexpr float kSafeMove = 1.2676506002282294e30f;

enum Mode { kAffine, kSymmetric, kStd1, kStd2, kStdMany };
constexpr bool is_range(Mode mode) { return mode == kAffine || mode == kSymmetric; }

inline Mode mode_of(const tw_format& f) {
  if (!(f.flags & TW_STD)) return f.flags & TW_SYMMETRIC ? kSymmetric : kAffine;
  return f.bits == 1 ? kStd1 : f.bits == 2 ? kStd2 : kStdMany;
}

// Where the parts of a row of n values lie.
struct Row {
  int64_t n, group, groups;
  int shift = -1;  // the group as a power of two, if it is one
  int bits;
  bool symmetric;
  int64_t offsets, codes;  // bytes from the row's start

  Row(const tw_format& f, int64_t n_)
      : n(n_), group(f.group ? f.group : n_), bits(f.bits), symmetric(f.flags & TW_SYMMETRIC) {
    if (group > 0 && (group & (group - 1)) == 0) shift = __builtin_ctzll(group);
    groups = n ? whole_groups(n + group - 1) : 0;
    offsets = 2 * groups;
    codes = offsets + (symmetric ? 0 : 4 * groups);
  }
  // values / group; a division takes as long as some vectors of values do.
  int64_t whole_groups(int64_t values) const { return shift >= 0 ? values >> shift : values / group; }
  int64_t nbytes() const { return codes + (n + 7) / 8 * bits; }
  // The byte of the code at `i`, a multiple of 256.
  int64_t code_at(int64_t i) const { return codes + i / 8 * bits; }

  void put(uint8_t* row, int64_t g, float scale, float offset) const {
    const uint16_t half = static_cast<uint16_t>(static_cast<uint32_t>(bits_of(scale)) >> 16);
    std::memcpy(row + 2 * g, &half, 2);
    if (!symmetric) std::memcpy(row + offsets + 4 * g, &offset, 4);
  }
  TW_INLINE void put(uint8_t* row, int64_t g, int count, vf scale, vf offset) const {
    store_first_halves(row + 2 * g, shift_right(bits_of(scale), 16), count);
    if (!symmetric) store_first(row + offsets + 4 * g, offset, count);
  }
  TW_INLINE void get(const uint8_t* row, int64_t g, float* scale, float* offset) const {
    uint16_t half;
    std::memcpy(&half, row + 2 * g, 2);
    *scale = float_of(static_cast<int32_t>(static_cast<uint32_t>(half) << 16));
    *offset = 0.0f;
    if (!symmetric) std::memcpy(offset, row + offsets + 4 * g, 4);
  }
};

template <class E>
TW_INLINE void prefetch2(const typename E::T* x, int64_t i) {
  const char* const p = reinterpret_cast<const char*>(x) + i * static_cast<int64_t>(sizeof *x);
  for (int k = 0; k < 2 * W * static_cast<int>(sizeof *x); k += 64) __builtin_prefetch(p + k, 0, 2);
}

// The extremes of floats by their bits: as signed integers, positive ones are greatest and in order;
// as unsigned ones, negative ones. With a value of either sign, `high` and `low` are therefore the
// greatest and the least (a -0.0 counts as negative), or not finite if any value is not: no NaN is lost.
struct Extremes {
  vi high = splat(INT32_MIN);
  vu low = vu{};
  TW_INLINE void see(vi x) {
    high = maximum(high, x);
    low = maximum(low, reinterpret_cast<vu>(x));
  }
  TW_INLINE void see(const Extremes& other) {
    high = maximum(high, other.high);
    low = maximum(low, other.low);
  }
};

template <class S>
TW_INLINE Extremes extremes2(const S& source, int64_t a, int64_t b) {
  Extremes p, q;
  for (int64_t i = a; i < b; i += 2 * W) {
    const Two x = source.at2(i);
    p.see(bits_of(pinned(x.a)));
    q.see(bits_of(pinned(x.b)));
  }
  p.see(q);
  return p;
}

// Sources of values: two vectors at i, the vector at i, its first k lanes with the first repeated;
// the extremes of a multiple of 2 W values.

template <class E, bool alternating_>
struct Values {
  static constexpr bool alternating = alternating_;
  static constexpr int kBatchesAhead = 2;  // of what is coded, memory is asked for values: as measured
  const typename E::T* x;
  TW_INLINE Two at2(int64_t i) const { return E::template load2<alternating>(x + i); }
  TW_INLINE Two at2(int64_t i, Two*) const { return at2(i); }
  TW_INLINE vf at(int64_t i) const { return E::load(x + i); }
  TW_INLINE vf part(int64_t i, int k) const { return load_part<E>(x + i, k); }
  TW_INLINE Extremes extremes(int64_t a, int64_t b) const {
    if constexpr (alternating) {  // as they lie, twice as many a vector
      vs high = reinterpret_cast<vs>(splat(INT32_MIN | 0x8000));
      vw low = vw{};
      for (int64_t i = a; i < b; i += 2 * W) {
        const vf pairs = pinned(load<vf>(x + i));
        high = maximum(high, reinterpret_cast<vs>(pairs));
        low = maximum(low, reinterpret_cast<vw>(pairs));
      }
      Extremes both;
      both.high = maximum(reinterpret_cast<vi>(high) << 16, reinterpret_cast<vi>(high) & ~0xFFFF);
      both.low = maximum(reinterpret_cast<vu>(low) << 16, reinterpret_cast<vu>(low) & ~0xFFFFu);
      return both;
    } else {
      return extremes2(*this, a, b);
    }
  }
  // 2 W values from i on will be wanted soon.
  TW_INLINE void prefetch(int64_t i) const { prefetch2<E>(x, i); }
};

template <class E, class M, bool alternating_>
struct Change {
  static constexpr bool alternating = alternating_;
  static constexpr int kBatchesAhead = 1;
  const typename E::T* x;
  const typename M::T* m;
  vf one = hidden_one();
  TW_INLINE Two at2(int64_t i) const {
    const Two p = E::template load2<alternating>(x + i), q = M::template load2<alternating>(m + i);
    return {minus(p.a, q.a, one), minus(p.b, q.b, one)};
  }
  // Also what is subtracted, for the sink.
  TW_INLINE Two at2(int64_t i, Two* reference) const {
    const Two p = E::template load2<alternating>(x + i), q = M::template load2<alternating>(m + i);
    *reference = {pinned(q.a), pinned(q.b)};
    return {minus(p.a, reference->a, one), minus(p.b, reference->b, one)};
  }
  TW_INLINE vf at(int64_t i) const { return E::load(x + i) - M::load(m + i); }
  TW_INLINE vf part(int64_t i, int k) const { return load_part<E>(x + i, k) - load_part<M>(m + i, k); }
  TW_INLINE Two reference2(int64_t i) const { return M::template load2<alternating>(m + i); }
  TW_INLINE Extremes extremes(int64_t a, int64_t b) const { return extremes2(*this, a, b); }
  TW_INLINE void prefetch(int64_t i) const {
    prefetch2<E>(x, i);
    prefetch2<M>(m, i);
  }
};

// The first pass over changes of 16-bit values keeps them, in order of the lanes, for the second one:
// to take them apart and subtract again would take longer.
template <class S>
struct Keeping {
  const S& source;
  float* kept;
  TW_INLINE Two at2(int64_t i) const {
    const Two x = source.at2(i);
    store(kept + i, x.a);
    store(kept + i + W, x.b);
    return x;
  }
  TW_INLINE Extremes extremes(int64_t a, int64_t b) const { return extremes2(*this, a, b); }
};

template <class S>
struct Kept {
  static constexpr bool alternating = S::alternating;
  const S& source;
  const float* kept;
  TW_INLINE Two at2(int64_t i, Two* reference) const {
    *reference = source.reference2(i);
    return {load<vf>(kept + i), load<vf>(kept + i + W)};
  }
  TW_INLINE vf at(int64_t i) const { return source.at(i); }
  TW_INLINE vf part(int64_t i, int k) const { return source.part(i, k); }
  TW_INLINE void prefetch(int64_t i) const { source.prefetch(i); }
};

// Sinks: what becomes of the value that each code stands for.

struct Nowhere {
  static constexpr bool wants = false;
  template <bool>
  TW_INLINE void put2(int64_t, Two) {}
  TW_INLINE void put(int64_t, vf) {}
  TW_INLINE void put_part(int64_t, vf, int) {}
};

template <class E, bool streaming>
struct Write {
  static constexpr bool wants = true;
  typename E::T* y;
  template <bool alternating>
  TW_INLINE void put2(int64_t i, Two value) {
    if constexpr (streaming) {
      E::stream(y + i, value.a);
      E::stream(y + i + W, value.b);
    } else {
      E::template store2<alternating>(y + i, value);
    }
  }
  TW_INLINE void put(int64_t i, vf value) {
    if constexpr (streaming)
      E::stream(y + i, value);
    else
      E::store(y + i, value);
  }
  TW_INLINE void put_part(int64_t i, vf value, int k) { store_part<E>(y + i, value, k); }
};

// Reference rows: how they are stored, and a watch for values that the type cannot hold (sums of
// finite values may exceed it). A watch may err on the side of suspicion.
struct F32Reference : F32 {
  struct Watch {
    Two total{};
    vf one = hidden_one();
    TW_INLINE void see(vf y) { total.a = plus(y, total.a, one); }
    TW_INLINE void see(Two y) {
      total.a = plus(y.a, total.a, one);
      total.b = plus(y.b, total.b, one);
    }
    bool suspicious() const { return !all_finite(total.a) || !all_finite(total.b); }
  };
  template <bool alternating, bool watched>
  static TW_INLINE void keep2(T* p, Two y, Watch& watch) {
    if constexpr (watched) watch.see(y);
    store2<alternating>(p, y);
  }
  static TW_INLINE void keep(T* p, vf y, Watch& watch) {
    watch.see(y);
    store(p, y);
  }
  static bool finite(T x) { return is_finite(x); }
};

struct B16Reference : B16 {
  struct Watch {
    vs most = vs{};  // of the halves' magnitudes, which are not negative
    TW_INLINE void see(vi halves) {
      const vs magnitude = reinterpret_cast<vs>(halves & 0x7FFF7FFF);
      most = magnitude > most ? magnitude : most;
    }
    bool suspicious() const {
      for (int k = 0; k < 2 * W; ++k)
        if (most[k] >= 0x7F80) return true;
      return false;
    }
  };
  template <bool alternating, bool watched>
  static TW_INLINE void keep2(T* p, Two y, Watch& watch) {
    const vi halves = rounded2<alternating>(y);
    if constexpr (watched) watch.see(halves);
    TW_NS::store(p, halves);
  }
  static TW_INLINE void keep(T* p, vf y, Watch& watch) {
    const vi a = shift_right(rounded(y), 16);
    watch.see(a);
    store_halves(p, a);
  }
  static bool finite(T x) { return (x & 0x7F80) != 0x7F80; }
};

// The reference moves: to <- from + value; then `next` gets the sum.
template <class M, class Next>
struct Move {
  static constexpr bool wants = true;
  const typename M::T* from;
  typename M::T* to;
  Next next;
  typename M::Watch watch{};

  template <bool alternating>
  TW_INLINE void put2(int64_t i, Two value) {
    move2<alternating, true>(i, M::template load2<alternating>(from + i), value);
  }
  // With the reference's values at i; unwatched where their sum cannot overflow.
  template <bool alternating, bool watched>
  TW_INLINE void move2(int64_t i, Two m, Two value) {
    const Two y = {m.a + value.a, m.b + value.b};
    M::template keep2<alternating, watched>(to + i, y, watch);
    next.template put2<alternating>(i, y);
  }
  TW_INLINE void put(int64_t i, vf value) {
    const vf y = M::load(from + i) + value;
    M::keep(to + i, y, watch);
    next.put(i, y);
  }
  TW_INLINE void put_part(int64_t i, vf value, int k) {
    const vf y = load_part<M>(from + i, k) + value;
    typename M::T lanes[W];
    M::keep(lanes, y, watch);
    std::memcpy(to + i, lanes, k * sizeof lanes[0]);
    next.put_part(i, y, k);
  }
  // Whether all of to[a, b) is finite.
  bool finite(int64_t a, int64_t b) const {
    if (watch.suspicious())
      for (int64_t i = a; i < b; ++i)
        if (!M::finite(to[i])) return false;
    return true;
  }
};

// The levels of codes of up to 4 bits, for all 16 of them: scaled, they are a group's values.
TW_INLINE void fill_levels(Mode mode, int bits, float* levels) {
  for (int code = 0; code < 16; ++code) {
    const int c = code & ((1 << bits) - 1);
    const float half = static_cast<float>(1 << (bits - 1));
    switch (mode) {
      case kAffine: levels[code] = static_cast<float>(c); break;
      case kSymmetric: levels[code] = static_cast<float>(c) - (half - 1.0f); break;
      case kStd1: levels[code] = c ? kLloyd1 : -kLloyd1; break;
      case kStd2: levels[code] = (c < 2 ? -1.0f : 1.0f) * kLloyd2[c == 0 || c == 3]; break;
      case kStdMany: levels[code] = (static_cast<float>(c) - (half - 0.5f)) * kUniformStep[bits]; break;
    }
  }
}

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
      const vf magnitude = (code == 0) | (code == 3) ? splat(kLloyd2[1]) : splat(kLloyd2[0]);
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

inline float round_up_bf16(float x) {
  const int32_t b = static_cast<int32_t>((static_cast<uint32_t>(bits_of(x)) + 0xFFFFu) & 0xFFFF0000u);
  return float_of(std::min(b, 0x7F7F0000));
}

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

TW_INLINE float top_level(Mode mode, int bits) {
  const int top = (1 << bits) - 1, half = 1 << (bits - 1);
  switch (mode) {
    case kAffine: return static_cast<float>(top);
    case kSymmetric: return static_cast<float>(half);
    case kStd1: return kLloyd1;
    case kStd2: return kLloyd2[1];
    default: return (static_cast<float>(top) - (static_cast<float>(half) - 0.5f)) * kUniformStep[bits];
  }
}

TW_INLINE float bottom_level(Mode mode, int bits) {
  const float half = static_cast<float>(1 << (bits - 1));
  switch (mode) {
    case kAffine: return 0.0f;
    case kSymmetric: return -(half - 1.0f);
    case kStd1: return -kLloyd1;
    case kStd2: return -kLloyd2[1];
    default: return (0.0f - (half - 0.5f)) * kUniformStep[bits];
  }
}

// Whether every code of a group stands for a finite value.
TW_INLINE bool decodable(Mode mode, int bits, float scale, float offset) {
  const float bottom = scale * bottom_level(mode, bits) + offset;
  const float top = scale * top_level(mode, bits) + offset;
  return is_finite(bottom) && is_finite(top) && scale >= 0;
}

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

// Codes waiting to be packed; whole blocks leave as the buffer fills.
struct Pending {
  static constexpr int64_t kMost = 2048, kRoom = 2 * kMost;
  alignas(64) uint8_t codes[kRoom + 64];
  int64_t filled = 0;
  uint8_t* out = nullptr;
  const Pack pack;
  const int bits;

  explicit Pending(int bits_) : pack(pack_of(bits_)), bits(bits_) {}
  void begin(uint8_t* out_) { filled = 0, out = out_; }
  // Room for kMost codes.
  TW_INLINE uint8_t* end() { return codes + filled; }
  TW_INLINE void add(int64_t count) {
    filled += count;
    if (filled >= kMost) flush(filled / kBlock * kBlock);
  }
  TW_INLINE void flush(int64_t count) {
    pack(codes, count, out);
    out += count / 8 * bits;
    filled -= count;
    if (filled) std::memmove(codes, codes + count, filled);
  }
};

// Encodes rows of one length, batch by batch of groups. (To measure a batch before the one ahead of it
// is coded hides the time that scales take, but walks through memory to and fro, which costs more.)
template <Mode mode, bool stochastic, bool table, class S, class Sink>
class Encoder {
 public:
  Encoder(const tw_format& f, int64_t n)
      : layout(f, n), bits(f.bits), most(layout.group % (2 * W) ? 0 : std::min<int64_t>(W, layout.whole_groups(Pending::kMost))),
        levels(f.bits, layout.symmetric), pending(f.bits) {}

  // Values [a, b) of a row: -1, or the place of one that cannot be coded.
  int64_t run(const S& source_, Sink& sink, int64_t seed, uint8_t* row_, int64_t a, int64_t b) {
    source = source_, row = row_, noise = Noise(seed);
    pending.begin(row + layout.code_at(a));
    const int64_t size = layout.group;
    int64_t g = layout.whole_groups(a), whole = layout.whole_groups(b - a);  // the next group, and whole ones left
    for (int64_t start = a; start < b;) {
      batch.start = start, batch.first = g, batch.count = static_cast<int>(std::min(whole, most));
      if (batch.count > 0 && (size == 128 ? measure_batch<128>() : measure_batch<0>())) {
        code_batch(sink);
        start += batch.count * size;
        g += batch.count;
        whole -= batch.count;
        continue;
      }
      // the careful way, for as many groups as a batch would have had
      for (int k = 0; k < W && start < b; ++k, ++g, --whole, start += size) {
        const int64_t end = std::min(start + size, b);
        Group one;
        if (!measure<mode>(source, start, end, bits, layout.symmetric, &one)) return worst_of(source, start, end);
        layout.put(row, g, one.scale, one.offset);
        if (one.plain)
          code<true>(one, start, end, sink);
        else
          code<false>(one, start, end, sink);
      }
    }
    if (pending.filled) pending.flush(pending.filled);
    return -1;
  }

 private:
  const Row layout;
  const int bits;
  const int64_t most;  // groups in a batch, if there are batches
  const Dequantizer<mode, table> levels;
  S source{};
  uint8_t* row = nullptr;
  Noise noise{0};
  bool mixed = kMaxima;                              // whether groups seem to have values of either sign
  Pending pending;

  static constexpr bool keeps = S::alternating && Sink::wants && is_range(mode);

  // `count` whole groups from number `first` on, at `start`, and what measuring them gave.
  struct Batch {
    int64_t start, first;
    int count;
    float scales[W], offsets[W], inverses[W];
    alignas(64) float kept[keeps ? Pending::kMost : 1];
  };
  Batch batch;

  template <bool plain>
  void code(const Group& g, int64_t a, int64_t b, Sink& sink) {
    const Quantizer<mode, stochastic, plain> quantizer(g, bits);
    const auto dequantizer = levels.group(g.scale, g.offset);
    const S from = source;
    Sink to = sink;  // local ones, whose parts can stay in registers
    for (int64_t i = a; i < b;) {
      const int64_t count = std::min(b - i, Pending::kMost);
      quantize<stochastic, true>(quantizer, dequantizer, from, i, i + count, noise, pending.end(), to, b - a);
      pending.add(count);
      i += count;
    }
    sink = to;
  }

  // False, with nothing done, if one of the groups needs care. `size`: the groups' size where it
  // is known beforehand.
  template <int size>
  bool measure_batch() {
    const int64_t start = batch.start;
    const int count = batch.count;
    const int64_t group = size ? size : layout.group;
    const S from = source;
    vf scale, offset, step;
    if constexpr (is_range(mode)) {
      vf least_, greatest_;
      Two total{};
      const auto measure = [&](const auto& values) __attribute__((always_inline)) {
        if (!(mixed && ranges_by_bits<size>(values, start, count, &least_, &greatest_)))
          ranges<size>(values, start, count, &least_, &greatest_, &total);
      };
      if constexpr (keeps)
        measure(Keeping<S>{from, batch.kept - start});
      else
        measure(from);
      const float top = static_cast<float>(mode == kAffine ? (1 << bits) - 1 : (1 << (bits - 1)) - 1);
      const vf range = mode == kAffine ? greatest_ - least_ : absolute(greatest(greatest_, -least_));
      scale = rounded_up(range / splat(top));
      offset = mode == kAffine ? least_ : vf{};
      step = scale;
      // none lifted (one of equal values may be), no code above the top one, all decodable
      const vi good = (range == 0) | ((step >= splat(kTiny)) & (range * (splat(1.0f) / step) < splat(top + 0.5f)));
      const vf sums = (total.a + total.b) + (greatest_ - least_) + (scale * splat(top_level(mode, bits)) + offset);
      if (!all_true(good & safe(least_) & safe(greatest_)) || !all_finite(sums)) return false;
    } else {
      vf mean[W], squares[W];
      if (!sums<size>(from, start, count, mean, squares)) return false;
      const vf number = splat(static_cast<float>(group));
      scale = rounded_up(root(squares[0] / number));
      offset = (layout.symmetric ? vf{} : mean[0]) + splat(0.0f);
      step = mode == kStdMany ? scale * splat(kUniformStep[bits]) : scale;
      const vi good = (squares[0] >= splat(kLeastSquares)) & (squares[0] <= splat(kMostSquares)) & (step >= splat(kTiny));
      const vf highest = scale * splat(top_level(mode, bits)) + offset, lowest = scale * splat(bottom_level(mode, bits)) + offset;
      if (!all_true(good & safe(lowest) & safe(highest)) || !all_finite(highest + lowest)) return false;
    }
    layout.put(row, batch.first, count, scale, offset);
    store(batch.scales, scale);
    store(batch.offsets, offset);
    store(batch.inverses, step > 0 ? splat(1.0f) / step : vf{});
    return true;
  }

  void code_batch(Sink& sink) {
    const int64_t group = layout.group;
    const S from = source;
    Sink to = sink;
    uint8_t* codes = pending.end();
    for (int g = 0; g < batch.count; ++g, codes += group) {
      Group one;
      one.scale = batch.scales[g];
      one.offset = batch.offsets[g];
      one.inverse = batch.inverses[g];
      const Quantizer<mode, stochastic, true> quantizer(one, bits);
      const auto dequantizer = levels.group(one.scale, one.offset);
      const int64_t a = batch.start + g * group, ahead = S::kBatchesAhead * batch.count * group;
      if constexpr (keeps)
        quantize<stochastic, false>(quantizer, dequantizer, Kept<S>{from, batch.kept - batch.start}, a, a + group, noise, codes,
                             to, ahead);
      else
        quantize<stochastic, false>(quantizer, dequantizer, from, a, a + group, noise, codes, to, ahead);
    }
    sink = to;
    pending.add(batch.count * group);
  }

  // The least and the greatest value of each of `count` groups, + 0.0, since of 0.0 and -0.0 it is
  // either; where one is not finite, so is their difference, or the total.
  template <int size, class V>
  TW_INLINE void ranges(const V& from, int64_t start, int count, vf* lowest, vf* highest, Two* total) {
    const int64_t group = size ? size : layout.group;
    vf lo[W], hi[W];
    for (int g = 0; g < count; ++g) range2(from, start + g * group, start + (g + 1) * group, &lo[g], &hi[g], total);
    *lowest = fold_lanes(lo, count, least) + splat(0.0f);
    *highest = fold_lanes(hi, count, greatest) + splat(0.0f);
    mixed = kMaxima && all_true((*lowest < 0) & (*highest > 0));
  }
  // The same in half the time, if all groups have values of either sign; else false.
  template <int size, class V>
  TW_INLINE bool ranges_by_bits(const V& from, int64_t start, int count, vf* lowest, vf* highest) const {
    const int64_t group = size ? size : layout.group;
    vf low[W], high[W];
    for (int g = 0; g < count; ++g) {
      const Extremes seen = from.extremes(start + g * group, start + (g + 1) * group);
      low[g] = float_of(reinterpret_cast<vi>(seen.low));
      high[g] = float_of(seen.high);
    }
    const auto greater = [](vf a, vf b) __attribute__((always_inline)) { return float_of(maximum(bits_of(a), bits_of(b))); };
    const auto beyond = [](vf a, vf b) __attribute__((always_inline)) {
      return reinterpret_cast<vf>(maximum(reinterpret_cast<vu>(a), reinterpret_cast<vu>(b)));
    };
    const vf l = fold_lanes(low, count, beyond), h = fold_lanes(high, count, greater);
    *lowest = l + splat(0.0f);
    *highest = h + splat(0.0f);
    return all_true(bits_of(l) & ~bits_of(h));
  }

  // Whether no finite reference, of either type, overflows when moved by so much.
  static TW_INLINE vi safe(vf extreme) {
    return Sink::wants ? absolute(extreme) < splat(kSafeMove) : vi{} - 1;
  }
  static TW_INLINE vf rounded_up(vf x) {
    const vi b = (bits_of(x) + 0xFFFF) & ~0xFFFF;
    return float_of(b < 0x7F7F0000 ? b : splat(0x7F7F0000));
  }
  // Vectors first, first + step, … (`vectors` of them) of the group at `start`, summed by halving.
  template <int vectors, class F>
  static TW_INLINE vf halved(const S& from, int64_t start, int first, int step, const F& f) {
    if constexpr (vectors == 1)
      return f(from.at(start + first * W));
    else
      return halved<vectors / 2>(from, start, first, 2 * step, f) +
             halved<vectors / 2>(from, start, first + step, 2 * step, f);
  }
  template <int vectors>
  TW_INLINE void sums_of(const S& from, int64_t start, int count, vf* mean, vf* squares) const {
    constexpr int64_t group = vectors * W;
    const vf one = hidden_one();
    float middle[W] = {};
    if (!layout.symmetric) {
      for (int g = 0; g < count; ++g)
        mean[g] = halved<vectors>(from, start + g * group, 0, 1, [](vf x) __attribute__((always_inline)) { return x; });
      mean[0] = fold_lanes(mean, count, sum) / splat(static_cast<float>(group));
      store(middle, mean[0]);
    }
    for (int g = 0; g < count; ++g) {
      const vf m = splat(middle[g]);
      squares[g] = halved<vectors>(from, start + g * group, 0, 1, [&](vf x) __attribute__((always_inline)) {
        const vf c = minus(x, m, one);
        return c * c;
      });
    }
    squares[0] = fold_lanes(squares, count, sum);
  }
  template <int size>
  TW_INLINE bool sums(const S& from, int64_t start, int count, vf* mean, vf* squares) const {
    if constexpr (size) {
      sums_of<size / W>(from, start, count, mean, squares);
      return true;
    }
    switch (layout.group) {
      case 32: sums_of<32 / W>(from, start, count, mean, squares); return true;
      case 64: sums_of<64 / W>(from, start, count, mean, squares); return true;
      case 256: sums_of<256 / W>(from, start, count, mean, squares); return true;
      case 512: sums_of<512 / W>(from, start, count, mean, squares); return true;
      case 1024: sums_of<1024 / W>(from, start, count, mean, squares); return true;
      default: return false;
    }
  }
};

// Whether all parameters of a row's groups are such that every code stands for a finite value.
inline bool valid_row(const tw_format& f, int64_t n, const uint8_t* row) {
  const Row layout(f, n);
  const Mode mode = mode_of(f);
  const float bottom = bottom_level(mode, f.bits), top = top_level(mode, f.bits);
  vi good = ~vi{};
  const auto check = [&](vf scale, vf offset) __attribute__((always_inline)) {
    const vi low = bits_of(scale * splat(bottom) + offset), high = bits_of(scale * splat(top) + offset);
    good &= ((low & 0x7F800000) != 0x7F800000) & ((high & 0x7F800000) != 0x7F800000) & (scale >= 0);
  };
  int64_t g = 0;
  for (; g + W <= layout.groups; g += W) {
    uint16_t halves[W];
    std::memcpy(halves, row + 2 * g, sizeof halves);
    check(B16::load(halves), layout.symmetric ? vf{} : load<vf>(row + layout.offsets + 4 * g));
  }
  for (; g < layout.groups; ++g) {
    float scale, offset;
    layout.get(row, g, &scale, &offset);
    check(splat(scale), splat(offset));
  }
  return all_true(good);
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

// Decodes rows of one length.
template <Mode mode, bool table>
class Decoder {
 public:
  Decoder(const tw_format& f, int64_t n)
      : layout(f, n), unpack(unpack_of(f.bits)), levels(f.bits, layout.symmetric),
        nibbles(table && f.bits == 4 && layout.group % (2 * W) == 0 && (layout.group % kHalf == 0 || kHalf % layout.group == 0)) {}

  // Values [a, b) of a row, as Kernels::decode says, into the sink.
  template <class Sink>
  void run(int64_t a, int64_t b, const uint8_t* row, Sink& out) const {
    Sink sink = out;  // a local one, whose parts can stay in registers
    if constexpr (table)
      if (nibbles) a = layout.group <= kHalf ? small_groups(a, b, row, sink) : large_groups(a, b, row, sink);
    if (a < b) by_pieces(a, b, row, sink);
    out = sink;
  }

 private:
  typedef Dequantizer<mode, table> Group;
  static constexpr int64_t kPiece = 1024, kHalf = kBlock / 2;
  const Row layout;
  const Unpack unpack;
  const Group levels;
  const bool nibbles;  // whether whole blocks can be decoded from their bytes

  TW_INLINE Group group(const uint8_t* row, int64_t g) const {
    float scale, offset;
    layout.get(row, g, &scale, &offset);
    return levels.group(scale, offset);
  }

  // Whole blocks from a on, of groups that halve half a block, or are a multiple of it; where they end.
  template <class Sink>
  TW_INLINE int64_t small_groups(int64_t a, int64_t b, const uint8_t* row, Sink& sink) const {
    const int64_t size = layout.group, apart = layout.whole_groups(kHalf);
    for (int64_t first = layout.whole_groups(a); b - a >= kBlock; a += kBlock, first += 2 * apart)
      for (int64_t k = 0; k < apart; ++k)
        dequantize_nibbles(group(row, first + k), group(row, first + apart + k), row + layout.code_at(a), a, k * size,
                           (k + 1) * size, sink);
    return a;
  }
  template <class Sink>
  TW_INLINE int64_t large_groups(int64_t a, int64_t b, const uint8_t* row, Sink& sink) const {
    int64_t g = layout.whole_groups(a), left = (g + 1) * layout.group - a;  // of the group, in values
    Group now = group(row, g);
    const auto advance = [&]() __attribute__((always_inline)) {
      const Group before = now;
      if ((left -= kHalf) == 0 && g + 1 < layout.groups) now = group(row, ++g), left = layout.group;
      return before;
    };
    for (; b - a >= kBlock; a += kBlock) {
      const Group low = advance(), high = advance();
      dequantize_nibbles(low, high, row + layout.code_at(a), a, 0, kHalf, sink);
    }
    return a;
  }

  template <class Sink>
  TW_INLINE void by_pieces(int64_t a, int64_t b, const uint8_t* row, Sink& sink) const {
    alignas(64) uint8_t codes[kPiece + 8];
    int64_t g = layout.whole_groups(a), end = std::min((g + 1) * layout.group, b);
    Group now = group(row, g);
    for (int64_t piece = a; piece < b; piece += kPiece) {
      const int64_t stop = std::min(piece + kPiece, b);
      unpack(row + layout.code_at(piece), stop - piece, codes);
      for (int64_t i = piece; i < stop;) {
        if (i == end) {
          now = group(row, ++g);
          end = std::min(end + layout.group, b);
        }
        const int64_t until = std::min(end, stop);
        dequantize(now, codes + (i - piece), i, until, sink);
        i = until;
      }
    }
  }
};

}  // namespace TW_NS
}  // namespace tw
