// The C interface: chooses the level of the instruction set, walks over rows, shares out threads.
//
// A tensor is `rows` rows of `n` values, `stride` values apart. Where `lengths` is not null, only the
// first lengths[i] values of row i are coded. A payload is the rows' bytes, one after the other.
#include <algorithm>
#include <cstring>
#include <vector>

#include "level.h"
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
// Values that are worth waking another thread for.
constexpr int64_t kValuesPerPiece = 1 << 16;

int64_t dtype_size(int dtype) { return dtype == TW_F32 ? 4 : 2; }

struct Piece {
  int64_t row, n, a, b;
  int64_t at;  // byte of the row in the payload
};

// Least common multiple of 256 and the groups, if that is a piece of sensible size; else 0.
int64_t unit_of(const tw_format& f, const tw_format* reference) {
  const int64_t other = reference ? reference->group : 1;
  if (f.group == 0 || other == 0) return 0;
  for (int64_t unit = f.group; unit <= kValuesPerPiece; unit += f.group)
    if (unit % 256 == 0 && unit % other == 0) return unit;
  return 0;
}

// Calls work(piece) for every piece of every row, on `threads` threads; rows are cut only where
// there are too few of them.
template <class F>
void for_pieces(const tw_format& f, const tw_format* reference, int64_t rows, int64_t n, const int64_t* lengths,
                int threads, const F& work) {
  const auto& kernels = *levels().active;
  const bool parallel = threads > 1 && rows * n >= 2 * kValuesPerPiece;
  const int64_t unit = parallel && rows < 4 * threads ? unit_of(f, reference) : 0;
  const int64_t most = unit ? kValuesPerPiece / unit * unit : INT64_MAX;
  const int64_t whole = kernels.row_nbytes(f, n);
  if (!parallel) {
    int64_t at = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t length = lengths ? lengths[r] : n;
      if (length) work(Piece{r, length, 0, length, at});
      at += lengths ? kernels.row_nbytes(f, length) : whole;
    }
    return;
  }
  std::vector<Piece> pieces;
  int64_t at = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t length = lengths ? lengths[r] : n;
    for (int64_t a = 0; a < length;) {
      const int64_t b = length - a > most ? a + most : length;
      pieces.push_back({r, length, a, b, at});
      a = b;
    }
    at += lengths ? kernels.row_nbytes(f, length) : whole;
  }
  // small rows go to a thread in batches
  const int64_t batch = std::max<int64_t>(1, static_cast<int64_t>(pieces.size()) / (8 * threads));
  const int64_t batches = (static_cast<int64_t>(pieces.size()) + batch - 1) / batch;
  tw::Pool::instance().run(batches, threads, [&](int64_t k) {
    const int64_t end = std::min<int64_t>((k + 1) * batch, static_cast<int64_t>(pieces.size()));
    for (int64_t p = k * batch; p < end; ++p) work(pieces[p]);
  });
}

// Calls work(row, values, byte in the payload) for every row that has values, on `threads` threads;
// nbytes(values) says what a row takes.
template <class N, class F>
void for_rows(int64_t rows, int64_t n, const int64_t* lengths, int threads, const N& nbytes, const F& work) {
  if (n == 0) return;  // there may be any number of empty rows
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

void clear_rest(void* y, int64_t rows, int64_t n, int64_t stride, const int64_t* lengths, int dtype) {
  for (int64_t r = 0; r < rows; ++r)
    std::memset(at_row(y, r, stride, dtype) + lengths[r] * dtype_size(dtype), 0,
                (n - lengths[r]) * dtype_size(dtype));
}

}  // namespace

// Raised whenever a function's arguments or a struct's layout change.
TW_EXPORT int tw_abi_version() { return 2; }

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
  for_pieces(*f, nullptr, rows, n, lengths, threads, [&](const Piece& p) {
    const int64_t place = encode(*f, dtype, at_row(x, p.row, stride, dtype), p.n, p.a, p.b,
                                 seeds ? seeds[p.row] : 0, payload + p.at);
    if (place >= 0) bad.report(p.row * n + place);
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
  for_pieces(*f, nullptr, rows, n, lengths, threads, [&](const Piece& p) {
    // a row's first piece answers for all of it, while it is on its way into the cache
    if (p.a == 0 && !kernels.valid(*f, p.n, payload + p.at)) return bad.report(0);
    kernels.decode(*f, payload + p.at, p.n, p.a, p.b, dtype, at_row(y, p.row, stride, dtype), streaming);
  });
  if (lengths) clear_rest(y, rows, n, stride, lengths, dtype);
  return bad.get();
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
  for_pieces(*f, packed, rows, n, lengths, threads, [&](const Piece& p) {
    const void* const values = at_row(x, p.row, stride, dtype);
    if (energies) {
      float* const change = sums.data() + p.row * blocks * 4;
      kernels.energies(dtype, values, {reference, packed}, from[p.row], p.n, p.a, p.b, change, change + 2 * blocks);
    }
    const int64_t place = kernels.delta_encode(*f, dtype, values, {reference, packed}, from[p.row], to[p.row], p.n,
                                               p.a, p.b, seeds ? seeds[p.row] : 0, payload + p.at);
    if (place >= 0) bad.report(p.row * n + place);
  });
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
  for_pieces(*f, packed, rows, n, lengths, threads, [&](const Piece& p) {
    void* const out = y ? at_row(y, p.row, stride, dtype) : nullptr;
    if (p.a == 0 && !kernels.valid(*f, p.n, payload + p.at)) return bad.report(0);
    if (kernels.delta_decode(*f, payload + p.at, {reference, packed}, from[p.row], to[p.row], p.n, p.a, p.b, dtype,
                             out, streaming) >= 0)
      bad.report(0);
  });
  if (y && lengths) clear_rest(y, rows, n, stride, lengths, dtype);
  return bad.get();
}

static const tw::TopKKernels& topk_kernels() { return levels().active->topk(); }

#include "tile_api.h"
#include "topk_api.h"
