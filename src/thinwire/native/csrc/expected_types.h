// What a call of the AQ-SGD step around what both ends expect is told.
#pragma once

#include <cstdint>

#include "level.h"

// What both ends know of a message before it is decoded: `rows` rows of `n` values, positions of `width`
// each; see thinwire.native.expected.Around.
struct tw_known {
  int64_t rows, n, width;
  // What is expected of position i: the sum of the tables' vectors, or ready[i], times `scale`.
  int64_t count;
  const int64_t* const* ids;
  const float* const* tables;
  const int64_t* sizes;
  const float* ready;
  float scale;
  // What lesson is multiplied by.
  float factor;
  // References [rows, n], or one a row, encoded in `packed`, or float32 where that is null. None: zero.
  const float* base;
  const void* const* from;
  const tw_format* packed;
};

// Where what comes of it goes: y [rows, n], the references that its rows become, if those are kept, and
// what tables learn from, (y - base) * factor, if that is not null.
struct tw_becomes {
  float* y;
  void* const* to;
  float* lesson;
};
