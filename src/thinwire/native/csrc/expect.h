// What both ends of a link expect: tables that are read and learned, maps, and gains. Equal to the bit
// at every level, and to predict/'s operations of torch but for `weigh`, whose order of summation is
// its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "expect_types.h"
#include "simd.h"

namespace tw {
namespace TW_NS {
namespace expectation {

constexpr float kMost = 127.0f;
constexpr int32_t kNearlyTwo = 0x7E0000;  // fraction bits of 127/64
constexpr int kLanes = 16;                // of sums, at every level
constexpr float kClamp = 1 << 17;
constexpr int32_t kMemory = 1 << 10;

inline float power_of_two(int exponent) { return float_of(static_cast<int32_t>((exponent + 127) << 23)); }

// Calls f(j) for whole vectors of lanes, then g(j) for values one by one.
template <class F, class G>
TW_INLINE void over(int64_t width, const F& f, const G& g) {
  int64_t j = 0;
  for (; j + W <= width; j += W) f(j);
  for (; j < width; ++j) g(j);
}

inline const float* row_of(const Tables& t, int k, int64_t i, int64_t width) {
  const int64_t id = t.ids[k][i];
  return t.values[k] + (id >= 0 && id < t.sizes[k] ? id : 0) * width;
}

inline void sum_of(const Tables& t, int64_t i, int64_t width, float* y) {
  if (t.count == 0) std::memset(y, 0, width * sizeof *y);
  for (int k = 0; k < t.count; ++k) {
    const float* const row = row_of(t, k, i, width);
    if (k == 0)
      std::memcpy(y, row, width * sizeof *y);
    else
      over(width, [&](int64_t j) { store(y + j, load<vf>(y + j) + load<vf>(row + j)); },
           [&](int64_t j) { y[j] = y[j] + row[j]; });
  }
}

inline void expect(const Tables& t, int64_t n, int64_t width, float* y) {
  for (int64_t i = 0; i < n; ++i) sum_of(t, i, width, y + i * width);
}

inline float largest_of(const float* x, int64_t width) {
  vf most = vf{};
  float rest = 0.0f;
  over(width, [&](int64_t j) { most = greatest(most, absolute(load<vf>(x + j))); },
       [&](int64_t j) { rest = std::max(rest, std::fabs(x[j])); });
  return std::max(rest, reduce(most, [](vf a, vf b) { return greatest(a, b); }));
}

inline void largest(const float* x, int64_t n, int64_t width, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = largest_of(x + i * width, width);
}

inline void centre(const Tables& t, const float* x, int64_t n, int64_t width, float* codes, float* scales) {
  for (int64_t i = 0; i < n; ++i, x += width, codes += width) {
    if (t.count == 0) {
      std::memcpy(codes, x, width * sizeof *x);
    } else {
      sum_of(t, i, width, codes);
      over(width, [&](int64_t j) { store(codes + j, load<vf>(x + j) - load<vf>(codes + j)); },
           [&](int64_t j) { codes[j] = x[j] - codes[j]; });
    }
    const int32_t bits = bits_of(largest_of(codes, width));
    const int exponent = std::clamp((bits >> 23) - 133 + ((bits & 0x7FFFFF) > kNearlyTwo), -100, 100);
    const float by = power_of_two(-exponent);
    scales[i] = power_of_two(exponent);
    const auto code = [&](float value) {
      return std::nearbyint(std::clamp(value * by, -kMost, kMost)) + 0.0f;  // without the sign of a zero
    };
    over(width,
         [&](int64_t j) {
           const vf scaled = load<vf>(codes + j) * by;
           store(codes + j, to_float(nearest(greatest(splat(-kMost), least(splat(kMost), scaled)))));
         },
         [&](int64_t j) { codes[j] = code(codes[j]); });
  }
}

inline void add(const float* part, const float* scales, const float* powers, int64_t n, int64_t width, float* y) {
  for (int64_t i = 0; i < n; ++i, part += width, y += width) {
    const float scale = scales[i];
    over(width,
         [&](int64_t j) {
           store(y + j, load<vf>(y + j) + load<vf>(part + j) * scale * load<vf>(powers + j));
         },
         [&](int64_t j) { y[j] = y[j] + part[j] * scale * powers[j]; });
  }
}

inline void weigh(const float* x, const float* base, const float* e, int64_t rows, int64_t values, double* sums) {
  for (int64_t r = 0; r < rows; ++r, x += values, e += values, sums += 2) {
    double inner = 0, energy = 0;
    // Floats are added up within a span, whose sums are added up as doubles.
    for (int64_t a = 0; a < values; a += 1024) {
      const int64_t b = std::min(values, a + 1024);
      float lanes[2][kLanes] = {};
      int64_t j = a;
      vf found[2][kLanes / W] = {};
      for (; j + kLanes <= b; j += kLanes)
        for (int k = 0; k < kLanes / W; ++k) {
          const vf expected = load<vf>(e + j + k * W);
          vf left = load<vf>(x + j + k * W);
          if (base) left = left - load<vf>(base + j + k * W);
          found[0][k] = found[0][k] + left * expected;
          found[1][k] = found[1][k] + expected * expected;
        }
      std::memcpy(lanes, found, sizeof lanes);
      for (; j < b; ++j) {
        const float left = base ? x[j] - base[j] : x[j];
        lanes[0][j % kLanes] = lanes[0][j % kLanes] + left * e[j];
        lanes[1][j % kLanes] = lanes[1][j % kLanes] + e[j] * e[j];
      }
      for (int k = 0; k < kLanes; ++k) {
        inner += lanes[0][k];
        energy += lanes[1][k];
      }
    }
    sums[0] = inner;
    sums[1] = energy;
    if (base) base += values;
  }
}

inline void stand(const float* base, const float* e, const float* gains, int64_t rows, int64_t values, float* y) {
  for (int64_t r = 0; r < rows; ++r, e += values, y += values) {
    const float gain = gains[r];
    if (base) {
      over(values, [&](int64_t j) { store(y + j, load<vf>(base + j) + load<vf>(e + j) * gain); },
           [&](int64_t j) { y[j] = base[j] + e[j] * gain; });
      base += values;
    } else {
      over(values, [&](int64_t j) { store(y + j, load<vf>(e + j) * gain); }, [&](int64_t j) { y[j] = e[j] * gain; });
    }
  }
}

inline void learn(int32_t* sums, int32_t* counts, float* values, int64_t size, const int64_t* ids, const float* x,
                  int64_t n, int64_t width, int unit, float* left, float* out) {
  const float by = power_of_two(-unit);
  std::vector<uint8_t> met(size);
  for (int64_t i = 0; i < n; ++i, x += width) {
    const int64_t id = ids[i];
    if (id < 0 || id >= size) continue;
    met[id] = 1;
    counts[id] += 1;
    int32_t* const sum = sums + id * width;
    const float* const mean = values + id * width;
    const auto unit_of = [&](float value) {
      return static_cast<int32_t>(std::nearbyint(std::clamp(value * by, -kClamp, kClamp)));
    };
    over(width,
         [&](int64_t j) {
           const vf scaled = greatest(splat(-kClamp), least(splat(kClamp), load<vf>(x + j) * by));
           store(sum + j, load<vi>(sum + j) + nearest(scaled));
         },
         [&](int64_t j) { sum[j] += unit_of(x[j]); });
    if (left) {
      over(width, [&](int64_t j) { store(left + j, load<vf>(x + j) - load<vf>(mean + j)); },
           [&](int64_t j) { left[j] = x[j] - mean[j]; });
      if (out) out[i] = largest_of(left, width);
      left += width;
    }
  }
  const double scale = power_of_two(unit);
  for (int64_t id = 0; id < size; ++id) {
    if (!met[id]) continue;
    int32_t* const sum = sums + id * width;
    if (counts[id] > kMemory) {
      for (int64_t j = 0; j < width; ++j)
        sum[j] = static_cast<int32_t>(int64_t{sum[j]} * kMemory / counts[id]);
      counts[id] = kMemory;
    }
    const double count = counts[id] + 1.0;
    for (int64_t j = 0; j < width; ++j) values[id * width + j] = static_cast<float>(sum[j] / count * scale);
  }
}

inline void lesson(const float* y, const float* base, float factor, int64_t n, float* out) {
  if (base)
    over(n, [&](int64_t j) { store(out + j, (load<vf>(y + j) - load<vf>(base + j)) * factor); },
         [&](int64_t j) { out[j] = (y[j] - base[j]) * factor; });
  else
    over(n, [&](int64_t j) { store(out + j, load<vf>(y + j) * factor); }, [&](int64_t j) { out[j] = y[j] * factor; });
}

inline void widen(const void* x, int64_t n, float* out) {
  const auto* const halves = static_cast<const B16::T*>(x);
  over(n, [&](int64_t j) { store(out + j, B16::load(halves + j)); },
       [&](int64_t j) { out[j] = float_of(static_cast<int32_t>(static_cast<uint32_t>(halves[j]) << 16)); });
}

inline void scale(const float* x, float factor, int64_t n, float* y) {
  over(n, [&](int64_t j) { store(y + j, load<vf>(x + j) * factor); }, [&](int64_t j) { y[j] = x[j] * factor; });
}

}  // namespace expectation

inline const ExpectKernels& expect_table() {
  using namespace expectation;
  static const ExpectKernels table = {expect, centre, add, weigh, stand, largest, learn, lesson, widen, scale};
  return table;
}

}  // namespace TW_NS
}  // namespace tw
