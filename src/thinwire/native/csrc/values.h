// Where values come from (a tensor, or its change from a reference), and where they go.
#pragma once

#include <cstring>

#include "simd.h"

namespace tw {
namespace TW_NS {

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

}  // namespace TW_NS
}  // namespace tw
