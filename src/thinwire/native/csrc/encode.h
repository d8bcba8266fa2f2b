// Rows of values to payloads, as native/reference.py defines them.
//
// Two ways lead to the same bytes. The fast one takes W groups at a time, so that scales are computed
// in vectors, and leaves out what ordinary groups do not need. Groups that might (values that are not
// finite, scales near the ends of float32, odd sizes) go the careful way, one at a time.
#pragma once

#include "measure.h"

namespace tw {
namespace TW_NS {

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
      : layout(f, n), bits(f.bits),
        most(layout.group % (2 * W) ? 0 : std::min<int64_t>(W, layout.whole_groups(Pending::kMost))), levels(f.bits, layout.symmetric),
        pending(f.bits) {}

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
  bool mixed = kMaxima;  // whether groups seem to have values of either sign
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
      const auto code = [&](const auto& values) __attribute__((always_inline)) {
        quantize<stochastic, false>(quantizer, dequantizer, values, a, a + group, noise, codes, to, ahead);
      };
      if constexpr (keeps)
        code(Kept<S>{from, batch.kept - batch.start});
      else
        code(from);
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
  // For groups of few enough vectors: all are one expression, which takes the compiler its time.
  template <int group>
  TW_INLINE bool sums_if_short(const S& from, int64_t start, int count, vf* mean, vf* squares) const {
    if constexpr (group / W <= 64) {
      sums_of<group / W>(from, start, count, mean, squares);
      return true;
    }
    return false;
  }
  template <int size>
  TW_INLINE bool sums(const S& from, int64_t start, int count, vf* mean, vf* squares) const {
    if constexpr (size) {
      sums_of<size / W>(from, start, count, mean, squares);
      return true;
    }
    switch (layout.group) {
      case 32: return sums_if_short<32>(from, start, count, mean, squares);
      case 64: return sums_if_short<64>(from, start, count, mean, squares);
      case 256: return sums_if_short<256>(from, start, count, mean, squares);
      case 512: return sums_if_short<512>(from, start, count, mean, squares);
      case 1024: return sums_if_short<1024>(from, start, count, mean, squares);
      default: return false;
    }
  }
};

}  // namespace TW_NS
}  // namespace tw
