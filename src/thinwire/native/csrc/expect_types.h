// What the levels of the instruction set and their callers share about what both ends expect.
#pragma once

#include <cstdint>

namespace tw {

// Tables of vectors of `width` values, float32, read by ids: position i takes the vector ids[k][i] of
// table k, or its first one where there is no such.
struct Tables {
  int count;
  const int64_t* const* ids;
  const float* const* values;
  const int64_t* sizes;
};

// All vectors are float32 of `width` values, n of them end to end. What is computed of a vector is one
// rounding an operation, in the order that is written here.
struct ExpectKernels {
  // y <- the sum over the tables, in order; zeros without tables.
  void (*expect)(const Tables& tables, int64_t n, int64_t width, float* y);
  // x less what the tables say, as whole numbers from -127 to 127 times a power of two, scales[i].
  void (*centre)(const Tables& tables, const float* x, int64_t n, int64_t width, float* codes, float* scales);
  // y <- y + part scales[i] powers[j]
  void (*add)(const float* part, const float* scales, const float* powers, int64_t n, int64_t width, float* y);
  // Of row r of `values` values: sums[2 r] <- (x - base) e, sums[2 r + 1] <- e e. base may be null.
  void (*weigh)(const float* x, const float* base, const float* e, int64_t rows, int64_t values, double* sums);
  // y <- base + e gains[r]; base may be null.
  void (*stand)(const float* base, const float* e, const float* gains, int64_t rows, int64_t values, float* y);
  // out[i] <- the greatest magnitude of a vector.
  void (*largest)(const float* x, int64_t n, int64_t width, float* out);
  // Count x, in units of 2^unit, to its ids, and set anew the values of the tables that were met; what
  // values have left of x goes to `left`, and its greatest magnitudes to `out`, if those are not null.
  void (*learn)(int32_t* sums, int32_t* counts, float* values, int64_t size, const int64_t* ids, const float* x,
                int64_t n, int64_t width, int unit, float* left, float* out);
  // out <- (y - base) factor, of n values; base may be null.
  void (*lesson)(const float* y, const float* base, float factor, int64_t n, float* out);
  // out <- x bfloat16, of n values.
  void (*widen)(const void* x, int64_t n, float* out);
  // y <- x factor, of n values.
  void (*scale)(const float* x, float factor, int64_t n, float* y);
};

}  // namespace tw
