// The exported functions of what both ends expect: included by dispatch.cpp, which defines TW_EXPORT.
// expect_types.h says what each does.
#pragma once

#include <cstdint>

#include "expect_types.h"

static const tw::ExpectKernels& expect_kernels() { return levels().active->expect(); }

TW_EXPORT void tw_expect(int count, const int64_t* const* ids, const float* const* values, const int64_t* sizes,
                         int64_t n, int64_t width, float* y) {
  const tw::OrdinaryFloats scope;
  expect_kernels().expect({count, ids, values, sizes}, n, width, y);
}

TW_EXPORT void tw_expect_centre(int count, const int64_t* const* ids, const float* const* values,
                                const int64_t* sizes, const float* x, int64_t n, int64_t width, float* codes,
                                float* scales) {
  const tw::OrdinaryFloats scope;
  expect_kernels().centre({count, ids, values, sizes}, x, n, width, codes, scales);
}

TW_EXPORT void tw_expect_add(const float* part, const float* scales, const float* powers, int64_t n, int64_t width,
                             float* y) {
  const tw::OrdinaryFloats scope;
  expect_kernels().add(part, scales, powers, n, width, y);
}

TW_EXPORT void tw_expect_weigh(const float* x, const float* base, const float* e, int64_t rows, int64_t values,
                               double* sums) {
  const tw::OrdinaryFloats scope;
  expect_kernels().weigh(x, base, e, rows, values, sums);
}

TW_EXPORT void tw_expect_stand(const float* base, const float* e, const float* gains, int64_t rows, int64_t values,
                               float* y) {
  const tw::OrdinaryFloats scope;
  expect_kernels().stand(base, e, gains, rows, values, y);
}

TW_EXPORT void tw_expect_largest(const float* x, int64_t n, int64_t width, float* out) {
  const tw::OrdinaryFloats scope;
  expect_kernels().largest(x, n, width, out);
}

TW_EXPORT void tw_expect_learn(int32_t* sums, int32_t* counts, float* values, int64_t size, const int64_t* ids,
                               const float* x, int64_t n, int64_t width, int unit, float* left, float* out) {
  const tw::OrdinaryFloats scope;
  expect_kernels().learn(sums, counts, values, size, ids, x, n, width, unit, left, out);
}
