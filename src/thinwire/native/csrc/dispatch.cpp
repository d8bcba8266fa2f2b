// The C interface: chooses the level of the instruction set, walks over rows, shares out threads.
//
// A tensor is `rows` rows of `n` values, `stride` values apart. Where `lengths` is not null, only the
// first lengths[i] values of row i are coded. A payload is the rows' bytes, one after the other.
#include <algorithm>
#include <cstring>
#include <vector>

#include "level.h"
#include "ordinary.h"
#include "pool.h"

#define TW_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using tw::Kernels;
using tw::Reference;

// Best first. TW_HAS_V3 and TW_HAS_V4 are defined by the build where those levels are compiled in.
int supported(const Kernels** found) {
  int count = 0;
#ifdef TW_HAS_V4
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma"))
    found[count++] = tw_kernels_v4();
#endif
#ifdef TW_HAS_V3
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("fma"))  // those with AVX2 have F16C, LZCNT and MOVBE too
    found[count++] = tw_kernels_v3();
#endif
  found[count++] = tw_kernels_baseline();
  return count;
}

struct Levels {
  const Kernels* all[3];
  int count;
  const Kernels* active;
  Levels() : count(supported(all)), active(all[0]) {}
};

Levels& levels() {
  static Levels instance;
  return instance;
}

// Outputs of this many bytes are written past the caches: they would not stay there anyway.
constexpr int64_t kStreamingBytes = int64_t{8} << 20;
// Rows of so many values in all are still in the cache when they are used once more.
constexpr int64_t kValuesInCache = 1 << 13;
// Values that are worth waking another thread for.
constexpr int64_t kValuesPerPiece = 1 << 16;

int64_t dtype_size(int dtype) { return dtype == TW_F32 ? 4 : 2; }

// Some rows from number `first` on, and their first byte in the payload.
struct Piece {
  int64_t first;
  tw::Rows rows;
  int64_t at;
};

// Least common multiple of 256 and the groups, if that is a piece of sensible size; else 0.
int64_t unit_of(const tw_format& f, const tw_format* reference) {
  const int64_t other = reference ? reference->group : 1;
  if (f.group == 0 || other == 0) return 0;
  for (int64_t unit = f.group; unit <= kValuesPerPiece; unit += f.group)
    if (unit % 256 == 0 && unit % other == 0) return unit;
  return 0;
}

// Calls work(piece) for pieces that make up all rows, on `threads` threads; rows are cut only where
// there are too few of them. A piece is of at most `most` values, if of more than one row.
template <class F>
void for_pieces(const tw_format& f, const tw_format* reference, int64_t rows, int64_t n, const int64_t* lengths,
                int threads, int64_t most, const F& work) {
  const tw::OrdinaryFloats scope;
  const auto& kernels = *levels().active;
  const bool parallel = threads > 1 && rows * n >= 2 * kValuesPerPiece;
  if (parallel) most = std::min(most, std::max(kValuesPerPiece, rows * n / (8 * threads)));
  const int64_t unit = parallel && rows < 4 * threads ? unit_of(f, reference) : 0;
  const int64_t cut = unit ? kValuesPerPiece / unit * unit : INT64_MAX;  // values that a row is cut after
  if (unit) most = 0;
  std::vector<Piece> pieces;
  int64_t at = 0;
  for (int64_t r = 0; r < rows;) {
    const int64_t length = lengths ? lengths[r] : n;
    int64_t end = r + 1;
    while (end < rows && (!lengths || lengths[end] == length) && (end + 1 - r) * length <= most) ++end;
    const tw::Rows together = {end - r, length, 0, length};
    if (length && !parallel) work(Piece{r, together, at});
    for (int64_t a = 0; parallel && a < length; a += std::min(cut, length - a))
      pieces.push_back({r, {together.count, length, a, length - a > cut ? a + cut : length}, at});
    at += (end - r) * kernels.row_nbytes(f, length);
    r = end;
  }
  tw::Pool::instance().run(static_cast<int64_t>(pieces.size()), threads, [&](int64_t k) { work(pieces[k]); });
}

// Calls work(row, values, byte in the payload) for every row that has values, on `threads` threads;
// nbytes(values) says what a row takes.
template <class N, class F>
void for_rows(int64_t rows, int64_t n, const int64_t* lengths, int threads, const N& nbytes, const F& work) {
  if (n == 0) return;  // there may be any number of empty rows
  const tw::OrdinaryFloats scope;
  std::vector<int64_t> starts;
  if (lengths) {
    int64_t at = 0;
    for (int64_t r = 0; r < rows; ++r) {
      starts.push_back(at);
      at += nbytes(lengths[r]);
    }
  }
  const int64_t width = nbytes(n);
  const auto run = [&](int64_t r) {
    if (!lengths)
      work(r, n, r * width);
    else if (lengths[r])
      work(r, lengths[r], starts[r]);
  };
  if (threads <= 1 || rows * n < 2 * kValuesPerPiece) {
    for (int64_t r = 0; r < rows; ++r) run(r);
    return;
  }
  const int64_t batch = std::max<int64_t>(1, rows / (8 * threads));
  tw::Pool::instance().run((rows + batch - 1) / batch, threads, [&](int64_t k) {
    const int64_t end = std::min(rows, (k + 1) * batch);
    for (int64_t r = k * batch; r < end; ++r) run(r);
  });
}

// The first place that a piece reported.
class First {
 public:
  void report(int64_t place) {
    int64_t seen = least_.load(std::memory_order_relaxed);
    while (place < seen && !least_.compare_exchange_weak(seen, place, std::memory_order_relaxed)) {
    }
  }
  // What a kernel returned for a piece, of rows of a tensor with n values a row.
  void report(const Piece& p, int64_t n, int64_t place) {
    if (place >= 0) report((p.first + place / p.rows.n) * n + place % p.rows.n);
  }
  int64_t get() const {
    const int64_t least = least_.load(std::memory_order_relaxed);
    return least == INT64_MAX ? -1 : least;
  }

 private:
  std::atomic<int64_t> least_{INT64_MAX};
};

const char* at_row(const void* p, int64_t row, int64_t stride, int dtype) {
  return static_cast<const char*>(p) + row * stride * dtype_size(dtype);
}
char* at_row(void* p, int64_t row, int64_t stride, int dtype) {
  return static_cast<char*>(p) + row * stride * dtype_size(dtype);
}

const int64_t* at_row(const int64_t* seeds, int64_t row) { return seeds ? seeds + row : nullptr; }

void clear_rest(void* y, int64_t rows, int64_t n, int64_t stride, const int64_t* lengths, int dtype) {
  for (int64_t r = 0; r < rows; ++r)
    std::memset(at_row(y, r, stride, dtype) + lengths[r] * dtype_size(dtype), 0,
                (n - lengths[r]) * dtype_size(dtype));
}

}  // namespace

// Raised whenever a function's arguments or a struct's layout change.
TW_EXPORT int tw_abi_version() { return 4; }

// The levels that this machine can run, best first.
TW_EXPORT int tw_level_count() { return levels().count; }
TW_EXPORT const char* tw_level_name(int index) { return levels().all[index]->name; }

// The level in use; tests and measurements choose another (not while kernels run).
TW_EXPORT const char* tw_level() { return levels().active->name; }
TW_EXPORT int tw_set_level(const char* name) {
  for (int k = 0; k < levels().count; ++k)
    if (std::strcmp(levels().all[k]->name, name) == 0) {
      levels().active = levels().all[k];
      return 1;
    }
  return 0;
}

// Encode into `payload`; returns -1, or row * n + place of a value that cannot be coded.
TW_EXPORT int64_t tw_encode(const tw_format* f, int dtype, const void* x, int64_t rows, int64_t n, int64_t stride,
                            const int64_t* lengths, const int64_t* seeds, uint8_t* payload, int threads) {
  if (n == 0) rows = 0;  // there may be any number of empty rows
  First bad;
  const auto encode = levels().active->encode;
  for_pieces(*f, nullptr, rows, n, lengths, threads, INT64_MAX, [&](const Piece& p) {
    bad.report(p, n, encode(*f, p.rows, {dtype, at_row(x, p.first, stride, dtype), stride}, at_row(seeds, p.first),
                            payload + p.at));
  });
  return bad.get();
}

// Decode into y, whose values beyond each row's length become zero; returns -1, or 0 with y undefined
// if the payload's parameters are invalid.
TW_EXPORT int64_t tw_decode(const tw_format* f, const uint8_t* payload, int dtype, void* y, int64_t rows, int64_t n,
                            int64_t stride, const int64_t* lengths, int threads) {
  if (n == 0) rows = 0;
  First bad;
  const auto& kernels = *levels().active;
  const bool streaming = rows * n * dtype_size(dtype) >= kStreamingBytes;
  for_pieces(*f, nullptr, rows, n, lengths, threads, INT64_MAX, [&](const Piece& p) {
    bad.report(p, n, kernels.decode(*f, p.rows, payload + p.at, {dtype, at_row(y, p.first, stride, dtype), stride},
                                    streaming));
  });
  if (lengths) clear_rest(y, rows, n, stride, lengths, dtype);
  return bad.get() < 0 ? -1 : 0;
}

// The AQ-SGD step: the change of x from the references `from` into `payload`, and the references
// moved by what a receiver decodes into `to` (one pointer a row; the same ones to move them in place).
// References are TW_F32 or TW_BF16 values, or encoded in the format `packed`. With `energies`
// [rows, 2], also the sums of squares of each row's change and value. Returns -1, or the place of a
// value that cannot be coded, with all outputs undefined.
TW_EXPORT int64_t tw_delta_encode(const tw_format* f, int dtype, const void* x, int64_t rows, int64_t n,
                                  int64_t stride, const int64_t* lengths, int reference, const tw_format* packed,
                                  const void* const* from, void* const* to, const int64_t* seeds, uint8_t* payload,
                                  float* energies, int threads) {
  if (n == 0) {
    if (energies) std::memset(energies, 0, 2 * rows * sizeof *energies);
    return -1;
  }
  First bad;
  const auto& kernels = *levels().active;
  const int64_t blocks = (n + 255) / 256;
  // twice as much as there are blocks, since halving pads to a power of two
  std::vector<float> sums(energies ? rows * blocks * 4 : 0);
  // energies leave the values in the cache for what follows
  const int64_t most = energies ? kValuesInCache : INT64_MAX;
  for_pieces(*f, packed, rows, n, lengths, threads, most, [&](const Piece& p) {
    for (int64_t r = p.first; energies && r < p.first + p.rows.count; ++r) {
      float* const change = sums.data() + r * blocks * 4;
      kernels.energies(dtype, at_row(x, r, stride, dtype), {reference, packed}, from[r], p.rows.n, p.rows.a, p.rows.b,
                       change, change + 2 * blocks);
    }
    bad.report(p, n, kernels.delta_encode(*f, p.rows, {dtype, at_row(x, p.first, stride, dtype), stride},
                                          {reference, packed}, from + p.first, to + p.first,
                                          at_row(seeds, p.first), payload + p.at));
  });
  const tw::OrdinaryFloats scope;
  for (int64_t r = 0; energies && r < rows; ++r)
    for (int k = 0; k < 2; ++k)
      energies[2 * r + k] =
          kernels.total(sums.data() + (2 * r + k) * 2 * blocks, ((lengths ? lengths[r] : n) + 255) / 256);
  return bad.get();
}

// The receiver's half: references `from`, moved by the payload, into `to`, and as `dtype` into y, if
// that is not null. Returns -1, or 0 with `to` and y undefined if the payload's parameters are invalid
// or a reference would not be finite.
TW_EXPORT int64_t tw_delta_decode(const tw_format* f, const uint8_t* payload, int64_t rows, int64_t n,
                                  const int64_t* lengths, int reference, const tw_format* packed,
                                  const void* const* from, void* const* to, int dtype, void* y, int64_t stride,
                                  int threads) {
  if (n == 0) rows = 0;
  First bad;
  const auto& kernels = *levels().active;
  const bool streaming = rows * n * dtype_size(dtype) >= kStreamingBytes;
  for_pieces(*f, packed, rows, n, lengths, threads, INT64_MAX, [&](const Piece& p) {
    void* const out = y ? at_row(y, p.first, stride, dtype) : nullptr;
    bad.report(p, n, kernels.delta_decode(*f, p.rows, payload + p.at, {reference, packed}, from + p.first,
                                          to + p.first, {dtype, out, stride}, streaming));
  });
  if (y && lengths) clear_rest(y, rows, n, stride, lengths, dtype);
  return bad.get() < 0 ? -1 : 0;
}

static const tw::TopKKernels& topk_kernels() { return levels().active->topk(); }

#include "expect_api.h"
#include "expected_api.h"
#include "tile_api.h"
#include "topk_api.h"
