// Exact top-k selection: the threshold of a row's k largest magnitudes, and the pass that keeps them.
//
// A magnitude is compared by its *key*, the bits without the sign: order of keys = order of |x| for
// every float format, subnormals and both zeros included. The result is a threshold key and the
// number of ties: kept are all keys above it, and of those equal to it the first `ties`.
//
// Short rows: bisection of the key range by vectorized counts, in the first-level cache. Long rows:
// a sample gives a bracket around the threshold (R. Floyd, R. Rivest, "Expected time bounds for
// selection", 1975); one pass counts what lies above and collects what lies inside, from which the
// same function selects. A bracket that misses, or holds too much, falls back to a radix
// histogram, so the time is linear for every input.
//
// No std:: templates here: a copy compiled for a higher level could be linked into a lower one.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if (defined(__SSE2__) || defined(__AVX2__) || defined(__AVX512F__)) && !defined(TW_PORTABLE)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(TW_PORTABLE)
#define TW_TOPK_AVX512 1
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of g++ 12's own intrinsics (its bug 105593)
#endif

namespace tw {
namespace TW_NS {
namespace topk {

constexpr int64_t kBisected = 4096;     // rows up to this length are bisected in a local array
constexpr int64_t kChunk = 4096;        // values between two looks at finiteness and capacity
constexpr int64_t kLargestSample = 16384;
constexpr int kDeepest = 4;             // brackets within brackets; random data needs two

struct Threshold {
  int32_t key;
  int64_t ties;
};

template <class U>
inline int32_t key_of(U bits) {
  return static_cast<int32_t>(bits & static_cast<U>(static_cast<U>(~U(0)) >> 1));
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Uninitialized memory that grows, and is freed with the call.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  uint32_t* reserve(int64_t count) {  // null: no memory
    if (count > size_) {
      std::free(data_);
      data_ = static_cast<uint32_t*>(std::malloc(static_cast<size_t>(count) * sizeof(uint32_t)));
      size_ = data_ ? count : 0;
    }
    return data_;
  }

 private:
  uint32_t* data_ = nullptr;
  int64_t size_ = 0;
};

struct Workspace {
  Buffer sample;
  Buffer candidates[2];  // a level reads one and fills the other
};

#ifdef TW_TOPK_AVX512
inline __m512i load16(const uint32_t* x) { return _mm512_loadu_si512(x); }
inline __m512i load16(const uint16_t* x) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
inline __m512i load16(const uint32_t* x, __mmask16 m) { return _mm512_maskz_loadu_epi32(m, x); }
inline __m512i load16(const uint16_t* x, __mmask16 m) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, x));
}
template <class U>
inline __m512i magnitude(__m512i bits) {
  return _mm512_and_si512(bits, _mm512_set1_epi32(sizeof(U) == 4 ? 0x7fffffff : 0x7fff));
}
#endif

// Least and greatest key.
template <class U>
inline void key_range(const U* x, int64_t n, int32_t& low, int32_t& high) {
  int32_t lo = 0x7fffffff, hi = -1;
  int64_t i = 0;
#ifdef TW_TOPK_AVX512
  __m512i vlo = _mm512_set1_epi32(lo), vhi = _mm512_set1_epi32(hi);
  for (; i + 16 <= n; i += 16) {
    const __m512i key = magnitude<U>(load16(x + i));
    vlo = _mm512_min_epi32(vlo, key);
    vhi = _mm512_max_epi32(vhi, key);
  }
  lo = _mm512_reduce_min_epi32(vlo);
  hi = _mm512_reduce_max_epi32(vhi);
#endif
  for (; i < n; ++i) {
    const int32_t key = key_of(x[i]);
    lo = key < lo ? key : lo;
    hi = key > hi ? key : hi;
  }
  low = lo;
  high = hi;
}

// How many keys are at least `bound`.
template <class U>
inline int64_t count_from(const U* x, int64_t n, int32_t bound) {
  int64_t total = 0;
  int64_t i = 0;
#ifdef TW_TOPK_AVX512
  const __m512i b = _mm512_set1_epi32(bound), one = _mm512_set1_epi32(1);
  __m512i c[4] = {};
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) {
      const __m512i key = magnitude<U>(load16(x + i + 16 * j));
      c[j] = _mm512_mask_add_epi32(c[j], _mm512_cmpge_epi32_mask(key, b), c[j], one);
    }
  for (; i + 16 <= n; i += 16)
    c[0] = _mm512_mask_add_epi32(
        c[0], _mm512_cmpge_epi32_mask(magnitude<U>(load16(x + i)), b), c[0], one);
  total = _mm512_reduce_add_epi32(
      _mm512_add_epi32(_mm512_add_epi32(c[0], c[1]), _mm512_add_epi32(c[2], c[3])));
#endif
  while (i < n) {  // 32-bit counters vectorize; they hold a chunk
    const int64_t end = smaller(n, i + (1 << 20));
    int32_t part = 0;
    for (; i < end; ++i) part += key_of(x[i]) >= bound;
    total += part;
  }
  return total;
}

// The first index whose key is at least `bound`, or n.
template <class U>
inline int64_t find_from(const U* x, int64_t n, int32_t bound) {
  int64_t i = 0;
  while (i < n && key_of(x[i]) < bound) ++i;
  return i;
}

// The k-th greatest of n keys within [low, high], 1 <= k <= n.
template <class U>
inline Threshold bisect(const U* x, int64_t n, int64_t k, int32_t low, int32_t high) {
  int64_t above = 0;  // keys greater than `high`
  while (low < high) {
    const int32_t middle = high - (high - low) / 2;
    const int64_t count = count_from(x, n, middle);
    if (count == k) return {middle - 1, 0};
    if (count > k) {
      low = middle;
    } else {
      high = middle - 1;
      above = count;
    }
  }
  return {low, k - above};
}

// How many of n <= kBisected 16-bit keys are at least `bound`. A lane counts down to -kBisected.
inline int64_t count_from16(const int16_t* x, int64_t n, int16_t bound) {
  int64_t i = 0;
  int64_t total = 0;
#if defined(TW_TOPK_AVX512)
  const __m512i b = _mm512_set1_epi16(bound);
  int64_t odd = 0;
  for (; i + 128 <= n; i += 128)
    for (int j = 0; j < 128; j += 64) {
      total += __builtin_popcount(_mm512_cmpge_epi16_mask(_mm512_loadu_si512(x + i + j), b));
      odd += __builtin_popcount(_mm512_cmpge_epi16_mask(_mm512_loadu_si512(x + i + j + 32), b));
    }
  total += odd;
#elif defined(__AVX2__) && !defined(TW_PORTABLE)
  const __m256i b = _mm256_set1_epi16(static_cast<int16_t>(bound - 1));
  __m256i c[2] = {};
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 2; ++j) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 16 * j));
      c[j] = _mm256_add_epi16(c[j], _mm256_cmpgt_epi16(v, b));
    }
  int16_t lanes[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi16(c[0], c[1]));
  for (int j = 0; j < 16; ++j) total -= lanes[j];
#elif defined(__SSE2__) && !defined(TW_PORTABLE)
  const __m128i b = _mm_set1_epi16(static_cast<int16_t>(bound - 1));
  __m128i c[2] = {};
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 2; ++j) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i + 8 * j));
      c[j] = _mm_add_epi16(c[j], _mm_cmpgt_epi16(v, b));
    }
  int16_t lanes[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), _mm_add_epi16(c[0], c[1]));
  for (int j = 0; j < 8; ++j) total -= lanes[j];
#endif
  int16_t rest = 0;
  for (; i < n; ++i) rest = static_cast<int16_t>(rest + (x[i] >= bound));
  return total + rest;
}

// The threshold of a row of at most kBisected values: first the upper 16 bits of the keys, then the
// lower ones of the few keys that share the threshold's upper bits. Returns as select does.
template <class U>
inline int64_t select_short(const U* x, int64_t n, int64_t k, int32_t inf, Threshold& out) {
  constexpr int shift = sizeof(U) == 4 ? 16 : 0;
  int16_t upper[kBisected];
  int16_t low = 0x7fff, high = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int16_t key = static_cast<int16_t>(key_of(x[i]) >> shift);
    upper[i] = key;
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  if (high >= inf >> shift) return find_from(x, n, inf);
  int64_t above = 0;
  while (low < high) {
    const int16_t middle = static_cast<int16_t>(high - (high - low) / 2);
    const int64_t count = count_from16(upper, n, middle);
    if (count == k) {
      out = {(static_cast<int32_t>(middle) << shift) - 1, 0};
      return -1;
    }
    if (count > k) {
      low = middle;
    } else {
      high = static_cast<int16_t>(middle - 1);
      above = count;
    }
  }
  if (sizeof(U) == 2) {
    out = {low, k - above};
    return -1;
  }
  uint32_t same[kBisected + 16];
  int64_t count = 0;
  int64_t i = 0;
#ifdef TW_TOPK_AVX512
  const __m512i wanted = _mm512_set1_epi32(low);
  for (; i + 16 <= n; i += 16) {
    const __m512i key = magnitude<U>(load16(x + i));
    const __mmask16 m = _mm512_cmpeq_epi32_mask(_mm512_srli_epi32(key, 16), wanted);
    if (m) {
      _mm512_storeu_si512(same + count, _mm512_maskz_compress_epi32(m, key));
      count += __builtin_popcount(m);
    }
  }
#endif
  for (; i < n; ++i) {
    same[count] = static_cast<uint32_t>(key_of(x[i]));
    count += upper[i] == low;
  }
  int32_t least, greatest;
  key_range(same, count, least, greatest);
  out = bisect(same, count, k - above, least, greatest);
  return -1;
}

// The same by histograms of 11, 10 and 10 bits (8 and 7 for short floats). Returns -1, or the index
// of the first key of `inf` or more.
template <class U>
inline int64_t radix_select(const U* x, int64_t n, int64_t k, int32_t inf, Threshold& out) {
  constexpr int levels = sizeof(U) == 4 ? 3 : 2;
  constexpr int shifts[3] = {sizeof(U) == 4 ? 20 : 7, sizeof(U) == 4 ? 10 : 0, 0};
  constexpr int widths[3] = {sizeof(U) == 4 ? 11 : 8, sizeof(U) == 4 ? 10 : 7, 10};
  int64_t histogram[2048];
  int32_t prefix = 0;
  int64_t left = k;
  for (int level = 0; level < levels; ++level) {
    const int shift = shifts[level];
    const int32_t mask = (1 << widths[level]) - 1;
    std::memset(histogram, 0, sizeof(histogram));
    if (level == 0) {
      int32_t high = -1;
      for (int64_t i = 0; i < n; ++i) {
        const int32_t key = key_of(x[i]);
        high = key > high ? key : high;
        ++histogram[key >> shift];
      }
      if (high >= inf) return find_from(x, n, inf);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        const int32_t key = key_of(x[i]);
        if (key >> (shift + widths[level]) == prefix) ++histogram[(key >> shift) & mask];
      }
    }
    int32_t bin = mask;
    while (histogram[bin] < left) left -= histogram[bin--];
    prefix = (prefix << widths[level]) | bin;
  }
  out = {prefix, left};
  return -1;
}

#ifndef TW_TOPK_AVX512
// Bit j: key[j] > bound, for 64 keys.
inline uint64_t above64(const int32_t* key, int32_t bound) {
  uint64_t word = 0;
#if defined(__AVX2__) && !defined(TW_PORTABLE)
  const __m256i b = _mm256_set1_epi32(bound);
  for (int j = 0; j < 8; ++j) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key + 8 * j));
    const int m = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(v, b)));
    word |= static_cast<uint64_t>(static_cast<uint32_t>(m)) << (8 * j);
  }
#elif defined(__SSE2__) && !defined(TW_PORTABLE)
  const __m128i b = _mm_set1_epi32(bound);
  for (int j = 0; j < 16; ++j) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key + 4 * j));
    const int m = _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(v, b)));
    word |= static_cast<uint64_t>(static_cast<uint32_t>(m)) << (4 * j);
  }
#else
  uint8_t flag[64];
  for (int j = 0; j < 64; ++j) flag[j] = key[j] > bound;
  for (int j = 0; j < 8; ++j) {  // eight flags to eight bits by one multiplication
    uint64_t eight = 0;
    for (int i = 0; i < 8; ++i) eight |= static_cast<uint64_t>(flag[8 * j + i]) << (8 * i);
    word |= (eight * 0x0102040810204080u >> 56) << (8 * j);
  }
#endif
  return word;
}

// Keys of up to 64 values; -1 beyond them.
template <class U>
inline void keys64(const U* x, int64_t count, int32_t* key) {
  if (count >= 64) {
    for (int j = 0; j < 64; ++j) key[j] = key_of(x[j]);
  } else {
    for (int64_t j = 0; j < 64; ++j) key[j] = -1;
    for (int64_t j = 0; j < count; ++j) key[j] = key_of(x[j]);
  }
}
#endif

// What one pass found: keys of `high` or more, and the keys strictly between, copied.
struct Found {
  int64_t from_high;
  int64_t between;
};

// One chunk of the pass: appends keys strictly between low and high at found.between; returns the
// greatest key. `inside` has room for the chunk and 16 more.
template <class U>
inline int32_t collect(const U* x, int64_t n, int32_t low, int32_t high, uint32_t* inside,
                       Found& found) {
  int64_t i = 0;
  int64_t at = found.between;
  int64_t above = 0;
  int32_t greatest = -1;
#ifdef TW_TOPK_AVX512
  const __m512i lo = _mm512_set1_epi32(low), hi = _mm512_set1_epi32(high);
  const __m512i one = _mm512_set1_epi32(1);
  __m512i top[2] = {_mm512_set1_epi32(-1), _mm512_set1_epi32(-1)};
  __m512i count[2] = {};
  for (; i < n; i += 32)
    for (int j = 0; j < 2; ++j) {
      const int64_t left = n - i - 16 * j;
      __m512i key;
      if (left >= 16) {
        key = magnitude<U>(load16(x + i + 16 * j));
      } else if (left > 0) {
        const __mmask16 there = static_cast<__mmask16>((1u << left) - 1);
        key = magnitude<U>(load16(x + i + 16 * j, there));
        key = _mm512_mask_mov_epi32(_mm512_set1_epi32(-1), there, key);
      } else {
        break;
      }
      const __mmask16 from_high = _mm512_cmpge_epi32_mask(key, hi);
      const __mmask16 mid = _mm512_mask_cmplt_epi32_mask(_mm512_cmpgt_epi32_mask(key, lo), key, hi);
      top[j] = _mm512_max_epi32(top[j], key);
      count[j] = _mm512_mask_add_epi32(count[j], from_high, count[j], one);
      // a compress to memory is microcoded on Zen 4; to a register it is not
      _mm512_storeu_si512(inside + at, _mm512_maskz_compress_epi32(mid, key));
      at += __builtin_popcount(mid);
    }
  greatest = _mm512_reduce_max_epi32(_mm512_max_epi32(top[0], top[1]));
  above = _mm512_reduce_add_epi32(_mm512_add_epi32(count[0], count[1]));
#else
  int32_t key[64];
  for (; i < n; i += 64) {
    keys64(x + i, n - i, key);
    int32_t top = -1;
    for (int j = 0; j < 64; ++j) top = key[j] > top ? key[j] : top;
    greatest = top > greatest ? top : greatest;
    const uint64_t from_high = above64(key, high - 1);
    above += __builtin_popcountll(from_high);
    // padding (-1) is above no bound of -1 or more
    uint64_t mid = above64(key, low) & ~from_high;
    for (; mid; mid &= mid - 1) inside[at++] = static_cast<uint32_t>(key[__builtin_ctzll(mid)]);
  }
#endif
  found.from_high += above;
  found.between = at;
  return greatest;
}

inline uint32_t mixed(uint32_t h) {  // lowbias32
  h ^= h >> 16;
  h *= 0x7feb352du;
  h ^= h >> 15;
  h *= 0x846ca68bu;
  return h ^ (h >> 16);
}

// Four times the integer square root of v, rounded up: four standard deviations of a variance.
inline int64_t four_roots(int64_t v) {
  int64_t r = 1;
  while (r * r < 16 * v) r *= 2;
  for (int64_t step = r / 2; step; step /= 2)
    if ((r - step) * (r - step) >= 16 * v) r -= step;
  return r;
}

// The threshold of the k largest magnitudes of n values, 1 <= k <= n. Returns -1, the index of the
// first value whose key is `inf` or more, or n if there is no memory.
template <class U>
inline int64_t select(const U* x, int64_t n, int64_t k, int32_t inf, Workspace& space,
                      Threshold& out, int depth = 0) {
  if (k == n) {
    int32_t low, high;
    key_range(x, n, low, high);
    if (high >= inf) return find_from(x, n, inf);
    out = {low - 1, 0};
    return -1;
  }
  if (n <= kBisected) return select_short(x, n, k, inf, out);
  if (depth == kDeepest) return radix_select(x, n, k, inf, out);
  uint32_t* sample = space.sample.reserve(kLargestSample);
  if (!sample) return n;
  // A jittered stride: a plain one would see a single channel of periodic data.
  int64_t size = 512;
  while (size < kLargestSample && size * size * size < n * n / 8) size *= 2;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t start = i * n / size;
    const uint64_t offset =
        static_cast<uint64_t>(mixed(static_cast<uint32_t>(i))) * static_cast<uint64_t>(n / size);
    sample[i] = static_cast<uint32_t>(key_of(x[start + static_cast<int64_t>(offset >> 32)]));
  }
  int32_t least, greatest;
  key_range(sample, size, least, greatest);
  const int64_t expected = static_cast<int64_t>(static_cast<double>(k) / static_cast<double>(n) *
                                                static_cast<double>(size));
  const int64_t spread = 2 + four_roots(expected * (size - expected) / size);
  const int64_t rank_high = expected - spread, rank_low = expected + spread;
  int32_t high = inf, low = -1;
  if (rank_high >= 1) {
    const Threshold t = bisect(sample, size, rank_high, least, greatest);
    high = t.ties ? t.key : t.key + 1;  // the rank_high-th greatest, or a key just below it
  }
  if (rank_low <= size) low = bisect(sample, size, rank_low, least, greatest).key;
  if (low >= high) low = high - 1;

  Buffer& buffer = space.candidates[depth & 1];
  const int64_t capacity = smaller(n, 4 * spread * (n / size) + n / 64) + kChunk + 16;
  uint32_t* inside = buffer.reserve(capacity);
  if (!inside) return n;
  Found found = {0, 0};
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = smaller(kChunk, n - i);
    if (found.between + count + 16 > capacity) return radix_select(x, n, k, inf, out);
    if (collect(x + i, count, low, high, inside, found) >= inf)
      return i + find_from(x + i, count, inf);
  }
  const int64_t from_high = found.from_high, above_low = from_high + found.between;
  if (from_high < k && k <= above_low)
    return select(inside, found.between, k - from_high, 0x7fffffff, space, out, depth + 1);
  // On an end of the bracket (ties), or outside.
  if (k <= from_high) {
    const int64_t above = count_from(x, n, high + 1);
    if (above < k) {
      out = {high, k - above};
      return -1;
    }
  } else if (low >= 0 && k <= count_from(x, n, low)) {
    out = {low, k - above_low};
    return -1;
  }
  return radix_select(x, n, k, inf, out);
}

// The lowest `count` set bits of a word.
inline uint64_t lowest_bits(uint64_t word, int64_t count) {
  if (count >= __builtin_popcountll(word)) return word;
#if defined(__BMI2__) && defined(__x86_64__) && !defined(TW_PORTABLE)
  return _pdep_u64((uint64_t(1) << count) - 1, word);
#else
  uint64_t rest = word;
  for (int64_t i = 0; i < count; ++i) rest &= rest - 1;
  return word ^ rest;
#endif
}

// Walks a row, writes its kept values to `values` (k of them, at any address), and gives the sink
// what it Sink::wants: every 64 values' bits to word(bits, index of the first, values present), or
// positions, at room(), which has space for 64 and 16 more, and their end to added().
template <class U, class Sink>
inline void keep(const U* x, int64_t n, int64_t k, Threshold threshold, uint8_t* values,
                 Sink& sink) {
  int64_t ties = threshold.ties;
  int64_t at = 0;
#ifdef TW_TOPK_AVX512
  const __m512i t = _mm512_set1_epi32(threshold.key);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < n; i += 64) {
    const int64_t present = smaller(64, n - i);
    __m512i bits[4];
    __mmask16 there[4];
    uint64_t word = 0;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t left = present - 16 * j;
      there[j] = static_cast<__mmask16>(left >= 16 ? 0xffffu : left > 0 ? (1u << left) - 1 : 0u);
      bits[j] = present == 64 ? load16(x + i + 16 * j) : load16(x + i + 16 * j, there[j]);
      word |= static_cast<uint64_t>(_mm512_mask_cmpgt_epi32_mask(there[j], magnitude<U>(bits[j]), t)) << (16 * j);
    }
    if (ties) {
      uint64_t equal = 0;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        equal |= static_cast<uint64_t>(_mm512_mask_cmpeq_epi32_mask(there[j], magnitude<U>(bits[j]), t)) << (16 * j);
      equal = lowest_bits(equal, ties);
      ties -= __builtin_popcountll(equal);
      word |= equal;
    }
    uint32_t* position = sink.room();
    if (word)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __mmask16 m = static_cast<__mmask16>(word >> (16 * j));
        const __m512i packed = _mm512_maskz_compress_epi32(m, bits[j]);
        const int count = __builtin_popcount(m);
        uint8_t* to = values + at * static_cast<int64_t>(sizeof(U));
        const __mmask16 room = static_cast<__mmask16>((1u << count) - 1);
        if (sizeof(U) == 4) {
          if (at + 16 <= k)
            _mm512_storeu_si512(to, packed);
          else
            _mm512_mask_storeu_epi32(to, room, packed);
        } else {
          const __m256i shorter = _mm512_cvtepi32_epi16(packed);
          if (at + 16 <= k)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), shorter);
          else
            _mm256_mask_storeu_epi16(to, room, shorter);
        }
        at += count;
        if (Sink::wants_positions) {
          const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i) + 16 * j), lane);
          _mm512_storeu_si512(position, _mm512_maskz_compress_epi32(m, index));
          position += count;
        }
      }
    if (Sink::wants_positions)
      sink.added(position);
    else
      sink.word(word, i, present);
  }
#else
  int32_t key[64];
  for (int64_t i = 0; i < n; i += 64) {
    const int64_t present = smaller(64, n - i);
    const uint64_t there = present == 64 ? ~uint64_t(0) : (uint64_t(1) << present) - 1;
    keys64(x + i, present, key);
    uint64_t word = above64(key, threshold.key) & there;
    if (ties) {
      const uint64_t equal = lowest_bits(above64(key, threshold.key - 1) & ~word & there, ties);
      ties -= __builtin_popcountll(equal);
      word |= equal;
    }
    uint32_t* position = sink.room();
    for (uint64_t rest = word; rest; rest &= rest - 1, ++at) {
      const int64_t index = i + __builtin_ctzll(rest);
      std::memcpy(values + at * static_cast<int64_t>(sizeof(U)), x + index, sizeof(U));
      if (Sink::wants_positions) *position++ = static_cast<uint32_t>(index);
    }
    if (Sink::wants_positions)
      sink.added(position);
    else
      sink.word(word, i, present);
  }
  (void)k;
#endif
}

}  // namespace topk
}  // namespace TW_NS
}  // namespace tw

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
