// What a level of the instruction set provides: one table of functions, filled by kernels.cpp, which
// is compiled once a level.
#pragma once

#include <cstddef>
#include <cstdint>

#include "expect_types.h"
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

// `count` rows of n values each. Of a single row, values [a, b) may be meant: multiples of 256 and of
// every group size involved, but at the row's end. Of several it is always all: [0, n).
struct Rows {
  int64_t count, n, a, b;
};

// Where rows lie in memory, `stride` values apart.
struct Source {
  int dtype;
  const void* p;
  int64_t stride;
};
struct Target {
  int dtype;
  void* p;
  int64_t stride;
};

// A reference row is stored as TW_F32 or TW_BF16 values, or, where `packed` is not null, encoded in
// that format. float16 is not taken where there is a reference.
struct Reference {
  int dtype;
  const tw_format* packed;
};

// Payloads and seeds, like references, are those of the first of the rows, others following; seeds may
// be null. Functions return -1, or row * n + place of a value that cannot be coded, or for which a
// payload's parameters are invalid; what comes after it is then undefined.
struct Kernels {
  const char* name;
  int64_t (*row_nbytes)(const tw_format& f, int64_t n);
  int64_t (*encode)(const tw_format& f, Rows rows, Source x, const int64_t* seeds, uint8_t* payload);
  int64_t (*decode)(const tw_format& f, Rows rows, const uint8_t* payload, Target y, bool streaming);
  int64_t (*delta_encode)(const tw_format& f, Rows rows, Source x, Reference reference, const void* const* from,
                          void* const* to, const int64_t* seeds, uint8_t* payload);
  // y.p may be null.
  int64_t (*delta_decode)(const tw_format& f, Rows rows, const uint8_t* payload, Reference reference,
                          const void* const* from, void* const* to, Target y, bool streaming);
  // Sums of squares of each block of 256 values: of x - from into change, of x into value.
  void (*energies)(int dtype, const void* x, Reference reference, const void* from, int64_t n, int64_t a,
                   int64_t b, float* change, float* value);
  // The sum of sums[0 … count) by halving; overwrites them.
  float (*total)(float* sums, int64_t count);
  const TopKKernels& (*topk)();
  const TileKernels& (*tile)();
  const ExpectKernels& (*expect)();
};

}  // namespace tw

// Every level's table.
extern "C" const tw::Kernels* tw_kernels_baseline();
extern "C" const tw::Kernels* tw_kernels_v3();
extern "C" const tw::Kernels* tw_kernels_v4();
