// What fuzz.cpp feeds the kernels: random numbers, shapes, formats and bytes, and the memory for them,
// beyond whose ends nothing may be touched.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "level.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define SANITIZED 1
#endif
#ifdef SANITIZED
#include <sanitizer/asan_interface.h>
// Both abort, so that the last words are said, which name the iteration.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" __attribute__((visibility("default"))) const char* __ubsan_default_options() {
  return "abort_on_error=1:print_stacktrace=1";
}
#endif

namespace {

constexpr int64_t kLongest = 160000;  // values in a tensor: enough for threads to share them out

// splitmix64
class Random {
 public:
  Random(uint64_t seed, uint64_t iteration) : state_(seed * 0x9E3779B97F4A7C15u + (iteration << 20)) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint64_t>(limit)); }
  int64_t within(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool once_in(int64_t times) { return below(times) == 0; }
  template <class T, size_t count>
  T of(const T (&choices)[count]) { return choices[below(count)]; }

 private:
  uint64_t state_;
};

// Memory of exactly so many bytes, with something forbidden on either side.
class Memory {
 public:
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
#ifdef SANITIZED
  // `align`: the start is that, or a multiple of it, beyond what malloc aligns to.
  Memory(Random& random, int64_t nbytes, int64_t align)
      : skipped_(align * random.below(4)), nbytes_(nbytes),
        base_(static_cast<uint8_t*>(std::malloc(static_cast<size_t>(nbytes + skipped_)))) {
    ASAN_POISON_MEMORY_REGION(base_, static_cast<size_t>(skipped_));
  }
  ~Memory() {
    ASAN_UNPOISON_MEMORY_REGION(base_, static_cast<size_t>(nbytes_ + skipped_));
    std::free(base_);
  }
  uint8_t* data() const { return base_ + skipped_; }
#else
  Memory(Random& random, int64_t nbytes, int64_t align) : nbytes_(nbytes) {
    slot_ = arenas().back();
    arenas().pop_back();
    // against the page after it, or the one before
    at_ = random.once_in(4) ? slot_ : slot_ + kSlot - nbytes;
    (void)align;
  }
  ~Memory() { arenas().push_back(slot_); }
  uint8_t* data() const { return at_; }
#endif
  int64_t nbytes() const { return nbytes_; }
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data()); }

 private:
#ifdef SANITIZED
  int64_t skipped_, nbytes_;
  uint8_t* base_;
#else
  static constexpr int64_t kSlot = int64_t{1} << 21, kPage = 1 << 16, kSlots = 64;
  static std::vector<uint8_t*>& arenas() {
    static std::vector<uint8_t*> free = [] {
      std::vector<uint8_t*> slots;
      const int64_t step = kSlot + kPage;
      void* const all = mmap(nullptr, static_cast<size_t>(kSlots * step + kPage), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (all == MAP_FAILED) std::perror("fuzz: mmap"), std::exit(2);
      for (int64_t k = 0; k < kSlots; ++k) {
        uint8_t* const slot = static_cast<uint8_t*>(all) + kPage + k * step;
        if (mprotect(slot, kSlot, PROT_READ | PROT_WRITE)) std::perror("fuzz: mprotect"), std::exit(2);
        slots.push_back(slot);
      }
      return slots;
    }();
    return free;
  }
  uint8_t *slot_, *at_;
  int64_t nbytes_;
#endif
};

// What is running, for the last words.
uint64_t seed_now, iteration_now;

void last_words() {
  char text[200];
  const int count = std::snprintf(text, sizeof text, "fuzz: failed; again by: fuzz 0 %llu %llu\n",
                                  static_cast<unsigned long long>(seed_now),
                                  static_cast<unsigned long long>(iteration_now));
  if (write(2, text, static_cast<size_t>(count)) < 0) std::abort();
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz: %s\n", what);
  last_words();
  std::_Exit(1);
}

void require(bool condition, const char* what) {
  if (!condition) fail(what);
}

void on_signal(int number) {
  last_words();
  signal(number, SIG_DFL);
  raise(number);
}

int64_t itemsize(int dtype) { return dtype == TW_F32 ? 4 : 2; }

// Rows of values.
struct Shape {
  int64_t rows, n, stride;
  int dtype, threads;
  bool ragged;
  std::vector<int64_t> lengths;  // of every row, whether ragged or not

  const int64_t* given() const { return ragged ? lengths.data() : nullptr; }
  int64_t values() const { return rows ? (rows - 1) * stride + n : 0; }
  int64_t nbytes() const { return values() * itemsize(dtype); }
};

Shape draw_shape(Random& random, bool half = true) {
  Shape s;
  const int64_t most = random.of<int64_t>({16, 40, 300, 300, 1200, 1200, 5000});
  s.n = random.within(0, most);
  s.rows = random.within(0, 4);
  s.threads = 1;
  if (random.once_in(100)) {
    s.rows = random.within(1, 3);
    s.n = random.within(0, kLongest / s.rows);
    s.threads = 2;
  }
  s.stride = s.n + (random.once_in(3) ? random.within(0, 20) : 0);
  s.dtype = static_cast<int>(random.below(half ? 3 : 2));
  s.ragged = s.rows > 0 && random.once_in(3);
  for (int64_t r = 0; r < s.rows; ++r) s.lengths.push_back(s.ragged ? random.within(0, s.n) : s.n);
  return s;
}

tw_format draw_format(Random& random) {
  tw_format f;
  f.bits = static_cast<int32_t>(random.within(1, 8));
  f.group = random.of<int64_t>({0, 8, 16, 32, 64, 100, 128, 128, 128, 256, 512, 999, 1024, 2048, 4096, 1 << 20});
  if (random.once_in(6)) f.group = random.within(8, 3000);
  f.flags = random.of<int32_t>({0, TW_SYMMETRIC, TW_STOCHASTIC, TW_SYMMETRIC | TW_STOCHASTIC, TW_STD,
                                TW_SYMMETRIC | TW_STD});
  if (f.bits == 1 && f.flags & TW_SYMMETRIC) f.flags = TW_SYMMETRIC | TW_STD;
  if (random.once_in(4)) f.flags |= TW_HADAMARD;
  return f;
}

int64_t groups_of(const tw_format& f, int64_t n) { return f.group ? (n + f.group - 1) / f.group : n > 0; }
int64_t row_nbytes(const tw_format& f, int64_t n) {
  return groups_of(f, n) * (f.flags & TW_SYMMETRIC ? 2 : 6) + (n + 7) / 8 * f.bits;
}
int64_t payload_nbytes(const tw_format& f, const Shape& s) {
  int64_t total = 0;
  for (int64_t n : s.lengths) total += row_nbytes(f, n);
  return total;
}

void fill_bytes(Random& random, uint8_t* p, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i += 8) {
    const uint64_t word = random.next();
    std::memcpy(p + i, &word, static_cast<size_t>(nbytes - i < 8 ? nbytes - i : 8));
  }
}

uint16_t half_of(float x) {  // good enough for data: cut off, zero where too small, else infinity
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const int32_t exponent = static_cast<int32_t>(u >> 23 & 0xFF) - 112;
  const uint32_t sign = u >> 16 & 0x8000;
  if (exponent <= 0) return static_cast<uint16_t>(sign);
  if (exponent >= 31) return static_cast<uint16_t>(sign | 0x7C00);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent) << 10 | (u >> 13 & 0x3FF));
}

// Floats of any bits, or ordinary ones of some scale with a few of those among them.
void fill_values(Random& random, void* p, int64_t count, int dtype) {
  if (random.once_in(4)) return fill_bytes(random, static_cast<uint8_t*>(p), count * itemsize(dtype));
  const int kind = static_cast<int>(random.below(5));
  const float scale = std::ldexp(1.0f, random.once_in(3) ? static_cast<int>(random.within(-149, 127)) : 0);
  const int64_t spoilt = random.once_in(8) && count ? random.below(count) : -1;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = random.next();
    float x = static_cast<float>(static_cast<int32_t>(word)) * 0x1p-31f * scale;
    if (kind == 1) x = std::nearbyint(x * 4 / scale) * (scale / 4);  // ties
    if (kind == 2 && word >> 60) x = word >> 40 & 1 ? 0.0f : -0.0f;  // spikes
    if (kind == 3) x = scale;
    if (i == spoilt) {
      const uint32_t bits = static_cast<uint32_t>(word >> 32);
      std::memcpy(&x, &bits, 4);
    }
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint16_t half = dtype == TW_BF16 ? static_cast<uint16_t>(u >> 16) : half_of(x);
    if (dtype == TW_F32)
      std::memcpy(static_cast<uint8_t*>(p) + 4 * i, &x, 4);
    else
      std::memcpy(static_cast<uint8_t*>(p) + 2 * i, &half, 2);
  }
}

// Turn around some bits, or set a byte.
void damage(Random& random, uint8_t* p, int64_t nbytes) {
  if (nbytes == 0) return;
  for (int64_t k = random.within(0, 4); k > 0; --k) {
    uint8_t& byte = p[random.below(nbytes)];
    byte = random.once_in(3) ? static_cast<uint8_t>(random.next()) : static_cast<uint8_t>(byte ^ 1 << random.below(8));
  }
}

// Scales and offsets of random bits, of which most are valid: the codes are any.
void plausible(Random& random, const tw_format& f, const Shape& s, uint8_t* p) {
  for (int64_t n : s.lengths) {
    const int64_t groups = groups_of(f, n);
    for (int64_t g = 0; g < groups; ++g) {
      const uint16_t scale = static_cast<uint16_t>(random.within(0, 0x7E80));
      std::memcpy(p + 2 * g, &scale, 2);
      if (f.flags & TW_SYMMETRIC) continue;
      const int64_t magnitude = random.within(0, 0x7E7FFFFF), sign = random.below(2) << 31;
      const uint32_t offset = static_cast<uint32_t>(magnitude | sign);
      std::memcpy(p + 2 * groups + 4 * g, &offset, 4);
    }
    p += row_nbytes(f, n);
  }
}

std::vector<int64_t> draw_seeds(Random& random, int64_t rows) {
  std::vector<int64_t> seeds;
  for (int64_t r = 0; r < rows; ++r) seeds.push_back(static_cast<int64_t>(random.next()));
  return seeds;
}

}  // namespace
