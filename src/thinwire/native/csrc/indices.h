// The positions of a row's kept values: a bitmask, or a Golomb code of the gaps between them.
//
// Bitmask: bit i % 8 of byte i / 8 is set if value i is kept.
// Golomb code with modulus M = 2^b or 3 * 2^b (S. Golomb, "Run-length encodings", 1966): of each gap,
// the remainder modulo M is r = t * 2^b + low. First come the t (only if M has the factor 3) in base
// 3, five a byte; then a string of bits, lowest first, padded with zeros to a byte: all the low, b
// bits each; then for each gap, quotient zeros and a one. Nothing tells the length: the code ends
// with the k-th one. It has at most k + (n - k) / M bits after the low.
//
// The form follows from n, k and M: the code, unless its greatest length reaches the bitmask's.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"
#include "topk.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // as in topk.h
#endif

namespace tw {
namespace TW_NS {
namespace topk {

struct Golomb {
  int64_t modulus;  // 0: none
  int bits;         // b
  bool ternary;
  explicit Golomb(int64_t m) : modulus(m), bits(0), ternary(m > 0 && m % 3 == 0) {
    for (int64_t power = ternary ? m / 3 : m; power > 1; power /= 2) ++bits;
  }
  int64_t ternary_nbytes(int64_t k) const { return ternary ? (k + 4) / 5 : 0; }
  int64_t unary_limit(int64_t n, int64_t k) const { return k + (n - k) / modulus; }
  int64_t max_nbytes(int64_t n, int64_t k) const {
    return ternary_nbytes(k) + (k * bits + unary_limit(n, k) + 7) / 8;
  }
  bool used(int64_t n, int64_t k) const {
    return modulus > 0 && n > 0 && max_nbytes(n, k) < (n + 7) / 8;
  }
};

// The most bytes that the positions of k of n values take.
inline int64_t indices_max_nbytes(const Golomb& code, int64_t n, int64_t k) {
  return code.used(n, k) ? code.max_nbytes(n, k) : (n + 7) / 8;
}

// Up to 8 bytes from `at`, zeros beyond `end`; little-endian whatever the host.
inline uint64_t load_word(const uint8_t* at, const uint8_t* end) {
  uint64_t word = 0;
  if (end - at >= 8) {
    std::memcpy(&word, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
  } else {
    for (int64_t i = 0; i < end - at; ++i) word |= static_cast<uint64_t>(at[i]) << (8 * i);
  }
  return word;
}

inline void store_word(uint8_t* at, uint64_t word, int64_t count = 8) {
  if (count == 8) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    std::memcpy(at, &word, 8);
  } else {
    for (int64_t i = 0; i < count; ++i) at[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

class BitmaskSink {
 public:
  static constexpr bool wants_positions = false;
  explicit BitmaskSink(uint8_t* out) : out_(out) {}
  uint32_t* room() { return nullptr; }
  void added(uint32_t*) {}
  void word(uint64_t bits, int64_t first, int64_t present) {
    store_word(out_ + first / 8, bits, (present + 7) / 8);
    end_ = out_ + (first + present + 7) / 8;
  }
  uint8_t* finish() { return end_ ? end_ : out_; }

 private:
  uint8_t* out_;
  uint8_t* end_ = nullptr;
};

// Positions are coded a batch at a time: each step is then a loop that vectorizes, or one without
// unpredictable branches. A multiple of 5 and of 4.
constexpr int kBatch = 640;

// A string of bits that grows at its end; complete words are in memory.
struct BitString {
  uint8_t* at;
  int fill;
  uint64_t word = 0;
  void put(uint64_t value, int size) {  // size < 64; nothing above it
    word |= value << fill;
    fill += size;
    if (fill >= 64) {
      store_word(at, word);
      at += 8;
      fill -= 64;
      word = value >> (size - fill);
    }
  }
  void put_zeros(int64_t count) {
    for (; count > 32; count -= 32) put(0, 32);
    put(0, static_cast<int>(count));
  }
};

template <bool Ternary>
class GolombSink {
 public:
  static constexpr bool wants_positions = true;
  GolombSink(uint8_t* out, int64_t k, const Golomb& code)
      : bits_(code.bits),
        ternary_(out),
        low_{out + code.ternary_nbytes(k), 0},
        unary_{low_.at + k * code.bits / 8, static_cast<int>(k * code.bits % 8)} {
    positions_[0] = 0xffffffffu;
  }
  void word(uint64_t, int64_t, int64_t) {}
  uint32_t* room() { return end_; }
  void added(uint32_t* end) {
    end_ = end;
    const int64_t count = end - positions_ - 1;
    if (count < kBatch) return;
    batch(kBatch);
    for (int64_t i = kBatch; i <= count; ++i) positions_[i - kBatch] = positions_[i];
    end_ = end - kBatch;
  }
  uint8_t* finish() {
    batch(static_cast<int>(end_ - positions_ - 1));
    const int bytes = (unary_.fill + 7) / 8;
    store_word(unary_.at, unary_.word, bytes);
    const int whole = low_.fill / 8;
    store_word(low_.at, low_.word, whole);
    // the last byte of the low bits is the first of the unary ones
    if (low_.fill % 8) low_.at[whole] |= static_cast<uint8_t>(low_.word >> (8 * whole));
    return unary_.at + bytes;
  }

 private:
  void batch(int count) {
    uint32_t quotient[kBatch + W], low[kBatch + W];
    const int bits = bits_;
    const uint32_t mask = (uint32_t{1} << bits) - 1;
    for (int i = 0; i < count; i += W) {
      const vu gap = load<vu>(positions_ + i + 1) - load<vu>(positions_ + i) - 1;
      store(low + i, gap & mask);
      store(quotient + i, gap >> bits);
    }
    for (int i = count; i < (count + W - 1) / W * W; ++i) quotient[i] = 0;  // made of what lay beyond
    uint32_t longest = greatest_of(quotient, count);
    if (Ternary) {
      put_ternary(quotient, count, longest);
      longest /= 3;
    }
    // four at a time, where four are certain to be shorter than a word
    BitString string = low_;
    int i = 0;
    if (bits == 1)
      for (; i + W <= count; i += W) string.put(signs_of(load<vi>(low + i) << 31), W);
    else if (bits < 16)
      for (; i + 4 <= count; i += 4)
        string.put((low[i] | uint64_t{low[i + 1]} << bits) |
                       (low[i + 2] | uint64_t{low[i + 3]} << bits) << (2 * bits),
                   4 * bits);
    for (; i < count; ++i) string.put(low[i], bits);
    low_ = string;
    string = unary_;
    i = 0;
    if (longest < 15)
      for (; i + 4 <= count; i += 4) {
        const uint32_t a = quotient[i], b = a + 1 + quotient[i + 1];
        const uint32_t c = b + 1 + quotient[i + 2], d = c + 1 + quotient[i + 3];
        string.put(uint64_t{1} << a | uint64_t{1} << b | uint64_t{1} << c | uint64_t{1} << d,
                   static_cast<int>(d + 1));
      }
    for (; i < count; ++i) {
      string.put_zeros(quotient[i]);
      string.put(1, 1);
    }
    unary_ = string;
  }
  static uint32_t greatest_of(const uint32_t* quotient, int count) {
    vu most = vu{};
    for (int i = 0; i < count; i += W) most = maximum(most, load<vu>(quotient + i));
    uint32_t longest = 0;
    for (int k = 0; k < W; ++k) longest = most[k] > longest ? most[k] : longest;
    return longest;
  }
  // Replaces the quotients, of which `longest` is the greatest, by their thirds.
  void put_ternary(uint32_t* quotient, int count, uint32_t longest) {
    uint8_t digit[kBatch + W];
    if (longest < (1 << 16)) {  // the product fits, and is exact
      for (int i = 0; i < count; i += W) {
        const vu q = load<vu>(quotient + i), third = q * 43691u >> 17;
        store_codes(digit + i, reinterpret_cast<vi>(q - 3 * third));
        store(quotient + i, third);
      }
    } else {
      for (int i = 0; i < count; ++i) {
        const uint32_t third = static_cast<uint32_t>(uint64_t{quotient[i]} * 0xaaaaaaabu >> 33);
        digit[i] = static_cast<uint8_t>(quotient[i] - 3 * third);
        quotient[i] = third;
      }
    }
    for (int i = count; i < count + 4; ++i) digit[i] = 0;
    uint8_t* at = ternary_;
    for (int i = 0; i < count; i += 5)
      *at++ = static_cast<uint8_t>(digit[i] + 3 * digit[i + 1] + 9 * digit[i + 2] +
                                   27 * digit[i + 3] + 81 * digit[i + 4]);
    ternary_ = at;
  }

  const int bits_;
  uint8_t* ternary_;
  BitString low_, unary_;
  uint32_t positions_[1 + kBatch + 64 + 16];  // the one before, then the batch
  uint32_t* end_ = positions_ + 1;
};

// Bytes of the positions that start at p, found without decoding them; -1: they are no positions
// of k among n, or more than `available`. What remains to be checked is that the last is below n.
inline int64_t indices_nbytes(const Golomb& code, const uint8_t* p, int64_t available, int64_t n,
                              int64_t k) {
  if (!code.used(n, k)) {
    const int64_t size = (n + 7) / 8;
    if (size > available) return -1;
    int64_t ones = 0;
    for (int64_t i = 0; i < size; i += 8)
      ones += __builtin_popcountll(load_word(p + i, p + size));
    const bool padded = n % 8 == 0 || p[size - 1] >> (n % 8) == 0;
    return ones == k && padded ? size : -1;
  }
  const int64_t first = 8 * code.ternary_nbytes(k) + k * code.bits;
  const int64_t limit = first + code.unary_limit(n, k);
  const int64_t size = smaller(available, (limit + 7) / 8);
  int64_t left = k;
  int64_t at = first / 8;
  uint64_t word = 0;
  while (at < size) {
    word = load_word(p + at, p + size);
    if (at == first / 8) word &= ~uint64_t(0) << (first % 8);
    const int64_t ones = __builtin_popcountll(word);
    if (ones >= left) break;
    left -= ones;
    at += 8;
  }
  if (at >= size) return -1;
  for (; left > 1; --left) word &= word - 1;
  const int64_t end = 8 * at + __builtin_ctzll(word) + 1;
  if (end > limit) return -1;
  if (end % 8 && p[end / 8] >> (end % 8)) return -1;
  return (end + 7) / 8;
}

template <class U>
inline U load_value(const uint8_t* values, int64_t i) {
  U bits;
  std::memcpy(&bits, values + i * static_cast<int64_t>(sizeof(U)), sizeof(U));
  return bits;
}

// Reads back what GolombSink has written, a batch at a time.
template <bool Ternary>
class GolombReader {
 public:
  // [p, end): positions that indices_nbytes has accepted.
  GolombReader(const Golomb& code, const uint8_t* p, const uint8_t* end, int64_t k)
      : modulus_(code.modulus), bits_(code.bits), end_(end), ternary_(p),
        low_(p + code.ternary_nbytes(k)) {
    const int64_t start = k * bits_;
    unary_ = low_ + start / 8;
    word_ = load_word(unary_, end_) & (~uint64_t{0} << (start % 8));
    last_ = start % 8 - 1;
  }
  // The next `count` positions, a multiple of 5 except at the end. False: a byte holds no digits.
  bool batch(int64_t* index, int count) {
    uint32_t remainder[kBatch + 4];
    get_low(remainder, count);
    if (Ternary && !add_ternary(remainder, count)) return false;
    uint64_t word = word_;
    int64_t base = base_, last = last_, next = next_;
    for (int i = 0; i < count; ++i) {
      while (!word) {  // ends: indices_nbytes has counted the ones
        base += 64;
        word = load_word(unary_ + base / 8, end_);
      }
      const int64_t one = base + __builtin_ctzll(word);
      word &= word - 1;
      next += (one - last - 1) * modulus_ + remainder[i];
      last = one;
      index[i] = next++;
    }
    word_ = word;
    base_ = base;
    last_ = last;
    next_ = next;
    return true;
  }

 private:
  void get_low(uint32_t* low, int count) {
    const uint64_t mask = (uint64_t{1} << bits_) - 1;
    int64_t at = low_bit_;
    const bool inside = end_ - (low_ + (at + int64_t{count} * bits_) / 8) >= 8;
    if (inside) {
      for (int i = 0; i < count; ++i, at += bits_) {
        uint64_t word;
        std::memcpy(&word, low_ + at / 8, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        low[i] = static_cast<uint32_t>(word >> (at % 8) & mask);
      }
    } else {
      for (int i = 0; i < count; ++i, at += bits_)
        low[i] = static_cast<uint32_t>(load_word(low_ + at / 8, end_) >> (at % 8) & mask);
    }
    low_bit_ = at;
  }
  bool add_ternary(uint32_t* low, int count) {
    for (int i = count; i < count + 4; ++i) low[i] = 0;
    const uint32_t unit = uint32_t{1} << bits_;
    uint32_t excess = 0;
    for (int i = 0; i < count; i += 5) {
      uint32_t digits = *ternary_++;
      for (int j = 0; j < 5; ++j) {
        const uint32_t third = digits * 171 >> 9;  // exact below 256
        low[i + j] += (digits - 3 * third) * unit;
        digits = third;
      }
      excess |= digits;
    }
    for (int i = count; i < count + 4 && i % 5; ++i) excess |= low[i];  // unused digits are zero
    return excess == 0;
  }

  const int64_t modulus_;
  const int bits_;
  const uint8_t* const end_;
  const uint8_t* ternary_;
  const uint8_t* const low_;
  const uint8_t* unary_;
  int64_t low_bit_ = 0;
  uint64_t word_;
  int64_t base_ = 0, last_, next_ = 0;
};

// Writes k values to the positions coded in [p, p + size), which indices_nbytes has accepted, and
// zeros to the rest of y's n. False if a position is not below n, or a value not finite.
template <class U, bool Ternary>
inline bool scatter_golomb(const Golomb& code, const uint8_t* p, int64_t size,
                           const uint8_t* values, U* y, int64_t n, int64_t k, int32_t inf) {
  GolombReader<Ternary> reader(code, p, p + size, k);
  int64_t index[kBatch];
  int64_t zeroed = 0;
  int32_t greatest = 0;
  // zeros are written just ahead of the values, while they stay in the cache
  const int64_t batch = larger(20, smaller(kBatch, kChunk * k / n / 20 * 20));
  for (int64_t at = 0; at < k; at += batch) {
    const int count = static_cast<int>(smaller(batch, k - at));
    if (!reader.batch(index, count)) return false;
    const int64_t until = index[count - 1] + 1;  // positions ascend
    if (until > n) return false;
    std::memset(y + zeroed, 0, static_cast<size_t>(until - zeroed) * sizeof(U));
    zeroed = until;
    for (int i = 0; i < count; ++i) {
      const U bits = load_value<U>(values, at + i);
      greatest = key_of(bits) > greatest ? key_of(bits) : greatest;
      y[index[i]] = bits;
    }
  }
  std::memset(y + zeroed, 0, static_cast<size_t>(n - zeroed) * sizeof(U));
  return greatest < inf;
}

// The same for a bitmask that indices_nbytes has accepted.
template <class U>
inline bool scatter_bitmask(const uint8_t* p, const uint8_t* values, U* y, int64_t n, int64_t k,
                            int32_t inf) {
  const uint8_t* const end = p + (n + 7) / 8;
  int64_t at = 0;
  int32_t greatest = 0;
  int64_t i = 0;
  (void)k;
#ifdef TW_TOPK_AVX512
  __m512i top = _mm512_setzero_si512();
  for (; i + 64 <= n; i += 64) {
    const uint64_t word = load_word(p + i / 8, end);
    for (int j = 0; j < 4; ++j) {
      const __mmask16 m = static_cast<__mmask16>(word >> (16 * j));
      const int count = __builtin_popcount(m);
      const __mmask16 there = static_cast<__mmask16>((1u << count) - 1);
      const uint8_t* from = values + at * static_cast<int64_t>(sizeof(U));
      __m512i packed;
      if (sizeof(U) == 4)
        packed = at + 16 <= k ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(there, from);
      else
        packed = _mm512_cvtepu16_epi32(
            at + 16 <= k ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                         : _mm256_maskz_loadu_epi16(there, from));
      const __m512i spread = _mm512_maskz_expand_epi32(m, packed);
      top = _mm512_max_epi32(top, magnitude<U>(spread));
      if (sizeof(U) == 4)
        _mm512_storeu_si512(y + i + 16 * j, spread);
      else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i + 16 * j),
                            _mm512_cvtepi32_epi16(spread));
      at += count;
    }
  }
  greatest = _mm512_reduce_max_epi32(top);
#endif
  for (; i < n; i += 64) {
    std::memset(y + i, 0, static_cast<size_t>(smaller(64, n - i)) * sizeof(U));
    for (uint64_t word = load_word(p + i / 8, end); word; word &= word - 1, ++at) {
      const U bits = load_value<U>(values, at);
      greatest = key_of(bits) > greatest ? key_of(bits) : greatest;
      y[i + __builtin_ctzll(word)] = bits;
    }
  }
  return greatest < inf;
}

}  // namespace topk
}  // namespace TW_NS
}  // namespace tw

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
