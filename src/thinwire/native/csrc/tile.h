// The codec tile, as native/tile.py defines it: a row of values to bytes and back.
//
// Tiles are measured and scaled W at a time, so that what is computed once a tile is computed in
// vectors. Encoding reads a row twice: all scales have to be known before the first width is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hadamard.h"
#include "level.h"
#include "planes.h"
#include "scratch.h"
#include "tile_types.h"

namespace tw {
namespace TW_NS {
namespace tile {

constexpr int kTile = 32, kVectors = kTile / W, kNarrowest = 2, kWidest = 8;
constexpr int kHighest = 168, kLargest = 0x7F7, kRotatableLog = 0x7B8;  // the latter: of 2**120
constexpr int kAhead = 16384;  // bytes that are fetched early: of the next row, where rows are short
constexpr int kRotated = 0x80, kNegative = 0x40, kCode = 0x3F;
constexpr float kRotatable = 1329227995784915872903807060280344576.0f;  // 2**120
constexpr float kTinyScale = 8.6736173798840355e-19f;                    // 2**-60
constexpr float kTinyLift = 18446744073709551616.0f;                     // 2**64
constexpr float kTileScale = 0.17677669529663687f;                       // 2**-2.5
constexpr float kScales[2] = {1.0f, kTileScale};                          // by whether a tile is rotated

// Where the parts of a row lie.
struct Layout {
  int64_t tiles, count, units, body, rest, nbytes;
  int bits, left;  // values in the short tile

  Layout(int bits_, int64_t n) : tiles(n / kTile), bits(bits_), left(static_cast<int>(n % kTile)) {
    count = tiles + (left > 0);
    units = tiles ? bits * tiles - (tiles + 5) / 4 : 0;
    body = 2 + count;
    rest = body + 4 * units;
    nbytes = n ? rest + (left + 7) / 8 * bits : 0;
  }
};

TW_INLINE vi at_most(vi a, vi b) { return a < b ? a : b; }
TW_INLINE vi at_least(vi a, vi b) { return a > b ? a : b; }

// As types: a function that is passed on may not be inlined.
struct Least {
  TW_INLINE vf operator()(vf a, vf b) const { return least(a, b); }
};
struct Greatest {
  TW_INLINE vf operator()(vf a, vf b) const { return greatest(a, b); }
};

// The values of one tile.
struct Tile {
  vf v[kVectors];

  template <class E>
  TW_INLINE void load(const typename E::T* x) {
    for (int k = 0; k < kVectors; ++k) v[k] = E::load(x + k * W);
  }
  TW_INLINE void turn_signs(uint32_t word) {
    for (int k = 0; k < kVectors; ++k) v[k] = turned_by(v[k], word >> (k * W));
  }
  // The butterflies alone; kTileScale is left to the caller.
  TW_INLINE void cross() {
    cross_vectors<kVectors>(v);
    for (int k = 0; k < kVectors; ++k) v[k] = crossed_below<W>(v[k]);
  }
  TW_INLINE void keep(float* to) const {
    for (int k = 0; k < kVectors; ++k) store(to + k * W, v[k]);
  }
  template <class Fold>
  TW_INLINE vf folded(Fold fold) const {
    vf x[kVectors];
    for (int k = 0; k < kVectors; ++k) x[k] = v[k];
    for (int h = kVectors / 2; h; h /= 2)
      for (int k = 0; k < h; ++k) x[k] = fold(x[k], x[k + h]);
    return x[0];
  }
};

// The words of signs of W tiles.
TW_INLINE void sign_words(int64_t first, uint32_t* words) {
  vu x;
  for (int k = 0; k < W; ++k) x[k] = static_cast<uint32_t>(k);
  x = (x + static_cast<uint32_t>(first)) ^ kSignSeed;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  store(words, x ^ (x >> 16));
}

// The logarithm of a peak, and the flags of its tile.
TW_INLINE vi log_of(vf peak, int rounding) {
  // unsigned: the bits of a NaN, whose row is refused elsewhere, may pass the greatest int
  const vu bits = reinterpret_cast<vu>(peak) + static_cast<uint32_t>(rounding);
  return at_most(reinterpret_cast<vi>(bits >> 20), splat(kLargest));
}
inline int rounding_of(int bits) { return bits <= 4 ? 1 << 19 : 7 << 17; }

struct Measured {
  vi log, flags;
};

TW_INLINE Measured measured(vf low, vf high, vf turned_low, vf turned_high, int rounding) {
  const vf plain = absolute(greatest(high, -low)), turned = absolute(greatest(turned_high, -turned_low));
  const vi rotated = (turned < plain) & (plain < splat(kRotatable));
  const vf peak = rotated ? turned : plain;
  const vi negative = (rotated ? turned_high : high) > -(rotated ? turned_low : low);
  return {log_of(peak, rounding), (rotated & kRotated) | (negative & kNegative)};
}

// The values of a short tile, with zeros after them; rotated as well.
template <class E>
inline void short_tile(const typename E::T* x, const Layout& layout, float* plain, float* turned) {
  std::memset(plain, 0, kTile * 4);
  for (int k = 0; k < layout.left; k += W) {
    const int here = std::min(W, layout.left - k);
    store_part<F32>(plain + k, load_part<E>(x + k, here), here);
  }
  const uint32_t word = sign_word(layout.tiles);
  for (int k = 0; k < kTile; k += W) store(turned + k, turned_by(load<vf>(plain + k), word >> k));
  for (int k = layout.left; k < kTile; ++k) turned[k] = 0.0f;
  transform_groups(turned, layout.left, kTile);
}

// Rows of up to this many values are rotated once: what comes of it waits in the cache.
constexpr int64_t kTurnedOnce = 1 << 16;

// What is known of a row's tiles: heights (in encoding, at first logarithms) and heads, with room for
// whole vectors; in encoding rows that are not too long, the rotated values of the full tiles.
struct Tiles {
  float* turned = nullptr;
  int32_t* heights;
  uint8_t* heads;

  Tiles(const Layout& layout, bool encoding) {
    const int64_t padded = (layout.count + 2 * W - 1) / W * W;
    const int64_t values = encoding && layout.tiles * kTile <= kTurnedOnce ? layout.tiles * kTile : 0;
    float* const floats = static_cast<float*>(scratch(kTileSlot, 4 * values + 5 * padded));
    if (values) turned = floats;
    heights = reinterpret_cast<int32_t*>(floats + values);
    heads = reinterpret_cast<uint8_t*>(heights + padded);
  }
};

// Logarithms and flags of all tiles; false if a value may not be finite. One that is not leaves no
// value of its rotated tile finite.
template <class E, bool once>
bool measure(const typename E::T* x, const Layout& layout, const Tiles& tiles) {
  const int rounding = rounding_of(layout.bits);
  vf total = vf{};
  for (int64_t first = 0; first < layout.tiles; first += W) {
    const int count = static_cast<int>(std::min<int64_t>(W, layout.tiles - first));
    vf low[W], high[W], turned_low[W], turned_high[W];
    uint32_t words[W];
    sign_words(first, words);
    for (int t = 0; t < count; ++t) {
      const typename E::T* const from = x + (first + t) * kTile;
      for (int k = 0; k < kTile * static_cast<int>(sizeof *x); k += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead + k);
      Tile tile;
      tile.load<E>(from);
      low[t] = tile.folded(Least{});
      high[t] = tile.folded(Greatest{});
      tile.turn_signs(words[t]);
      tile.cross();
      if constexpr (once) tile.keep(tiles.turned + (first + t) * kTile);
      turned_low[t] = tile.folded(Least{});
      turned_high[t] = tile.folded(Greatest{});
    }
    for (int t = count; t < W; ++t)
      low[t] = low[0], high[t] = high[0], turned_low[t] = turned_low[0], turned_high[t] = turned_high[0];
    // rounding is monotone: the extremes of products are the products of extremes
    const vf scale = splat(kTileScale);
    const vf lowest = fold_lanes(turned_low, Least{}) * scale, highest = fold_lanes(turned_high, Greatest{}) * scale;
    const Measured m = measured(fold_lanes(low, Least{}), fold_lanes(high, Greatest{}), lowest, highest, rounding);
    total += highest - lowest;
    store(tiles.heights + first, m.log);
    store_codes(tiles.heads + first, m.flags);
  }
  if (layout.left) {
    float plain[kTile], turned[kTile];
    short_tile<E>(x + layout.tiles * kTile, layout, plain, turned);
    Tile p, q;
    p.load<F32>(plain);
    q.load<F32>(turned);
    const auto all = [](vf v, auto fold) { return splat(reduce(v, fold)); };
    const Measured m = measured(all(p.folded(Least{}), Least{}), all(p.folded(Greatest{}), Greatest{}),
                                all(q.folded(Least{}), Least{}), all(q.folded(Greatest{}), Greatest{}), rounding);
    tiles.heights[layout.tiles] = m.log[0];
    tiles.heads[layout.tiles] = static_cast<uint8_t>(m.flags[0]);
    for (int k = 0; k < kVectors; ++k) total += p.v[k];
  }
  return all_finite(total);
}

TW_INLINE vi height_of(vi code) { return at_most(code * 8, code + 105); }

// Logarithms to heights, flags to heads; returns top.
inline int32_t finish_heads(const Layout& layout, const Tiles& tiles) {
  for (int k = 0; k < W; ++k) tiles.heights[layout.count + k] = 0;
  vi most = vi{};
  for (int64_t i = 0; i < layout.count; i += W) most = at_least(most, load<vi>(tiles.heights + i));
  int32_t top = 0;
  for (int k = 0; k < W; ++k) top = std::max(top, static_cast<int32_t>(most[k]));
  for (int64_t i = 0; i < layout.count; i += W) {
    const vi log = load<vi>(tiles.heights + i);
    const vi height = at_least(log - top + kHighest, vi{}) & (log > 0);
    const vi code = at_least(height - 105, shift_right(height + 7, 3));
    store(tiles.heights + i, height_of(code));
    store_codes(tiles.heads + i, (load_codes(tiles.heads + i) | code) & (code > 0));
  }
  return top;
}

// The scales that heights stand for.
TW_INLINE vf scale_of(vi height, int32_t top) {
  return float_of((at_least(height + (top - kHighest), vi{}) << 20) & (height > 0));
}

TW_INLINE vi width_at(vi height, int32_t t) {
  return at_most(at_least((height - t) >> 3, splat(kNarrowest)), splat(kWidest));
}

TW_INLINE int32_t lanes_sum(vi x) {
#if defined(__AVX512F__)
  x += bits_of(upper<16>(float_of(x)));
#endif
#if defined(__AVX2__)
  x += bits_of(upper<8>(float_of(x)));
#endif
  x += bits_of(upper<4>(float_of(x)));
  x += bits_of(upper<2>(float_of(x)));
  return x[0];
}

// The widths of a row's full tiles, W by W in order: the least t where they fit, and what is left.
class Widths {
 public:
  // `heights` has room for whole vectors; what lies beyond the full tiles is overwritten.
  Widths(const Layout& layout, int32_t* heights_) : heights(heights_) {
    const int64_t padded = (layout.tiles + W - 1) / W * W;
    for (int64_t i = layout.tiles; i < padded; ++i) heights[i] = INT32_MIN / 2;  // the narrowest
    const int64_t units = layout.units + kNarrowest * (padded - layout.tiles);
    int32_t below = -65;
    t = 145;
    for (int k = 0; k < 8; ++k) {
      const int32_t middle = (below + t) >> 1;
      (total(padded, middle) <= units ? t : below) = middle;
    }
    left = units - total(padded, t);
  }

  TW_INLINE vi next(int64_t first) {
    const vi height = load<vi>(heights + first);
    vi width = width_at(height, t);
    if (left > 0) {
      vi more = width_at(height, t - 1) - width;
      for (int k = 0; k < W; ++k) {
        if (left == 0) more[k] = 0;
        left -= more[k];
      }
      width += more;
    }
    return width;
  }

 private:
  int32_t* const heights;
  int32_t t;
  int64_t left;

  int64_t total(int64_t padded, int32_t at) const {
    int64_t all = 0;
    for (int64_t i = 0; i < padded;) {
      vi part = vi{};
      for (const int64_t end = std::min<int64_t>(padded, i + (1 << 24)); i < end; i += W)
        part += width_at(load<vi>(heights + i), at);
      all += lanes_sum(part);
    }
    return all;
  }
};

TW_INLINE uint64_t word_at(const void* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

// One tile's planes and its codes, as vectors. `pack_tile` writes 4 * width bytes, and whatever else up
// to 32; `unpack_tile` reads up to 32 bytes.
#if defined(__AVX2__)

// Where the planes of a width lie, in bytes, and how they are cut out; mask 0 where one is not there.
struct Planes {
  int64_t two, one;
  uint64_t mask_four, mask_two, mask_one;
  int64_t shift_two, shift_one;

  constexpr explicit Planes(int width)
      : two(width & 4 ? 16 : 0), one(two + (width & 2 ? 8 : 0)), mask_four(width & 4 ? 0x0F0F0F0F0F0F0F0F : 0),
        mask_two(width & 2 ? 0x0303030303030303 : 0), mask_one(width & 1 ? 0x0101010101010101 : 0),
        shift_two(width & 4), shift_one(width & 6) {}
};
constexpr Planes kPlanes[] = {Planes(0), Planes(1), Planes(2), Planes(3), Planes(4), Planes(5), Planes(6), Planes(7)};

TW_INLINE __m256i all_words(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }

TW_INLINE __m128i halves_joined(__m256i x) {
  return _mm_or_si128(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

TW_INLINE __m256i bytes_of(const vi* codes) {
#if defined(__AVX512F__)
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(codes[0]))),
                                 _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(codes[1])), 1);
#else
  const __m256i packed = _mm256_packus_epi16(
      _mm256_packus_epi32(reinterpret_cast<__m256i>(codes[0]), reinterpret_cast<__m256i>(codes[1])),
      _mm256_packus_epi32(reinterpret_cast<__m256i>(codes[2]), reinterpret_cast<__m256i>(codes[3])));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
}

TW_INLINE void pack_tile(const vi* codes, int width, uint8_t* out) {
  const __m256i bytes = bytes_of(codes);
  if (width == 8) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  const Planes& planes = kPlanes[width];
  const __m256i each = _mm256_setr_epi64x(0, 2, 4, 6);
  const __m256i a = _mm256_sllv_epi64(_mm256_and_si256(bytes, all_words(0x0F0F0F0F0F0F0F0F)),
                                      _mm256_setr_epi64x(0, 0, 4, 4)),
                b = _mm256_srl_epi64(bytes, _mm_cvtsi64_si128(planes.shift_two)),
                c = _mm256_srl_epi64(bytes, _mm_cvtsi64_si128(planes.shift_one));
  const __m128i four = halves_joined(a),
                two = halves_joined(_mm256_sllv_epi64(_mm256_and_si256(b, all_words(0x0303030303030303)), each)),
                pairs = halves_joined(_mm256_sllv_epi64(_mm256_and_si256(c, all_words(0x0101010101010101)), each)),
                one = _mm_or_si128(pairs, _mm_unpackhi_epi64(pairs, pairs));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), four);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out + planes.two), _mm_or_si128(two, _mm_unpackhi_epi64(two, two)));
  const int last = _mm_cvtsi128_si32(_mm_or_si128(one, _mm_srli_epi64(one, 31)));
  std::memcpy(out + planes.one, &last, 4);
}

TW_INLINE __m256i unpacked(const uint8_t* in, int width) {
  if (width == 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  const Planes& planes = kPlanes[width];
  uint32_t last;
  std::memcpy(&last, in + planes.one, 4);
  const __m256i four = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))),
                two = all_words(word_at(in + planes.two)), one = _mm256_set1_epi32(static_cast<int32_t>(last));
  const __m256i a = _mm256_and_si256(_mm256_srlv_epi64(four, _mm256_setr_epi64x(0, 0, 4, 4)),
                                     all_words(planes.mask_four)),
                b = _mm256_and_si256(_mm256_srlv_epi64(two, _mm256_setr_epi64x(0, 2, 4, 6)),
                                     all_words(planes.mask_two)),
                c = _mm256_and_si256(_mm256_srlv_epi32(one, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
                                     all_words(planes.mask_one));
  return _mm256_or_si256(a, _mm256_or_si256(_mm256_sll_epi64(b, _mm_cvtsi64_si128(planes.shift_two)),
                                            _mm256_sll_epi64(c, _mm_cvtsi64_si128(planes.shift_one))));
}

TW_INLINE void unpack_tile(const uint8_t* in, int width, vi* codes) {
  const __m256i bytes = unpacked(in, width);
#if defined(__AVX512F__)
  codes[0] = reinterpret_cast<vi>(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes)));
  codes[1] = reinterpret_cast<vi>(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1)));
#else
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  codes[0] = reinterpret_cast<vi>(_mm256_cvtepu8_epi32(low));
  codes[1] = reinterpret_cast<vi>(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(low, low)));
  codes[2] = reinterpret_cast<vi>(_mm256_cvtepu8_epi32(high));
  codes[3] = reinterpret_cast<vi>(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(high, high)));
#endif
}

#else

TW_INLINE void pack_tile(const vi* all, int width, uint8_t* out) {
  alignas(16) uint8_t codes[kTile];
  for (int k = 0; k < kVectors; k += 4) store_codes4<false>(codes + k * W, all + k);
  if (width == 8) {
    std::memcpy(out, codes, kTile);
    return;
  }
  const uint64_t a = word_at(codes), b = word_at(codes + 8), c = word_at(codes + 16), d = word_at(codes + 24);
  constexpr uint64_t k4 = 0x0F0F0F0F0F0F0F0F, k2 = 0x0303030303030303, k1 = 0x0101010101010101;
  const uint64_t four[2] = {(a & k4) | (c & k4) << 4, (b & k4) | (d & k4) << 4};
  std::memcpy(out, four, 16);
  out += width & 4 ? 16 : 0;
  int shift = width & 4;
  const uint64_t two =
      (a >> shift & k2) | (b >> shift & k2) << 2 | (c >> shift & k2) << 4 | (d >> shift & k2) << 6;
  std::memcpy(out, &two, 8);
  out += width & 2 ? 8 : 0;
  shift = width & 6;
  const uint64_t pairs =
      (a >> shift & k1) | (b >> shift & k1) << 2 | (c >> shift & k1) << 4 | (d >> shift & k1) << 6;
  const uint32_t one = static_cast<uint32_t>(pairs) | static_cast<uint32_t>(pairs >> 32) << 1;
  std::memcpy(out, &one, 4);
}

TW_INLINE void unpack_tile(const uint8_t* in, int width, vi* codes) {
  constexpr uint64_t k4 = 0x0F0F0F0F0F0F0F0F, k2 = 0x0303030303030303, k1 = 0x0101010101010101;
  uint64_t all[4] = {};
  if (width == 8) std::memcpy(all, in, kTile);
  if (width & 4) {
    const uint64_t p = word_at(in), q = word_at(in + 8);
    all[0] = p & k4, all[1] = q & k4, all[2] = p >> 4 & k4, all[3] = q >> 4 & k4;
    in += 16;
  }
  if (width & 2) {
    const uint64_t p = word_at(in);
    const int shift = width & 4;
    for (int k = 0; k < 4; ++k) all[k] |= (p >> (2 * k) & k2) << shift;
    in += 8;
  }
  if (width & 1) {
    uint32_t q;
    std::memcpy(&q, in, 4);
    const uint64_t p = q | static_cast<uint64_t>(q >> 1) << 32;
    const int shift = width & 6;
    for (int k = 0; k < 4; ++k) all[k] |= (p >> (2 * k) & k1) << shift;
  }
  for (int k = 0; k < kVectors; ++k) codes[k] = load_codes(reinterpret_cast<uint8_t*>(all) + k * W);
}

#endif

// 2**(width - 1)
TW_INLINE vf half_of(vi width) { return float_of((width + 126) << 23); }

// How the values of W tiles become codes: what each is multiplied by (`scale`, of the rotation, is
// left to the caller), and bounds.
struct Steps {
  float lift[W], inverse[W], bottom[W], top[W];
  int32_t half[W];
  bool lifted;

  Steps(vf scale, vi width, vi head) {
    const vf halves = half_of(width);
    const vi tiny = (scale < splat(kTinyScale)) & (scale > vf{});
    const vf lifts = tiny ? splat(kTinyLift) : splat(1.0f);
    const vf inverses = scale > vf{} ? halves / (scale * lifts) : vf{};
    lifted = any_negative(tiny);
    store(lift, lifts);
    store(inverse, float_of(bits_of(inverses) ^ ((head & kNegative) << 25)));
    store(bottom, -halves);
    store(top, halves - splat(1.0f));
    store(half, truncate(halves));
  }

  TW_INLINE void codes(const Tile& tile, int t, float scale, vi* out) const {
    for (int k = 0; k < kVectors; ++k) {
      vf x = tile.v[k] * splat(scale);
      if (lifted) x *= splat(lift[t]);
      x *= splat(inverse[t]);
      out[k] = nearest(least(greatest(x, splat(bottom[t])), splat(top[t]))) + half[t];
    }
  }
};

template <class E, bool once>
void write_tiles(const typename E::T* x, const Layout& layout, const Tiles& tiles, int32_t top, uint8_t* row) {
  Widths widths(layout, tiles.heights);
  uint8_t *out = row + layout.body, *const end = row + layout.rest;
  for (int64_t first = 0; first < layout.tiles; first += W) {
    const int count = static_cast<int>(std::min<int64_t>(W, layout.tiles - first));
    const vi width = widths.next(first);
    const vf scale = scale_of(load<vi>(tiles.heights + first), top);
    const Steps steps(scale, width, load_codes(tiles.heads + first));
    int32_t each[W];
    uint32_t words[W];
    store(each, width);
    if constexpr (!once) sign_words(first, words);
    for (int t = 0; t < count; ++t) {
      const bool rotated = tiles.heads[first + t] & kRotated;
      Tile tile;
      if constexpr (once && sizeof *x == 4) {
        const float* const from[2] = {x, tiles.turned};
        tile.load<F32>(from[rotated] + (first + t) * kTile);
      } else if (once && rotated) {
        tile.load<F32>(tiles.turned + (first + t) * kTile);
      } else {
        tile.load<E>(x + (first + t) * kTile);
        if constexpr (!once) {
          if (rotated) {
            tile.turn_signs(words[t]);
            tile.cross();
          }
        }
      }
      vi codes[kVectors];
      steps.codes(tile, t, kScales[rotated], codes);
      if (end - out >= kTile) {
        pack_tile(codes, each[t], out);
      } else {
        uint8_t packed[kTile];
        pack_tile(codes, each[t], packed);
        std::memcpy(out, packed, 4 * each[t]);
      }
      out += 4 * each[t];
    }
  }
}

template <class E>
void write_short_tile(const typename E::T* x, const Layout& layout, int32_t height, uint8_t head, int32_t top,
                      uint8_t* row) {
  float values[2][kTile];
  short_tile<E>(x + layout.tiles * kTile, layout, values[0], values[1]);
  const Steps steps(scale_of(splat(height), top), splat(layout.bits), splat(static_cast<int32_t>(head)));
  Tile tile;
  tile.load<F32>(values[head >= kRotated]);
  vi each[kVectors];
  steps.codes(tile, 0, 1.0f, each);
  uint8_t codes[kTile];
  for (int k = 0; k < kVectors; ++k) store_codes(codes + k * W, each[k]);
  pack_of(layout.bits)(codes, layout.left, row + layout.rest);
}

template <class E, bool once>
int64_t encode_tiles(const typename E::T* x, int64_t n, const Layout& layout, const Tiles& tiles, uint8_t* row) {
  if (!measure<E, once>(x, layout, tiles))
    for (int64_t i = 0; i < n; ++i)
      if (!is_finite(load_part<E>(x + i, 1)[0])) return i;
  const int32_t top = finish_heads(layout, tiles);
  row[0] = static_cast<uint8_t>(top);
  row[1] = static_cast<uint8_t>(top >> 8);
  std::memcpy(row + 2, tiles.heads, layout.count);
  const int64_t last = layout.count - 1;
  const int32_t height = tiles.heights[last];  // Widths overwrites a short tile's
  write_tiles<E, once>(x, layout, tiles, top, row);
  if (layout.left) write_short_tile<E>(x, layout, height, tiles.heads[last], top, row);
  return -1;
}

template <class E>
int64_t encode_row(int bits, const void* values, int64_t n, uint8_t* row) {
  const typename E::T* const x = static_cast<const typename E::T*>(values);
  const Layout layout(bits, n);
  const Tiles tiles(layout, true);
  if (n == 0) return -1;
  return tiles.turned ? encode_tiles<E, true>(x, n, layout, tiles, row)
                      : encode_tiles<E, false>(x, n, layout, tiles, row);
}

inline int32_t top_of(const uint8_t* row) { return row[0] | row[1] << 8; }

inline bool valid_row(int bits, int64_t n, const uint8_t* row) {
  if (n == 0) return true;
  const int32_t top = top_of(row);
  if (top <= kRotatableLog) return true;
  if (top > kLargest) return false;
  const Layout layout(bits, n);
  for (int64_t i = 0; i < layout.count; ++i) {
    const int code = row[2 + i] & kCode, height = std::min(8 * code, code + 105);
    if (row[2 + i] & kRotated && top - kHighest + height > kRotatableLog) return false;
  }
  return true;
}

template <class E, bool streaming>
void read_tiles(const uint8_t* row, const Layout& layout, const Tiles& tiles, typename E::T* y) {
  const int32_t top = top_of(row);
  Widths widths(layout, tiles.heights);
  const uint8_t *in = row + layout.body, *const end = row + layout.rest;
  for (int64_t first = 0; first < layout.tiles; first += W) {
    const int count = static_cast<int>(std::min<int64_t>(W, layout.tiles - first));
    const vi width = widths.next(first);
    const vf half = half_of(width), size = scale_of(load<vi>(tiles.heights + first), top) / half;
    const vi sign = (load_codes(tiles.heads + first) & kNegative) << 25;
    float steps[W], halves[W];
    int32_t each[W];
    uint32_t words[W];
    store(steps, float_of(bits_of(size) ^ sign));
    store(halves, half);
    store(each, width);
    sign_words(first, words);
    for (int t = 0; t < count; ++t) {
      vi codes[kVectors];
      if (end - in >= kTile) {
        unpack_tile(in, each[t], codes);
      } else {
        uint8_t packed[kTile] = {};
        std::memcpy(packed, in, 4 * each[t]);
        unpack_tile(packed, each[t], codes);
      }
      in += 4 * each[t];
      Tile tile;
      const vf middle = splat(halves[t]), step = splat(steps[t]);
      for (int k = 0; k < kVectors; ++k) tile.v[k] = (to_float(codes[k]) - middle) * step;
      if (tiles.heads[first + t] & kRotated) {
        tile.cross();
        for (int k = 0; k < kVectors; ++k) tile.v[k] *= splat(kTileScale);
        tile.turn_signs(words[t]);
      }
      for (int k = 0; k < kVectors; ++k) {
        typename E::T* const to = y + (first + t) * kTile + k * W;
        if constexpr (streaming)
          E::stream(to, tile.v[k]);
        else
          E::store(to, tile.v[k]);
      }
    }
  }
}

template <class E>
void read_short_tile(const uint8_t* row, const Layout& layout, int32_t height, uint8_t head, typename E::T* y) {
  const vf half = half_of(splat(layout.bits));
  vf step = scale_of(splat(height), top_of(row)) / half;
  if (head & kNegative) step = -step;
  uint8_t codes[kTile] = {};
  unpack_of(layout.bits)(row + layout.rest, layout.left, codes);
  float values[kTile];
  for (int k = 0; k < kTile; k += W) store(values + k, (to_float(load_codes(codes + k)) - half) * step);
  const bool rotated = head & kRotated;
  if (rotated) transform_groups(values, layout.left, kTile);
  const uint32_t word = rotated ? sign_word(layout.tiles) : 0;
  y += layout.tiles * kTile;
  for (int k = 0; k < layout.left; k += W)
    store_part<E>(y + k, turned_by(load<vf>(values + k), word >> k), std::min(W, layout.left - k));
}

template <class E>
void decode_row(int bits, const uint8_t* row, int64_t n, void* values, bool streaming) {
  typename E::T* const y = static_cast<typename E::T*>(values);
  const Layout layout(bits, n);
  const Tiles tiles(layout, false);
  if (n == 0) return;
  std::memcpy(tiles.heads, row + 2, layout.count);
  for (int64_t i = 0; i < layout.count; i += W)
    store(tiles.heights + i, height_of(load_codes(tiles.heads + i) & kCode));
  const int64_t last = layout.count - 1;
  const int32_t height = tiles.heights[last];
  if constexpr (sizeof *y == 4) {
    if (streaming && reinterpret_cast<uintptr_t>(y) % (4 * W) == 0)
      read_tiles<E, true>(row, layout, tiles, y);
    else
      read_tiles<E, false>(row, layout, tiles, y);
  } else {
    read_tiles<E, false>(row, layout, tiles, y);
  }
  if (layout.left) read_short_tile<E>(row, layout, height, tiles.heads[last], y);
}

inline int64_t row_nbytes(int bits, int64_t n) { return Layout(bits, n).nbytes; }

inline int64_t encode(int bits, int dtype, const void* x, int64_t n, uint8_t* row) {
  switch (dtype) {
    case TW_BF16: return encode_row<B16>(bits, x, n, row);
    case TW_F16: return encode_row<H16>(bits, x, n, row);
    default: return encode_row<F32>(bits, x, n, row);
  }
}

inline void decode(int bits, const uint8_t* row, int64_t n, int dtype, void* y, bool streaming) {
  switch (dtype) {
    case TW_BF16: return decode_row<B16>(bits, row, n, y, false);
    case TW_F16: return decode_row<H16>(bits, row, n, y, false);
    default: return decode_row<F32>(bits, row, n, y, streaming);
  }
}

}  // namespace tile

inline const TileKernels& tile_table() {
  static const TileKernels table = {tile::row_nbytes, tile::encode, tile::valid_row, tile::decode};
  return table;
}

}  // namespace TW_NS
}  // namespace tw
