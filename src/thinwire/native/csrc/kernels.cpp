// The kernels, compiled once for each level of the instruction set: -DTW_LEVEL=baseline, v3 or v4.
#define TW_JOIN_(a, b) a##b
#define TW_JOIN(a, b) TW_JOIN_(a, b)
#define TW_STRING_(a) #a
#define TW_STRING(a) TW_STRING_(a)
#define TW_NS TW_JOIN(level_, TW_LEVEL)

#include "level.h"
#include "decode.h"
#include "encode.h"
#include "expect.h"
#include "hadamard.h"
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

Rows one_row(int64_t n, int64_t a, int64_t b) { return {1, n, a, b}; }

template <class E>
const typename E::T* row_of(Source x, int64_t r) { return as<E>(x.p) + r * x.stride; }
template <class E>
typename E::T* row_of(Target y, int64_t r) { return as<E>(y.p) + r * y.stride; }

// Calls step(r, row) for every row, row being its place in the payload.
template <class Byte, class Step>
int64_t for_each_row(const tw_format& f, Rows rows, Byte* payload, const Step& step) {
  const int64_t width = row_nbytes(f, rows.n);
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t bad = step(r, payload + r * width);
    if (bad >= 0) return r * rows.n + bad;
  }
  return -1;
}

// Encodes rows from source_of(r), their decoded values going into sink_of(r); after each calls
// done(r, sink), which returns the place of a value that cannot be coded, or -1.
template <class SourceOf, class SinkOf, class Done>
int64_t encode_rows(const tw_format& f, Rows rows, const int64_t* seeds, uint8_t* payload, const SourceOf& source_of,
                    const SinkOf& sink_of, const Done& done) {
  typedef decltype(source_of(0)) S;
  typedef decltype(sink_of(0)) Sink;
  return with_mode<Sink::wants>(f, [&](auto c) {
    typedef decltype(c) C;
    Encoder<C::mode, C::stochastic, C::table, S, Sink> encoder(f, rows.n);
    return for_each_row(f, rows, payload, [&](int64_t r, uint8_t* row) {
      Sink sink = sink_of(r);
      const int64_t bad = encoder.run(source_of(r), sink, seeds ? seeds[r] : 0, row, rows.a, rows.b);
      return bad < 0 ? done(r, sink) : bad;
    });
  });
}

int64_t plain_encode(const tw_format& f, Rows rows, Source x, const int64_t* seeds, uint8_t* payload) {
  return with_dtype(x.dtype, [&](auto e) {
    typedef decltype(e) E;
    return encode_rows(
        f, rows, seeds, payload,
        [&](int64_t r) { return Values<E, std::is_same<E, B16>::value>{row_of<E>(x, r)}; },
        [](int64_t) { return Nowhere{}; }, [](int64_t, const Nowhere&) -> int64_t { return -1; });
  });
}

// Decodes rows into sink_of(r); after each calls done(r, sink), which returns the place of a value
// that cannot be, or -1. `checked`: whether the rows' parameters are known to be valid.
template <class SinkOf, class Done>
int64_t decode_rows(const tw_format& f, Rows rows, const uint8_t* payload, bool checked, const SinkOf& sink_of,
                    const Done& done) {
  tw_format nearest = f;  // how a code was rounded does not matter
  nearest.flags &= ~TW_STOCHASTIC;
  return with_mode<true>(nearest, [&](auto c) -> int64_t {
    typedef decltype(c) C;
    if constexpr (!C::stochastic) {
      const Decoder<C::mode, C::table> decoder(f, rows.n);
      return for_each_row(f, rows, payload, [&](int64_t r, const uint8_t* row) -> int64_t {
        if (!checked && !valid_row(f, rows.n, row)) return 0;
        auto sink = sink_of(r);
        decoder.run(rows.a, rows.b, row, sink);
        return done(r, sink);
      });
    }
    return -1;
  });
}

bool can_stream(const tw_format& f, Rows rows, Target y) {
  const bool aligned = reinterpret_cast<uintptr_t>(y.p) % (4 * W) == 0 && (rows.count == 1 || y.stride % W == 0);
  return y.dtype == TW_F32 && aligned && Row(f, rows.n).group % W == 0;
}

// Calls f(sink) with a sink (of the first row) for values to be written to y.
template <class F>
auto with_target(const tw_format& f, Rows rows, Target y, bool streaming, const F& visit) {
  if (streaming && can_stream(f, rows, y)) return visit(Write<F32, true>{as<F32>(y.p)});
  return with_dtype(y.dtype, [&](auto e) { return visit(Write<decltype(e), false>{as<decltype(e)>(y.p)}); });
}

int64_t plain_decode(const tw_format& f, Rows rows, const uint8_t* payload, Target y, bool streaming, bool checked) {
  return with_target(f, rows, y, streaming, [&](auto first) {
    typedef decltype(first) Sink;
    return decode_rows(
        f, rows, payload, checked, [&](int64_t r) { return Sink{first.y + r * y.stride}; },
        [](int64_t, const Sink&) -> int64_t { return -1; });
  });
}

int64_t plain_delta_encode(const tw_format& f, Rows rows, Source x, Reference reference, const void* const* from,
                           void* const* to, const int64_t* seeds, uint8_t* payload) {
  return with_wide_dtype(x.dtype, [&](auto e) {
    return with_reference(reference, [&](auto m) {
      typedef decltype(e) E;
      typedef decltype(m) M;
      constexpr bool alternating = std::is_same<E, B16>::value && std::is_same<M, B16Reference>::value;
      typedef Move<M, Nowhere> Sink;
      return encode_rows(
          f, rows, seeds, payload,
          [&](int64_t r) { return Change<E, M, alternating>{row_of<E>(x, r), as<M>(from[r])}; },
          [&](int64_t r) { return Sink{as<M>(from[r]), as<M>(to[r]), {}}; },
          [&](int64_t r, const Sink& sink) -> int64_t {
            if (sink.finite(rows.a, rows.b)) return -1;
            return worst_of(Values<E, false>{row_of<E>(x, r)}, rows.a, rows.b);
          });
    });
  });
}

int64_t plain_delta_decode(const tw_format& f, Rows rows, const uint8_t* payload, Reference reference,
                           const void* const* from, void* const* to, Target y, bool streaming, bool checked) {
  return with_reference(reference, [&](auto m) -> int64_t {
    typedef decltype(m) M;
    const auto run = [&](auto next_of) {
      typedef Move<M, decltype(next_of(0))> Sink;
      return decode_rows(
          f, rows, payload, checked, [&](int64_t r) { return Sink{as<M>(from[r]), as<M>(to[r]), next_of(r)}; },
          [&](int64_t, const Sink& sink) -> int64_t { return sink.finite(rows.a, rows.b) ? -1 : rows.a; });
    };
    if (y.p == nullptr) return run([](int64_t) { return Nowhere{}; });
    if (y.dtype == TW_BF16) return run([&](int64_t r) { return Write<B16, false>{row_of<B16>(y, r)}; });
    if (streaming && can_stream(f, rows, y)) return run([&](int64_t r) { return Write<F32, true>{row_of<F32>(y, r)}; });
    return run([&](int64_t r) { return Write<F32, false>{row_of<F32>(y, r)}; });
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
int64_t rotated_encode(const tw_format& f, int64_t n, int64_t a, int64_t b, const int64_t* seed, const S& source,
                       uint8_t* row, const After& after) {
  const int64_t group = Row(f, n).group;
  return for_spans(f, f, kRotatedSlot, n, a, b, [&](int64_t start, int64_t end, float* floats) -> int64_t {
    rotate(source, start, end, group, floats);
    int64_t bad = plain_encode(without_rotation(f), one_row(n, start, end), {TW_F32, floats, 0}, seed, row);
    if (bad < 0) bad = beyond_rotation(f, n, start, end, row);
    if (bad < 0) return after(start, end, floats);
    const int64_t first = bad / group * group;
    return worst_of(source, first, std::min(first + group, end));
  });
}

template <class Sink>
void rotated_decode(const tw_format& f, const uint8_t* row, int64_t n, int64_t start, int64_t end, float* floats,
                    Sink& sink) {
  plain_decode(without_rotation(f), one_row(n, start, end), row, {TW_F32, floats, 0}, false, true);
  unrotate(floats, start, end, Row(f, n).group, sink);
}

int64_t encode(const tw_format& f, Rows rows, Source x, const int64_t* seeds, uint8_t* payload) {
  if (!is_rotated(f)) return plain_encode(f, rows, x, seeds, payload);
  return with_dtype(x.dtype, [&](auto e) {
    typedef decltype(e) E;
    return for_each_row(f, rows, payload, [&](int64_t r, uint8_t* row) {
      return rotated_encode(f, rows.n, rows.a, rows.b, seeds ? seeds + r : nullptr, Values<E, false>{row_of<E>(x, r)},
                            row, [](int64_t, int64_t, float*) -> int64_t { return -1; });
    });
  });
}

int64_t decode_checked(const tw_format& f, Rows rows, const uint8_t* payload, Target y, bool streaming, bool checked) {
  if (!is_rotated(f)) return plain_decode(f, rows, payload, y, streaming, checked);
  return with_target(f, rows, y, streaming, [&](auto first) {
    return for_each_row(f, rows, payload, [&](int64_t r, const uint8_t* row) -> int64_t {
      if (!checked && !valid(f, rows.n, row)) return 0;
      decltype(first) sink{first.y + r * y.stride};
      return for_spans(f, f, kRotatedSlot, rows.n, rows.a, rows.b, [&](int64_t start, int64_t end, float* floats) -> int64_t {
        rotated_decode(f, row, rows.n, start, end, floats, sink);
        return -1;
      });
    });
  });
}

int64_t decode(const tw_format& f, Rows rows, const uint8_t* payload, Target y, bool streaming) {
  return decode_checked(f, rows, payload, y, streaming, rows.a > 0);
}

int64_t rotated_delta_encode(const tw_format& f, Rows rows, Source x, Reference reference, const void* const* from,
                             void* const* to, const int64_t* seeds, uint8_t* payload) {
  return with_wide_dtype(x.dtype, [&](auto e) {
    return with_reference(reference, [&](auto m) {
      typedef decltype(e) E;
      typedef decltype(m) M;
      return for_each_row(f, rows, payload, [&](int64_t r, uint8_t* row) {
        const Change<E, M, false> source{row_of<E>(x, r), as<M>(from[r])};
        const auto move = [&](int64_t start, int64_t end, float* floats) -> int64_t {
          Move<M, Nowhere> sink{as<M>(from[r]), as<M>(to[r]), {}};
          rotated_decode(f, row, rows.n, start, end, floats, sink);
          return sink.finite(start, end) ? -1 : worst_of(Values<E, false>{row_of<E>(x, r)}, start, end);
        };
        return rotated_encode(f, rows.n, rows.a, rows.b, seeds ? seeds + r : nullptr, source, row, move);
      });
    });
  });
}

int64_t rotated_delta_decode(const tw_format& f, Rows rows, const uint8_t* payload, Reference reference,
                             const void* const* from, void* const* to, Target y, bool, bool checked) {
  return with_reference(reference, [&](auto m) -> int64_t {
    typedef decltype(m) M;
    const auto run = [&](auto next_of) {
      return for_each_row(f, rows, payload, [&](int64_t r, const uint8_t* row) -> int64_t {
        if (!checked && !valid(f, rows.n, row)) return 0;
        return for_spans(f, f, kRotatedSlot, rows.n, rows.a, rows.b, [&](int64_t start, int64_t end, float* floats) -> int64_t {
          Move<M, decltype(next_of(0))> sink{as<M>(from[r]), as<M>(to[r]), next_of(r)};
          rotated_decode(f, row, rows.n, start, end, floats, sink);
          return sink.finite(start, end) ? -1 : start;
        });
      });
    };
    if (y.p == nullptr) return run([](int64_t) { return Nowhere{}; });
    if (y.dtype == TW_BF16) return run([&](int64_t r) { return Write<B16, false>{row_of<B16>(y, r)}; });
    return run([&](int64_t r) { return Write<F32, false>{row_of<F32>(y, r)}; });
  });
}

// Calls step(start, end, floats) with the reference's values [start, end), which lie at
// floats[start …], and stores what it makes of them in `to`; ends with the first place reported.
template <class Step>
int64_t over_spans(const tw_format& f, const tw_format& packed, const void* from, void* to, int64_t n, int64_t a,
                   int64_t b, const Step& step) {
  return for_spans(f, packed, kReferenceSlot, n, a, b, [&](int64_t start, int64_t end, float* values) -> int64_t {
    const Rows span = one_row(n, start, end);
    decode_checked(packed, span, static_cast<const uint8_t*>(from), {TW_F32, values, 0}, false, true);
    int64_t bad = step(start, end, values);
    if (bad < 0 && to) bad = encode(packed, span, {TW_F32, values, 0}, nullptr, static_cast<uint8_t*>(to));
    return bad;
  });
}

int64_t delta_encode(const tw_format& f, Rows rows, Source x, Reference reference, const void* const* from,
                     void* const* to, const int64_t* seeds, uint8_t* payload) {
  const auto encode_change = is_rotated(f) ? rotated_delta_encode : plain_delta_encode;
  if (!reference.packed) return encode_change(f, rows, x, reference, from, to, seeds, payload);
  return with_wide_dtype(x.dtype, [&](auto e) {
    return for_each_row(f, rows, payload, [&](int64_t r, uint8_t* row) {
      const Source values_of_row = {x.dtype, row_of<decltype(e)>(x, r), 0};
      const auto step = [&](int64_t start, int64_t end, float* values) {
        void* const moved = values;
        const void* const before = values;
        return encode_change(f, one_row(rows.n, start, end), values_of_row, kPlain, &before, &moved,
                             seeds ? seeds + r : nullptr, row);
      };
      return over_spans(f, *reference.packed, from[r], to[r], rows.n, rows.a, rows.b, step);
    });
  });
}

int64_t delta_decode(const tw_format& f, Rows rows, const uint8_t* payload, Reference reference,
                     const void* const* from, void* const* to, Target y, bool streaming) {
  const auto decode_change = is_rotated(f) ? rotated_delta_decode : plain_delta_decode;
  const bool checked = rows.a > 0;  // with the row's first values
  if (!reference.packed) return decode_change(f, rows, payload, reference, from, to, y, streaming, checked);
  return for_each_row(f, rows, payload, [&](int64_t r, const uint8_t* row) -> int64_t {
    if (!checked && !valid(f, rows.n, row)) return 0;
    const Target out = {y.dtype, y.p ? (y.dtype == TW_BF16 ? static_cast<void*>(row_of<B16>(y, r)) : row_of<F32>(y, r)) : nullptr, 0};
    const auto step = [&](int64_t start, int64_t end, float* values) {
      void* const moved = values;
      const void* const before = values;
      return decode_change(f, one_row(rows.n, start, end), row, kPlain, &before, &moved, out, streaming, true);
    };
    return over_spans(f, *reference.packed, from[r], to[r], rows.n, rows.a, rows.b, step);
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
  static const tw::Kernels table = {TW_STRING(TW_LEVEL), row_nbytes, encode,     decode,    delta_encode,
                                    delta_decode,        energies,   total,      topk_table, tile_table,
                                    expect_table};
  return &table;
}
