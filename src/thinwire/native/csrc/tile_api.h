// The exported functions of the codec tile: included by dispatch.cpp, which defines TW_EXPORT, the
// rows' addresses, and for_rows.
#pragma once

#include <cstdint>

#include "tile_types.h"

// The first lengths[i] (null: all n) of each row's values into `payload`, one row after the other.
// Returns -1, or row * n + place of a value that is not finite.
TW_EXPORT int64_t tw_tile_encode(int bits, int dtype, const void* x, int64_t rows, int64_t n,
                                 int64_t stride, const int64_t* lengths, uint8_t* payload,
                                 int threads) {
  const tw::TileKernels& tile = levels().active->tile();
  First bad;
  for_rows(rows, n, lengths, threads, [&](int64_t length) { return tile.row_nbytes(bits, length); },
           [&](int64_t r, int64_t length, int64_t at) {
             const int64_t place =
                 tile.encode(bits, dtype, at_row(x, r, stride, dtype), length, payload + at);
             if (place >= 0) bad.report(r * n + place);
           });
  return bad.get();
}

// The reverse; values beyond each row's length become zero. Returns -1, or 0 with y untouched if a
// scale in the payload is invalid.
TW_EXPORT int64_t tw_tile_decode(int bits, const uint8_t* payload, int dtype, void* y, int64_t rows,
                                 int64_t n, int64_t stride, const int64_t* lengths, int threads) {
  const tw::TileKernels& tile = levels().active->tile();
  const auto nbytes = [&](int64_t length) { return tile.row_nbytes(bits, length); };
  bool valid = true;
  for_rows(rows, n, lengths, 1, nbytes, [&](int64_t, int64_t length, int64_t at) {
    valid = valid && tile.valid(bits, length, payload + at);
  });
  if (!valid) return 0;
  const bool streaming = rows * n * dtype_size(dtype) >= kStreamingBytes;
  for_rows(rows, n, lengths, threads, nbytes, [&](int64_t r, int64_t length, int64_t at) {
    tile.decode(bits, payload + at, length, dtype, at_row(y, r, stride, dtype), streaming);
  });
  if (lengths) clear_rest(y, rows, n, stride, lengths, dtype);
  return -1;
}
