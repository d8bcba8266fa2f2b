// Noise for stochastic rounding: the counter hash that native/noise.py defines.
#pragma once

#include "simd.h"

namespace tw {
namespace TW_NS {

TW_INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// What noise is a multiple of: 2**-24.
constexpr float kNoiseUnit = 5.9604644775390625e-8f;

// Uniform in [0, 1), by seed and position in the row; in units of kNoiseUnit.
struct Noise {
  uint32_t low, high;

  explicit Noise(int64_t seed) {
    const uint32_t upper = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32) ^ 0x9E3779B9u;
    low = mix(static_cast<uint32_t>(seed) ^ mix(upper));
    high = mix(low ^ upper);
  }

  TW_INLINE vf at(int64_t i) const { return of(lanes(1) + static_cast<uint32_t>(i)); }
  template <bool alternating>
  TW_INLINE Two at2(int64_t i) const {
    const vu first = lanes(alternating ? 2 : 1) + static_cast<uint32_t>(i);
    return {of(first), of(first + (alternating ? 1 : W))};
  }

 private:
  static TW_INLINE vu lanes(uint32_t step) {
    vu position;
    for (int k = 0; k < W; ++k) position[k] = step * k;
    return position;
  }
  TW_INLINE vf of(vu x) const {
    x ^= low;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= (x >> 15) ^ high;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return to_float(reinterpret_cast<vi>(x >> 8));
  }
};

}  // namespace TW_NS
}  // namespace tw
