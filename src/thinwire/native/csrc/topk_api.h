// The exported top-k functions: included by dispatch.cpp, which defines TW_EXPORT and
// `const tw::TopKKernels& topk_kernels()`, the table of the level in use.
#pragma once

#include <cstdint>

#include "topk_types.h"

// Arguments and results as in topk_entry.h; the first six describe the rows (TopKRows).
TW_EXPORT int64_t tw_topk_encode(int64_t rows, const int64_t* sizes, const int64_t* kept,
                                 const int64_t* widths, int64_t modulus, int32_t dtype,
                                 const void* x, int64_t stride, uint8_t* out, int64_t capacity,
                                 void* values, int64_t values_stride, int64_t* starts) {
  return topk_kernels().encode({rows, sizes, kept, widths, modulus, dtype}, x, stride, out,
                               capacity, values, values_stride, starts);
}

TW_EXPORT int32_t tw_topk_put_values(int64_t rows, const int64_t* sizes, const int64_t* kept,
                                     const int64_t* widths, int64_t modulus, int32_t dtype,
                                     const uint8_t* coded, const int64_t* starts, uint8_t* out) {
  return topk_kernels().put_values({rows, sizes, kept, widths, modulus, dtype}, coded, starts, out);
}

TW_EXPORT int32_t tw_topk_take_values(int64_t rows, const int64_t* sizes, const int64_t* kept,
                                      const int64_t* widths, int64_t modulus, int32_t dtype,
                                      const uint8_t* payload, int64_t nbytes, uint8_t* coded) {
  return topk_kernels().take_values({rows, sizes, kept, widths, modulus, dtype}, payload, nbytes,
                                    coded);
}

TW_EXPORT int32_t tw_topk_decode(int64_t rows, const int64_t* sizes, const int64_t* kept,
                                 const int64_t* widths, int64_t modulus, int32_t dtype,
                                 const uint8_t* payload, int64_t nbytes, const void* values,
                                 int64_t values_stride, void* y, int64_t stride, int64_t width) {
  return topk_kernels().decode({rows, sizes, kept, widths, modulus, dtype}, payload, nbytes, values,
                               values_stride, y, stride, width);
}
