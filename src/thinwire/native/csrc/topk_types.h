// What the levels of the instruction set and their callers share about top-k kernels.
#pragma once

#include <cstdint>

namespace tw {

// Rows of values to be coded, or coded rows. Row r has sizes[r] values, of which kept[r] stay
// (at least one, unless the row is empty), and takes widths[r] bytes for the kept values.
struct TopKRows {
  int64_t rows;
  const int64_t* sizes;
  const int64_t* kept;
  const int64_t* widths;
  int64_t modulus;  // of the Golomb code; 0: bitmasks only
  int32_t dtype;    // 0 float32, 1 bfloat16, 2 float16
};

struct TopKKernels {
  int64_t (*encode)(const TopKRows&, const void* x, int64_t stride, uint8_t* out, int64_t capacity,
                    void* values, int64_t values_stride, int64_t* starts);
  int32_t (*put_values)(const TopKRows&, const uint8_t* coded, const int64_t* starts, uint8_t* out);
  int32_t (*take_values)(const TopKRows&, const uint8_t* payload, int64_t nbytes, uint8_t* coded);
  int32_t (*decode)(const TopKRows&, const uint8_t* payload, int64_t nbytes, const void* values,
                    int64_t values_stride, void* y, int64_t stride, int64_t width);
};

}  // namespace tw
