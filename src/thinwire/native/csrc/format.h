// Integer formats: where the parts of a row lie, what the codes stand for.
#pragma once

#include <algorithm>
#include <cmath>

#include "level.h"
#include "simd.h"

namespace tw {
namespace TW_NS {

constexpr float kTiny = 8.6736173798840355e-19f;  // 2**-60: below, 1 / scale would overflow
constexpr float kLift = 18446744073709551616.0f;  // 2**64
constexpr float kLloyd1 = 0.7978845608028654f;
constexpr float kLloyd2[2] = {0.4527800f, 1.5104176f};
constexpr float kLloyd2Threshold = 0.9815988f;
constexpr float kUniformStep[9] = {0,          0,          0,           0.5860194f, 0.3352006f,
                                   0.1881388f, 0.1040630f, 0.05686768f, 0.03076238f};
// Sums of squares within these bounds, 2**-60 and 2**100, need no scaling of the values.
constexpr float kLeastSquares = 8.6736173798840355e-19f;
constexpr float kMostSquares = 1.2676506002282294e30f;
// 2**100, less than half a unit in the last place of the greatest float32, let alone bfloat16.
constexpr float kSafeMove = 1.2676506002282294e30f;

enum Mode { kAffine, kSymmetric, kStd1, kStd2, kStdMany };
constexpr bool is_range(Mode mode) { return mode == kAffine || mode == kSymmetric; }

inline Mode mode_of(const tw_format& f) {
  if (!(f.flags & TW_STD)) return f.flags & TW_SYMMETRIC ? kSymmetric : kAffine;
  return f.bits == 1 ? kStd1 : f.bits == 2 ? kStd2 : kStdMany;
}

// Where the parts of a row of n values lie.
struct Row {
  int64_t n, group, groups;
  int shift = -1;  // the group as a power of two, if it is one
  int bits;
  bool symmetric;
  int64_t offsets, codes;  // bytes from the row's start

  Row(const tw_format& f, int64_t n_)
      : n(n_), group(f.group ? f.group : n_), bits(f.bits), symmetric(f.flags & TW_SYMMETRIC) {
    if (group > 0 && (group & (group - 1)) == 0) shift = __builtin_ctzll(group);
    groups = n ? whole_groups(n + group - 1) : 0;
    offsets = 2 * groups;
    codes = offsets + (symmetric ? 0 : 4 * groups);
  }
  // values / group; a division takes as long as some vectors of values do.
  int64_t whole_groups(int64_t values) const { return shift >= 0 ? values >> shift : values / group; }
  int64_t nbytes() const { return codes + (n + 7) / 8 * bits; }
  // The byte of the code at `i`, a multiple of 256.
  int64_t code_at(int64_t i) const { return codes + i / 8 * bits; }

  void put(uint8_t* row, int64_t g, float scale, float offset) const {
    const uint16_t half = static_cast<uint16_t>(static_cast<uint32_t>(bits_of(scale)) >> 16);
    std::memcpy(row + 2 * g, &half, 2);
    if (!symmetric) std::memcpy(row + offsets + 4 * g, &offset, 4);
  }
  TW_INLINE void put(uint8_t* row, int64_t g, int count, vf scale, vf offset) const {
    store_first_halves(row + 2 * g, shift_right(bits_of(scale), 16), count);
    if (!symmetric) store_first(row + offsets + 4 * g, offset, count);
  }
  TW_INLINE void get(const uint8_t* row, int64_t g, float* scale, float* offset) const {
    uint16_t half;
    std::memcpy(&half, row + 2 * g, 2);
    *scale = float_of(static_cast<int32_t>(static_cast<uint32_t>(half) << 16));
    *offset = 0.0f;
    if (!symmetric) std::memcpy(offset, row + offsets + 4 * g, 4);
  }
};

inline float round_up_bf16(float x) {
  const int32_t b = static_cast<int32_t>((static_cast<uint32_t>(bits_of(x)) + 0xFFFFu) & 0xFFFF0000u);
  return float_of(std::min(b, 0x7F7F0000));
}

TW_INLINE float top_level(Mode mode, int bits) {
  const int top = (1 << bits) - 1, half = 1 << (bits - 1);
  switch (mode) {
    case kAffine: return static_cast<float>(top);
    case kSymmetric: return static_cast<float>(half);
    case kStd1: return kLloyd1;
    case kStd2: return kLloyd2[1];
    default: return (static_cast<float>(top) - (static_cast<float>(half) - 0.5f)) * kUniformStep[bits];
  }
}

TW_INLINE float bottom_level(Mode mode, int bits) {
  const float half = static_cast<float>(1 << (bits - 1));
  switch (mode) {
    case kAffine: return 0.0f;
    case kSymmetric: return -(half - 1.0f);
    case kStd1: return -kLloyd1;
    case kStd2: return -kLloyd2[1];
    default: return (0.0f - (half - 0.5f)) * kUniformStep[bits];
  }
}

// Whether every code of a group stands for a finite value.
TW_INLINE bool decodable(Mode mode, int bits, float scale, float offset) {
  const float bottom = scale * bottom_level(mode, bits) + offset;
  const float top = scale * top_level(mode, bits) + offset;
  return is_finite(bottom) && is_finite(top) && scale >= 0;
}

// The levels of codes of up to 4 bits, for all 16 of them: scaled, they are a group's values.
TW_INLINE void fill_levels(Mode mode, int bits, float* levels) {
  for (int code = 0; code < 16; ++code) {
    const int c = code & ((1 << bits) - 1);
    const float half = static_cast<float>(1 << (bits - 1));
    switch (mode) {
      case kAffine: levels[code] = static_cast<float>(c); break;
      case kSymmetric: levels[code] = static_cast<float>(c) - (half - 1.0f); break;
      case kStd1: levels[code] = c ? kLloyd1 : -kLloyd1; break;
      case kStd2: levels[code] = (c < 2 ? -1.0f : 1.0f) * kLloyd2[c == 0 || c == 3]; break;
      case kStdMany: levels[code] = (static_cast<float>(c) - (half - 0.5f)) * kUniformStep[bits]; break;
    }
  }
}

// Whether all parameters of a row's groups are such that every code stands for a finite value.
inline bool valid_row(const tw_format& f, int64_t n, const uint8_t* row) {
  const Row layout(f, n);
  const Mode mode = mode_of(f);
  const float bottom = bottom_level(mode, f.bits), top = top_level(mode, f.bits);
  vi good = ~vi{};
  const auto check = [&](vf scale, vf offset) __attribute__((always_inline)) {
    const vi low = bits_of(scale * splat(bottom) + offset), high = bits_of(scale * splat(top) + offset);
    good &= ((low & 0x7F800000) != 0x7F800000) & ((high & 0x7F800000) != 0x7F800000) & (scale >= 0);
  };
  int64_t g = 0;
  for (; g + W <= layout.groups; g += W) {
    uint16_t halves[W];
    std::memcpy(halves, row + 2 * g, sizeof halves);
    check(B16::load(halves), layout.symmetric ? vf{} : load<vf>(row + layout.offsets + 4 * g));
  }
  for (; g < layout.groups; ++g) {
    float scale, offset;
    layout.get(row, g, &scale, &offset);
    check(splat(scale), splat(offset));
  }
  return all_true(good);
}

}  // namespace TW_NS
}  // namespace tw
