// What a level of the instruction set provides: one table of functions, filled by kernels.cpp, which
// is compiled once a level.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tile_types.h"
#include "topk_types.h"

// How a row of values becomes integers (native.IntegerFormat). group = 0: the whole row.
struct tw_format {
  int32_t bits;
  int32_t flags;
  int64_t group;
};

enum { TW_SYMMETRIC = 1, TW_STOCHASTIC = 2, TW_STD = 4, TW_HADAMARD = 8 };
enum { TW_F32 = 0, TW_BF16 = 1, TW_F16 = 2 };

namespace tw {

// Work on values [a, b) of one row of n: both are multiples of 256 and of every group size involved,
// but at the row's end. Functions that may meet a value that cannot be coded return its place, or -1.
//
// A reference row is stored as TW_F32 or TW_BF16 values, or, where `packed` is not null, encoded in
// that format. float16 is not taken where there is a reference.
struct Reference {
  int dtype;
  const tw_format* packed;
};

struct Kernels {
  const char* name;
  int64_t (*row_nbytes)(const tw_format& f, int64_t n);
  int64_t (*encode)(const tw_format& f, int dtype, const void* x, int64_t n, int64_t a, int64_t b,
                    int64_t seed, uint8_t* row);
  bool (*valid)(const tw_format& f, int64_t n, const uint8_t* row);
  void (*decode)(const tw_format& f, const uint8_t* row, int64_t n, int64_t a, int64_t b, int dtype,
                 void* y, bool streaming);
  int64_t (*delta_encode)(const tw_format& f, int dtype, const void* x, Reference reference, const void* from,
                          void* to, int64_t n, int64_t a, int64_t b, int64_t seed, uint8_t* row);
  int64_t (*delta_decode)(const tw_format& f, const uint8_t* row, Reference reference, const void* from,
                          void* to, int64_t n, int64_t a, int64_t b, int dtype, void* y, bool streaming);
  // Sums of squares of each block of 256 values: of x - from into change, of x into value.
  void (*energies)(int dtype, const void* x, Reference reference, const void* from, int64_t n, int64_t a,
                   int64_t b, float* change, float* value);
  // The sum of sums[0 … count) by halving; overwrites them.
  float (*total)(float* sums, int64_t count);
  const TopKKernels& (*topk)();
  const TileKernels& (*tile)();
};

}  // namespace tw

// Every level's table.
extern "C" const tw::Kernels* tw_kernels_baseline();
extern "C" const tw::Kernels* tw_kernels_v3();
extern "C" const tw::Kernels* tw_kernels_v4();
