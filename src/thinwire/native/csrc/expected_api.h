// The AQ-SGD step around what both ends expect, of whole rows that lie end to end: included by
// dispatch.cpp, after its own functions and the kernels that this one is made of.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "expect_types.h"
#include "expected_types.h"

namespace {

constexpr double kSteps = 64;  // of the gain, in one
constexpr float kFarBeyond = 8.0f;
constexpr int64_t kFar = -2;

// One row's memory, on this thread.
class Around {
 public:
  Around(const tw_known& k, int64_t r) : k_(k), r_(r), kernels_(*levels().active) {
    static thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < 4 * k.n) scratch.resize(4 * k.n);
    for (int part = 0; part < 4; ++part) room_[part] = scratch.data() + part * k.n;
    expected_ = expect();
    base_ = reference();
  }

  const float* widened(int dtype, const void* x) {
    if (dtype == TW_F32) return static_cast<const float*>(x);
    kernels_.expect().widen(x, k_.n, room_[2]);
    return room_[2];
  }

  // The step of the gain with which what is expected leaves least of x.
  uint8_t gain_of(const float* x) const {
    double sums[2];
    kernels_.expect().weigh(x, base_, expected_, 1, k_.n, sums);
    const double best = kSteps * sums[0] / std::max(sums[1], 1e-300);
    return best == best ? static_cast<uint8_t>(std::nearbyint(std::clamp(best, 0.0, 255.0))) : 0;
  }

  // What x is coded against.
  const float* stand(uint8_t step) {
    const float gain = static_cast<float>(step / kSteps);
    kernels_.expect().stand(base_, expected_, &gain, 1, k_.n, room_[3]);
    return room_[3];
  }

  // Whether its reference is one.
  bool valid() const { return valid_; }

  // Whether all went well with what y leaves.
  bool leave(const tw_becomes& out) const {
    const float* const y = out.y + r_ * k_.n;
    if (out.to) {
      if (!k_.packed)
        std::memcpy(out.to[r_], y, k_.n * sizeof *y);
      else if (kernels_.encode(*k_.packed, {1, k_.n, 0, k_.n}, {TW_F32, y, k_.n}, nullptr,
                               static_cast<uint8_t*>(out.to[r_])) >= 0)
        return false;
    }
    if (out.lesson) kernels_.expect().lesson(y, base_, k_.factor, k_.n, out.lesson + r_ * k_.n);
    return true;
  }

 private:
  const float* expect() const {
    const float* found = k_.ready ? k_.ready + r_ * k_.n : room_[0];
    if (!k_.ready) {
      const int64_t positions = k_.n / k_.width;
      std::vector<const int64_t*> ids(k_.ids, k_.ids + k_.count);
      for (const int64_t*& each : ids) each += r_ * positions;
      const tw::Tables tables = {static_cast<int>(k_.count), ids.data(), k_.tables, k_.sizes};
      kernels_.expect().expect(tables, positions, k_.width, room_[0]);
    }
    if (k_.scale != 1.0f) {
      kernels_.expect().scale(found, k_.scale, k_.n, room_[0]);
      found = room_[0];
    }
    return found;
  }

  const float* reference() {
    if (k_.base) return k_.base + r_ * k_.n;
    if (!k_.from) return nullptr;
    if (!k_.packed) return static_cast<const float*>(k_.from[r_]);
    valid_ = kernels_.decode(*k_.packed, {1, k_.n, 0, k_.n}, static_cast<const uint8_t*>(k_.from[r_]),
                             {TW_F32, room_[1], k_.n}, false) < 0;
    return room_[1];
  }

  const tw_known& k_;
  const int64_t r_;
  const Kernels& kernels_;
  float* room_[4];
  const float* expected_;
  const float* base_;
  bool valid_ = true;
};

// Calls work(r) for every row, on `threads` threads where that pays.
template <class F>
void for_known(const tw_known& k, int threads, const F& work) {
  tw::Pool::instance().run(k.rows, k.rows * k.n >= 2 * kValuesPerPiece ? threads : 1, work);
}

// Whether any position of x is far beyond `ordinary`, the so manieth smallest of their magnitudes.
bool has_far(const tw_known& k, int dtype, const void* x, int64_t ordinary) {
  const tw::OrdinaryFloats scope;
  const int64_t positions = k.n / k.width;
  std::vector<float> largest(k.rows * positions), wide(dtype == TW_F32 ? 0 : k.n);
  for (int64_t r = 0; r < k.rows; ++r) {
    const float* values = reinterpret_cast<const float*>(at_row(x, r, k.n, dtype));
    if (dtype != TW_F32) {
      levels().active->expect().widen(at_row(x, r, k.n, dtype), k.n, wide.data());
      values = wide.data();
    }
    levels().active->expect().largest(values, positions, k.width, largest.data() + r * positions);
  }
  for (float& magnitude : largest)  // what is not finite is left to the codec, which refuses it
    if (!(magnitude <= std::numeric_limits<float>::max())) magnitude = 0.0f;
  const float most = *std::max_element(largest.begin(), largest.end());
  std::nth_element(largest.begin(), largest.begin() + (ordinary - 1), largest.end());
  return most > kFarBeyond * largest[ordinary - 1];
}

}  // namespace

// x less what is known of it into `payload`: a byte of gain for each row, then the rows. With `energies`
// [rows, 2] the sums of squares of what was left of each row, and of the row. Where `ordinary` is not 0,
// and a position is far beyond that manieth magnitude, -2, with nothing done. Else -1, or the place of a
// value that cannot be coded, with all outputs undefined.
TW_EXPORT int64_t tw_expected_encode(const tw_format* f, const tw_known* known, int dtype, const void* x,
                                     const tw_becomes* out, int64_t ordinary, uint8_t* payload, float* energies,
                                     int threads) {
  const tw_known& k = *known;
  if (ordinary && has_far(k, dtype, x, ordinary)) return kFar;
  const int64_t width = levels().active->row_nbytes(*f, k.n);
  First bad;
  for_known(k, threads, [&](int64_t r) {
    Around row(k, r);
    if (!row.valid()) return bad.report(r * k.n);
    const float* const values = row.widened(dtype, at_row(x, r, k.n, dtype));
    payload[r] = row.gain_of(values);
    const void* const before = row.stand(payload[r]);
    void* const after = out->y + r * k.n;
    const int64_t place = tw_delta_encode(f, TW_F32, values, 1, k.n, k.n, nullptr, TW_F32, nullptr, &before, &after,
                                          nullptr, payload + k.rows + r * width, energies + 2 * r, 1);
    if (place >= 0 || !row.leave(*out)) bad.report(r * k.n + std::max<int64_t>(place, 0));
  });
  return bad.get();
}

// The reverse: y, and as `dtype` [rows, n] what the receiver computes on. Returns -1, or 0 with all
// outputs undefined if the payload's parameters are invalid, or a sum is not finite.
TW_EXPORT int64_t tw_expected_decode(const tw_format* f, const tw_known* known, const uint8_t* payload,
                                     const tw_becomes* out, int dtype, void* y, int threads) {
  const tw_known& k = *known;
  const int64_t width = levels().active->row_nbytes(*f, k.n);
  First bad;
  for_known(k, threads, [&](int64_t r) {
    Around row(k, r);
    if (!row.valid()) return bad.report(r * k.n);
    const void* const before = row.stand(payload[r]);
    void* const after = out->y + r * k.n;
    const int64_t found = tw_delta_decode(f, payload + k.rows + r * width, 1, k.n, nullptr, TW_F32, nullptr, &before,
                                          &after, dtype, at_row(y, r, k.n, dtype), k.n, 1);
    if (found >= 0 || !row.leave(*out)) bad.report(r * k.n);
  });
  return bad.get() < 0 ? -1 : 0;
}
