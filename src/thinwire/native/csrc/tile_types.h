// What the levels of the instruction set and their callers share about the codec tile.
#pragma once

#include <cstdint>

namespace tw {

// One row of n values of a dtype, and its bytes; `bits` is 3 to 8.
struct TileKernels {
  int64_t (*row_nbytes)(int bits, int64_t n);
  // Returns the place of a value that is not finite, with the bytes undefined, or -1.
  int64_t (*encode)(int bits, int dtype, const void* x, int64_t n, uint8_t* row);
  bool (*valid)(int bits, int64_t n, const uint8_t* row);
  void (*decode)(int bits, const uint8_t* row, int64_t n, int dtype, void* y, bool streaming);
};

}  // namespace tw
