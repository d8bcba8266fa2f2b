// The level's top-k functions over rows, and their table.
#pragma once

#include <cstdint>
#include <cstring>

#include "indices.h"
#include "topk.h"
#include "topk_types.h"

namespace tw {
namespace TW_NS {
namespace topk {

// The key of infinity.
inline int32_t infinity(int32_t dtype) {
  return dtype == 0 ? 0x7f800000 : dtype == 1 ? 0x7f80 : 0x7c00;
}

template <class U>
inline int64_t encode_rows(const TopKRows& rows, const U* x, int64_t stride, uint8_t* out,
                                int64_t capacity, uint8_t* values, int64_t values_stride,
                                int64_t* starts) {
  const Golomb code(rows.modulus);
  const int32_t inf = infinity(rows.dtype);
  Workspace space;
  int64_t at = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t n = rows.sizes[r], k = rows.kept[r];
    const U* row = x + r * stride;
    starts[r] = at;
    if (k > n || k < (n > 0) || at + rows.widths[r] + indices_max_nbytes(code, n, k) > capacity)
      return -2;
    if (n == 0) {
      at += rows.widths[r];
      continue;
    }
    Threshold threshold = {0, 0};
    const int64_t bad = select(row, n, k, inf, space, threshold);
    if (bad == n) return -3;
    if (bad >= 0) {
      starts[0] = r;
      starts[1] = bad;
      return -1;
    }
    uint8_t* kept = values ? values + r * values_stride * static_cast<int64_t>(sizeof(U)) : out + at;
    uint8_t* start = out + at + rows.widths[r];
    uint8_t* end;
    if (!code.used(n, k)) {
      BitmaskSink sink(start);
      keep(row, n, k, threshold, kept, sink);
      end = sink.finish();
    } else if (code.ternary) {
      GolombSink<true> sink(start, k, code);
      keep(row, n, k, threshold, kept, sink);
      end = sink.finish();
    } else {
      GolombSink<false> sink(start, k, code);
      keep(row, n, k, threshold, kept, sink);
      end = sink.finish();
    }
    at = end - out;
  }
  starts[rows.rows] = at;
  return at;
}

// Rows of x, `stride` values apart, into `out`; the kept values go to `values`, rows of
// `values_stride`, or, if that is null, as they are into `out`. starts[rows + 1]: where each row
// begins. Returns the bytes written; -1: a value is not finite, at row starts[0], column starts[1];
// -2: k is not within 1 ... n, or `capacity` is too small; -3: no memory.
inline int64_t encode(const TopKRows& rows, const void* x, int64_t stride, uint8_t* out,
                           int64_t capacity, void* values, int64_t values_stride,
                           int64_t* starts) {
  uint8_t* v = static_cast<uint8_t*>(values);
  if (rows.dtype == 0)
    return encode_rows(rows, static_cast<const uint32_t*>(x), stride, out, capacity, v,
                            values_stride, starts);
  return encode_rows(rows, static_cast<const uint16_t*>(x), stride, out, capacity, v,
                          values_stride, starts);
}

// Coded values, widths[r] bytes a row one after the other, into the rows that start at `starts`.
inline int32_t put_values(const TopKRows& rows, const uint8_t* coded, const int64_t* starts,
                               uint8_t* out) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    std::memcpy(out + starts[r], coded, static_cast<size_t>(rows.widths[r]));
    coded += rows.widths[r];
  }
  return 1;
}

// Bytes of the positions of row r, whose bytes start at payload + at; -1: they do not fit.
inline int64_t row_indices(const TopKRows& rows, const Golomb& code, int64_t r,
                                const uint8_t* payload, int64_t nbytes, int64_t at) {
  const int64_t n = rows.sizes[r], k = rows.kept[r];
  if (k > n || k < (n > 0) || rows.widths[r] < 0 || rows.widths[r] > nbytes - at) return -1;
  const int64_t start = at + rows.widths[r];
  return indices_nbytes(code, payload + start, nbytes - start, n, k);
}

// The reverse of put_values. Returns 0 if the rows are not exactly the payload's bytes.
inline int32_t take_values(const TopKRows& rows, const uint8_t* payload, int64_t nbytes,
                                uint8_t* coded) {
  const Golomb code(rows.modulus);
  int64_t at = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t size = row_indices(rows, code, r, payload, nbytes, at);
    if (size < 0) return 0;
    std::memcpy(coded, payload + at, static_cast<size_t>(rows.widths[r]));
    coded += rows.widths[r];
    at += rows.widths[r] + size;
  }
  return at == nbytes;
}

template <class U>
inline int32_t decode_rows(const TopKRows& rows, const uint8_t* payload, int64_t nbytes,
                                const uint8_t* values, int64_t values_stride, U* y,
                                int64_t stride, int64_t width) {
  const Golomb code(rows.modulus);
  const int32_t inf = infinity(rows.dtype);
  int64_t at = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t n = rows.sizes[r], k = rows.kept[r];
    const int64_t size = row_indices(rows, code, r, payload, nbytes, at);
    if (size < 0 || n > width) return 0;
    if (!values && rows.widths[r] != k * static_cast<int64_t>(sizeof(U))) return 0;
    const uint8_t* p = payload + at + rows.widths[r];
    const uint8_t* kept =
        values ? values + r * values_stride * static_cast<int64_t>(sizeof(U)) : payload + at;
    U* row = y + r * stride;
    bool good = true;
    if (!code.used(n, k))
      good = scatter_bitmask(p, kept, row, n, k, inf);
    else if (code.ternary)
      good = scatter_golomb<U, true>(code, p, size, kept, row, n, k, inf);
    else
      good = scatter_golomb<U, false>(code, p, size, kept, row, n, k, inf);
    if (!good) return 0;
    if (n < width) std::memset(row + n, 0, static_cast<size_t>(width - n) * sizeof(U));
    at += rows.widths[r] + size;
  }
  return at == nbytes;
}

// A payload into rows of y, `width` values each, `stride` apart; zeros where nothing was kept. Kept
// values come from `values` (rows of `values_stride`), or, if that is null, from the payload.
// Returns 0, with y undefined, if the payload is not exactly the rows, a position is not within its
// row or a kept value is not finite.
inline int32_t decode(const TopKRows& rows, const uint8_t* payload, int64_t nbytes,
                           const void* values, int64_t values_stride, void* y, int64_t stride,
                           int64_t width) {
  const uint8_t* v = static_cast<const uint8_t*>(values);
  if (rows.dtype == 0)
    return decode_rows(rows, payload, nbytes, v, values_stride, static_cast<uint32_t*>(y),
                            stride, width);
  return decode_rows(rows, payload, nbytes, v, values_stride, static_cast<uint16_t*>(y),
                          stride, width);
}

}  // namespace topk

inline const TopKKernels& topk_table() {
  static const TopKKernels table = {topk::encode, topk::put_values, topk::take_values,
                                    topk::decode};
  return table;
}

}  // namespace TW_NS
}  // namespace tw
