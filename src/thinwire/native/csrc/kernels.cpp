// The kernels, compiled once for each level of the instruction set: -DTW_LEVEL=baseline, v3 or v4.
#define TW_JOIN_(a, b) a##b
#define TW_JOIN(a, b) TW_JOIN_(a, b)
#define TW_STRING_(a) #a
#define TW_STRING(a) TW_STRING_(a)
#define TW_NS TW_JOIN(level_, TW_LEVEL)

#include "level.h"
#include "hadamard.h"
#include "integer.h"
#include "scratch.h"
#include "tile.h"
#include "topk_entry.h"

namespace tw {
namespace TW_NS {
namespace {

template <class E>
const typename E::T* as(const void* p) { return static_cast<const typename E::T*>(p); }
template <class E>
typename E::T* as(void* p) { return static_cast<typename E::T*>(p); }

// Calls f(E{}) for the element type that `dtype` names.
template <class F>
auto with_dtype(int dtype, const F& f) {
  switch (dtype) {
    case TW_BF16: return f(B16{});
    case TW_F16: return f(H16{});
    default: return f(F32{});
  }
}
// Without float16, which callers of the fused steps widen first.
template <class F>
auto with_wide_dtype(int dtype, const F& f) {
  return dtype == TW_BF16 ? f(B16{}) : f(F32{});
}
template <class F>
auto with_reference(Reference reference, const F& f) {
  return reference.dtype == TW_BF16 ? f(B16Reference{}) : f(F32Reference{});
}

template <Mode mode_, bool stochastic_, bool table_>
struct Choice {
  static constexpr Mode mode = mode_;
  static constexpr bool stochastic = stochastic_, table = table_;
};

// Calls f(Choice{}) for the format; where no values come of the codes, tables make no difference.
template <bool values, class F>
auto with_mode(const tw_format& f, const F& visit) {
  constexpr bool on = values && W == 16;
  const bool table = on && has_table(f.bits), stochastic = f.flags & TW_STOCHASTIC;
  switch (mode_of(f)) {
    case kAffine:
      if (stochastic) return table ? visit(Choice<kAffine, true, on>{}) : visit(Choice<kAffine, true, false>{});
      return table ? visit(Choice<kAffine, false, on>{}) : visit(Choice<kAffine, false, false>{});
    case kSymmetric:
      if (stochastic) return table ? visit(Choice<kSymmetric, true, on>{}) : visit(Choice<kSymmetric, true, false>{});
      return table ? visit(Choice<kSymmetric, false, on>{}) : visit(Choice<kSymmetric, false, false>{});
    case kStd1: return visit(Choice<kStd1, false, on>{});
    case kStd2: return visit(Choice<kStd2, false, on>{});
    default: return table ? visit(Choice<kStdMany, false, on>{}) : visit(Choice<kStdMany, false, false>{});
  }
}

int64_t row_nbytes(const tw_format& f, int64_t n) { return Row(f, n).nbytes(); }

template <class S, class Sink>
int64_t encode_from(const tw_format& f, int64_t n, int64_t a, int64_t b, int64_t seed, const S& source, Sink& sink,
                    uint8_t* row) {
  return with_mode<Sink::wants>(f, [&](auto c) {
    typedef decltype(c) C;
    Encoder<C::mode, C::stochastic, C::table, S, Sink> encoder(f, n, a, seed, source, sink, row);
    return encoder.run(a, b);
  });
}

int64_t plain_encode(const tw_format& f, int dtype, const void* x, int64_t n, int64_t a, int64_t b, int64_t seed,
                     uint8_t* row) {
  return with_dtype(dtype, [&](auto e) {
    typedef decltype(e) E;
    const Values<E, std::is_same<E, B16>::value> source{as<E>(x)};
    Nowhere sink;
    return encode_from(f, n, a, b, seed, source, sink, row);
  });
}

template <class Sink>
void decode_into(const tw_format& f, int64_t n, int64_t a, int64_t b, const uint8_t* row, Sink& sink) {
  tw_format nearest = f;  // how a code was rounded does not matter
  nearest.flags &= ~TW_STOCHASTIC;
  with_mode<true>(nearest, [&](auto c) {
    typedef decltype(c) C;
    if constexpr (!C::stochastic) decode_range<C::mode, C::table>(f, n, a, b, row, sink);
    return 0;
  });
}

bool can_stream(const tw_format& f, int64_t n, const void* y) {
  return reinterpret_cast<uintptr_t>(y) % (4 * W) == 0 && Row(f, n).group % W == 0;
}

void plain_decode(const tw_format& f, const uint8_t* row, int64_t n, int64_t a, int64_t b, int dtype, void* y,
                  bool streaming) {
  if (dtype == TW_F32 && streaming && can_stream(f, n, y)) {
    Write<F32, true> sink{as<F32>(y)};
    return decode_into(f, n, a, b, row, sink);
  }
  with_dtype(dtype, [&](auto e) {
    Write<decltype(e), false> sink{as<decltype(e)>(y)};
    decode_into(f, n, a, b, row, sink);
  });
}

int64_t plain_delta_encode(const tw_format& f, int dtype, const void* x, Reference reference, const void* from,
                           void* to, int64_t n, int64_t a, int64_t b, int64_t seed, uint8_t* row) {
  return with_wide_dtype(dtype, [&](auto e) {
    return with_reference(reference, [&](auto r) {
      typedef decltype(e) E;
      typedef decltype(r) M;
      constexpr bool alternating = std::is_same<E, B16>::value && std::is_same<M, B16Reference>::value;
      const Change<E, M, alternating> source{as<E>(x), as<M>(from)};
      Move<M, Nowhere> sink{as<M>(from), as<M>(to), {}};
      const int64_t bad = encode_from(f, n, a, b, seed, source, sink, row);
      return bad < 0 && !sink.finite(a, b) ? worst_of(Values<E, false>{as<E>(x)}, a, b) : bad;
    });
  });
}

int64_t plain_delta_decode(const tw_format& f, const uint8_t* row, Reference reference, const void* from, void* to,
                           int64_t n, int64_t a, int64_t b, int dtype, void* y, bool streaming) {
  return with_reference(reference, [&](auto r) -> int64_t {
    typedef decltype(r) M;
    const auto run = [&](auto next) -> int64_t {
      Move<M, decltype(next)> sink{as<M>(from), as<M>(to), next};
      decode_into(f, n, a, b, row, sink);
      return sink.finite(a, b) ? -1 : a;
    };
    if (y == nullptr) return run(Nowhere{});
    if (dtype == TW_BF16) return run(Write<B16, false>{as<B16>(y)});
    if (streaming && can_stream(f, n, y)) return run(Write<F32, true>{as<F32>(y)});
    return run(Write<F32, false>{as<F32>(y)});
  });
}

// Rotated values, and packed references, are worked on span by span, as floats that stay in the cache.

constexpr int64_t kSpan = 4096;
constexpr Reference kPlain = {TW_F32, nullptr};

int64_t span_of(const tw_format& f, const tw_format& other, int64_t n) {
  if (f.group == 0 || other.group == 0) return n;
  int64_t span = f.group;
  while (span % kBlock || span % other.group) {
    span += f.group;
    if (span > 4 * kSpan) return n;
  }
  return std::max(span, kSpan / span * span);
}

// Calls step(start, end, floats) for spans of [a, b), each a multiple of both formats' groups, with
// room for its values at floats[start …]; ends with the first place reported.
template <class Step>
int64_t for_spans(const tw_format& f, const tw_format& other, Slot slot, int64_t n, int64_t a, int64_t b,
                  const Step& step) {
  const int64_t span = span_of(f, other, n);
  float* const floats = static_cast<float*>(scratch(slot, (std::min(span, b - a) + W) * 4));
  for (int64_t start = a; start < b; start += span) {
    const int64_t bad = step(start, std::min(start + span, b), floats - start);
    if (bad >= 0) return bad;
  }
  return -1;
}

bool is_rotated(const tw_format& f) { return f.flags & TW_HADAMARD; }

tw_format without_rotation(tw_format f) {
  f.flags &= ~TW_HADAMARD;
  return f;
}

// What every decoded value of a rotated row has to stay within: turned back, it cannot overflow.
float rotatable(const Row& layout) {
  int exponent = 127;
  for (int64_t size = layout.group; size > 1; size /= 2) --exponent;
  return std::ldexp(1.0f, exponent);
}

// The start of the first group of [a, b) with values beyond that, or -1.
int64_t beyond_rotation(const tw_format& f, int64_t n, int64_t a, int64_t b, const uint8_t* row) {
  const Row layout(f, n);
  const Mode mode = mode_of(f);
  const float bottom = bottom_level(mode, f.bits), top = top_level(mode, f.bits), limit = rotatable(layout);
  for (int64_t start = a; start < b; start += layout.group) {
    float scale, offset;
    layout.get(row, start / layout.group, &scale, &offset);
    const float lowest = std::fabs(scale * bottom + offset), highest = std::fabs(scale * top + offset);
    if (!(lowest <= limit && highest <= limit)) return start;
  }
  return -1;
}

bool valid(const tw_format& f, int64_t n, const uint8_t* row) {
  return valid_row(f, n, row) && (!is_rotated(f) || beyond_rotation(f, n, 0, n, row) < 0);
}

template <class S>
void rotate(const S& source, int64_t a, int64_t b, int64_t group, float* floats) {
  for_signs(a, b, [&](int64_t i, uint32_t word) __attribute__((always_inline)) {
    if (i + W <= b) {
      store(floats + i, turned_by(source.at(i), word));
    } else {
      const int k = static_cast<int>(b - i);
      store_part<F32>(floats + i, turned_by(source.part(i, k), word), k);
    }
  });
  transform_groups(floats + a, b - a, group);
}

template <class Sink>
void unrotate(float* floats, int64_t a, int64_t b, int64_t group, Sink& out) {
  Sink sink = out;  // a local one, whose parts can stay in registers
  transform_groups(floats + a, b - a, group);
  for_signs(a, b, [&](int64_t i, uint32_t word) __attribute__((always_inline)) {
    const vf value = turned_by(load<vf>(floats + i), word);
    if (i + W <= b)
      sink.put(i, value);
    else
      sink.put_part(i, value, static_cast<int>(b - i));
  });
  out = sink;
}

// Encodes the rotated values of the source; then calls after(start, end, floats), floats being free.
template <class S, class After>
int64_t rotated_encode(const tw_format& f, int64_t n, int64_t a, int64_t b, int64_t seed, const S& source,
                       uint8_t* row, const After& after) {
  const int64_t group = Row(f, n).group;
  return for_spans(f, f, kRotatedSlot, n, a, b, [&](int64_t start, int64_t end, float* floats) -> int64_t {
    rotate(source, start, end, group, floats);
    int64_t bad = plain_encode(without_rotation(f), TW_F32, floats, n, start, end, seed, row);
    if (bad < 0) bad = beyond_rotation(f, n, start, end, row);
    if (bad < 0) return after(start, end, floats);
    const int64_t first = bad / group * group;
    return worst_of(source, first, std::min(first + group, end));
  });
}

template <class Sink>
void rotated_decode(const tw_format& f, const uint8_t* row, int64_t n, int64_t start, int64_t end, float* floats,
                    Sink& sink) {
  plain_decode(without_rotation(f), row, n, start, end, TW_F32, floats, false);
  unrotate(floats, start, end, Row(f, n).group, sink);
}

int64_t encode(const tw_format& f, int dtype, const void* x, int64_t n, int64_t a, int64_t b, int64_t seed,
               uint8_t* row) {
  if (!is_rotated(f)) return plain_encode(f, dtype, x, n, a, b, seed, row);
  return with_dtype(dtype, [&](auto e) {
    const Values<decltype(e), false> source{as<decltype(e)>(x)};
    return rotated_encode(f, n, a, b, seed, source, row, [](int64_t, int64_t, float*) -> int64_t { return -1; });
  });
}

void decode(const tw_format& f, const uint8_t* row, int64_t n, int64_t a, int64_t b, int dtype, void* y,
            bool streaming) {
  if (!is_rotated(f)) return plain_decode(f, row, n, a, b, dtype, y, streaming);
  const auto into = [&](auto sink) {
    for_spans(f, f, kRotatedSlot, n, a, b, [&](int64_t start, int64_t end, float* floats) -> int64_t {
      rotated_decode(f, row, n, start, end, floats, sink);
      return -1;
    });
  };
  if (dtype == TW_F32 && streaming && reinterpret_cast<uintptr_t>(y) % (4 * W) == 0)
    return into(Write<F32, true>{as<F32>(y)});
  with_dtype(dtype, [&](auto e) { into(Write<decltype(e), false>{as<decltype(e)>(y)}); });
}

int64_t rotated_delta_encode(const tw_format& f, int dtype, const void* x, Reference reference, const void* from,
                             void* to, int64_t n, int64_t a, int64_t b, int64_t seed, uint8_t* row) {
  return with_wide_dtype(dtype, [&](auto e) {
    return with_reference(reference, [&](auto r) {
      typedef decltype(e) E;
      typedef decltype(r) M;
      const Change<E, M, false> source{as<E>(x), as<M>(from)};
      return rotated_encode(f, n, a, b, seed, source, row, [&](int64_t start, int64_t end, float* floats) -> int64_t {
        Move<M, Nowhere> sink{as<M>(from), as<M>(to), {}};
        rotated_decode(f, row, n, start, end, floats, sink);
        return sink.finite(start, end) ? -1 : worst_of(Values<E, false>{as<E>(x)}, start, end);
      });
    });
  });
}

int64_t rotated_delta_decode(const tw_format& f, const uint8_t* row, Reference reference, const void* from, void* to,
                             int64_t n, int64_t a, int64_t b, int dtype, void* y) {
  return with_reference(reference, [&](auto r) -> int64_t {
    typedef decltype(r) M;
    const auto run = [&](auto next) -> int64_t {
      return for_spans(f, f, kRotatedSlot, n, a, b, [&](int64_t start, int64_t end, float* floats) -> int64_t {
        Move<M, decltype(next)> sink{as<M>(from), as<M>(to), next};
        rotated_decode(f, row, n, start, end, floats, sink);
        return sink.finite(start, end) ? -1 : start;
      });
    };
    if (y == nullptr) return run(Nowhere{});
    if (dtype == TW_BF16) return run(Write<B16, false>{as<B16>(y)});
    return run(Write<F32, false>{as<F32>(y)});
  });
}

// Calls step(start, end, floats) with the reference's values [start, end), which lie at
// floats[start …], and stores what it makes of them in `to`; ends with the first place reported.
template <class Step>
int64_t over_spans(const tw_format& f, const tw_format& packed, const void* from, void* to, int64_t n, int64_t a,
                   int64_t b, const Step& step) {
  return for_spans(f, packed, kReferenceSlot, n, a, b, [&](int64_t start, int64_t end, float* values) -> int64_t {
    decode(packed, static_cast<const uint8_t*>(from), n, start, end, TW_F32, values, false);
    int64_t bad = step(start, end, values);
    if (bad < 0 && to) bad = encode(packed, TW_F32, values, n, start, end, 0, static_cast<uint8_t*>(to));
    return bad;
  });
}

int64_t delta_encode(const tw_format& f, int dtype, const void* x, Reference reference, const void* from, void* to,
                     int64_t n, int64_t a, int64_t b, int64_t seed, uint8_t* row) {
  const auto encode_change = is_rotated(f) ? rotated_delta_encode : plain_delta_encode;
  if (!reference.packed) return encode_change(f, dtype, x, reference, from, to, n, a, b, seed, row);
  return over_spans(f, *reference.packed, from, to, n, a, b, [&](int64_t start, int64_t end, float* values) {
    return encode_change(f, dtype, x, kPlain, values, values, n, start, end, seed, row);
  });
}

int64_t delta_decode(const tw_format& f, const uint8_t* row, Reference reference, const void* from, void* to,
                     int64_t n, int64_t a, int64_t b, int dtype, void* y, bool streaming) {
  const auto decode_change = [&](Reference m, const void* before, void* after, int64_t start, int64_t end) {
    if (is_rotated(f)) return rotated_delta_decode(f, row, m, before, after, n, start, end, dtype, y);
    return plain_delta_decode(f, row, m, before, after, n, start, end, dtype, y, streaming);
  };
  if (!reference.packed) return decode_change(reference, from, to, a, b);
  return over_spans(f, *reference.packed, from, to, n, a, b, [&](int64_t start, int64_t end, float* values) {
    return decode_change(kPlain, values, values, start, end);
  });
}

template <class S>
void block_sums(const S& source, int64_t a, int64_t b, float* sums) {
  const auto square = [](vf x) __attribute__((always_inline)) { return x * x; };
  for (int64_t start = a; start < b; start += kBlock)
    sums[start / kBlock] = tree_sum(source, start, std::min(start + kBlock, b), square);
}

void plain_energies(int dtype, const void* x, Reference reference, const void* from, int64_t a, int64_t b,
                    float* change, float* value) {
  with_wide_dtype(dtype, [&](auto e) {
    typedef decltype(e) E;
    with_reference(reference, [&](auto r) {
      typedef decltype(r) M;
      block_sums(Change<E, M, false>{as<E>(x), as<M>(from)}, a, b, change);
    });
    block_sums(Values<E, false>{as<E>(x)}, a, b, value);
  });
}

void energies(int dtype, const void* x, Reference reference, const void* from, int64_t n, int64_t a, int64_t b,
              float* change, float* value) {
  if (!reference.packed) return plain_energies(dtype, x, reference, from, a, b, change, value);
  over_spans(*reference.packed, *reference.packed, from, nullptr, n, a, b,
             [&](int64_t start, int64_t end, float* values) -> int64_t {
               plain_energies(dtype, x, kPlain, values, start, end, change, value);
               return -1;
             });
}

// float `fold` needs a power of two: zeros pad.
float total(float* sums, int64_t count) {
  const int64_t width = padded_width(count);
  for (int64_t k = count; k < width; ++k) sums[k] = 0.0f;
  return count ? fold(sums, width) : 0.0f;
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw

extern "C" const tw::Kernels* TW_JOIN(tw_kernels_, TW_LEVEL)() {
  using namespace tw::TW_NS;
  static const tw::Kernels table = {TW_STRING(TW_LEVEL), row_nbytes,   encode,   valid, decode,
                                    delta_encode,        delta_decode, energies, total, topk_table,
                                    tile_table};
  return &table;
}
