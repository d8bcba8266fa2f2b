// Feeds the kernels what no codec would: damaged and made-up payloads, and floats of any bits.
//
//   fuzz SECONDS SEED [ITERATION [LAST]]
//
// Every input goes to every level of the instruction set, and all have to agree on the answer. The
// buffers are of exactly the right size: past their end (or before their start) lies memory that
// must not be touched, a page that is not there or, in the build with sanitizers, a red zone.
// Iterations are numbered and draw from (SEED, number) alone, so the one that a crash names can be
// run again by itself. Arguments that never come from outside (formats, sizes) are always valid.
// With LAST, a line for every iteration up to it says what came of it: machines are compared by those.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "expected_types.h"
#include "fuzz_input.h"

extern "C" {
int tw_level_count();
const char* tw_level_name(int index);
int tw_set_level(const char* name);
int64_t tw_encode(const tw_format*, int dtype, const void* x, int64_t rows, int64_t n, int64_t stride,
                  const int64_t* lengths, const int64_t* seeds, uint8_t* payload, int threads);
int64_t tw_decode(const tw_format*, const uint8_t* payload, int dtype, void* y, int64_t rows, int64_t n,
                  int64_t stride, const int64_t* lengths, int threads);
int64_t tw_delta_encode(const tw_format*, int dtype, const void* x, int64_t rows, int64_t n, int64_t stride,
                        const int64_t* lengths, int reference, const tw_format* packed, const void* const* from,
                        void* const* to, const int64_t* seeds, uint8_t* payload, float* energies, int threads);
int64_t tw_delta_decode(const tw_format*, const uint8_t* payload, int64_t rows, int64_t n, const int64_t* lengths,
                        int reference, const tw_format* packed, const void* const* from, void* const* to, int dtype,
                        void* y, int64_t stride, int threads);
int64_t tw_topk_encode(int64_t rows, const int64_t* sizes, const int64_t* kept, const int64_t* widths,
                       int64_t modulus, int32_t dtype, const void* x, int64_t stride, uint8_t* out, int64_t capacity,
                       void* values, int64_t values_stride, int64_t* starts);
int32_t tw_topk_put_values(int64_t rows, const int64_t* sizes, const int64_t* kept, const int64_t* widths,
                           int64_t modulus, int32_t dtype, const uint8_t* coded, const int64_t* starts, uint8_t* out);
int32_t tw_topk_take_values(int64_t rows, const int64_t* sizes, const int64_t* kept, const int64_t* widths,
                            int64_t modulus, int32_t dtype, const uint8_t* payload, int64_t nbytes, uint8_t* coded);
int32_t tw_topk_decode(int64_t rows, const int64_t* sizes, const int64_t* kept, const int64_t* widths,
                       int64_t modulus, int32_t dtype, const uint8_t* payload, int64_t nbytes, const void* values,
                       int64_t values_stride, void* y, int64_t stride, int64_t width);
int64_t tw_tile_encode(int bits, int dtype, const void* x, int64_t rows, int64_t n, int64_t stride,
                       const int64_t* lengths, uint8_t* payload, int threads);
int64_t tw_tile_decode(int bits, const uint8_t* payload, int dtype, void* y, int64_t rows, int64_t n, int64_t stride,
                       const int64_t* lengths, int threads);
int64_t tw_expected_encode(const tw_format*, const tw_known*, int dtype, const void* x, const tw_becomes*,
                           int64_t ordinary, uint8_t* payload, float* energies, int threads);
int64_t tw_expected_decode(const tw_format*, const tw_known*, const uint8_t* payload, const tw_becomes*, int dtype,
                           void* y, int threads);
}

namespace {

// Calls visit(first) at every level; `first` for the one whose results the others have to match.
template <class F>
void at_every_level(const F& visit) {
  for (int k = 0; k < tw_level_count(); ++k) {
    require(tw_set_level(tw_level_name(k)), "no such level");
    visit(k == 0);
  }
}

// A payload that a peer might send: encoded and damaged, plausible, or any bytes.
void fill_payload(Random& random, const tw_format& f, const Shape& s, Memory& payload) {
  fill_bytes(random, payload.data(), payload.nbytes());
  if (random.once_in(5)) return;
  plausible(random, f, s, payload.data());
  if (random.once_in(2)) {
    Memory x(random, s.nbytes(), 4);
    fill_values(random, x.data(), s.values(), s.dtype);
    const std::vector<int64_t> seeds = draw_seeds(random, s.rows);
    tw_encode(&f, s.dtype, x.data(), s.rows, s.n, s.stride, s.given(), seeds.data(), payload.data(), s.threads);
  }
  damage(random, payload.data(), payload.nbytes());
}

// The rows' bytes of `y` must be those of `first`; what is between rows must be as it was.
bool same_rows(const Shape& s, const uint8_t* y, const uint8_t* first) {
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t at = r * s.stride * itemsize(s.dtype), nbytes = s.n * itemsize(s.dtype);
    if (std::memcmp(y + at, first + at, static_cast<size_t>(nbytes))) return false;
  }
  return true;
}
constexpr uint8_t kGap = 0xA5;
bool gaps_untouched(const Shape& s, const uint8_t* y) {
  for (int64_t r = 0; r + 1 < s.rows; ++r)
    for (int64_t i = (r * s.stride + s.n) * itemsize(s.dtype); i < (r + 1) * s.stride * itemsize(s.dtype); ++i)
      if (y[i] != kGap) return false;
  return true;
}

bool same(const Memory& a, const Memory& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())) == 0;
}

// What came of this iteration, in one number.
uint64_t digest_now;

void note(const void* p, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const uint8_t*>(p) + i, static_cast<size_t>(std::min<int64_t>(8, nbytes - i)));
    digest_now = (digest_now ^ word) * 0x9E3779B97F4A7C15u;
    digest_now ^= digest_now >> 32;
  }
}

// Notes the answer and, if the input was accepted, the results; returns whether it was.
bool noted(int64_t answer, bool accepted, std::initializer_list<const Memory*> results) {
  note(&answer, sizeof answer);
  for (const Memory* memory : results)
    if (accepted) note(memory->data(), memory->nbytes());
  return accepted;
}

bool fuzz_decode(Random& random) {
  const tw_format f = draw_format(random);
  const Shape s = draw_shape(random);
  Memory payload(random, payload_nbytes(f, s), 1), y(random, s.nbytes(), 4), first(random, s.nbytes(), 4);
  fill_payload(random, f, s, payload);
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    std::memset(y.data(), kGap, static_cast<size_t>(y.nbytes()));
    const int64_t found =
        tw_decode(&f, payload.data(), s.dtype, y.data(), s.rows, s.n, s.stride, s.given(), s.threads);
    require(found == -1 || found == 0, "tw_decode: an answer that is none");
    require(gaps_untouched(s, y.data()), "tw_decode: wrote between rows");
    if (is_first) answer = found, std::memcpy(first.data(), y.data(), static_cast<size_t>(y.nbytes()));
    require(found == answer, "tw_decode: levels disagree about validity");
    require(found >= 0 || same_rows(s, y.data(), first.data()), "tw_decode: levels decode differently");
  });
  return noted(answer, answer < 0, {&first});
}

bool fuzz_encode(Random& random) {
  const tw_format f = draw_format(random);
  const Shape s = draw_shape(random);
  Memory x(random, s.nbytes(), 4), payload(random, payload_nbytes(f, s), 1), first(random, payload.nbytes(), 1);
  fill_values(random, x.data(), s.values(), s.dtype);
  const std::vector<int64_t> seeds = draw_seeds(random, s.rows);
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    const int64_t place =
        tw_encode(&f, s.dtype, x.data(), s.rows, s.n, s.stride, s.given(), seeds.data(), payload.data(), s.threads);
    require(place >= -1 && place < std::max<int64_t>(1, s.rows * s.n), "tw_encode: a place that is none");
    if (is_first) answer = place, std::memcpy(first.data(), payload.data(), static_cast<size_t>(payload.nbytes()));
    require(place == answer, "tw_encode: levels disagree about codability");
    require(place >= 0 || same(payload, first), "tw_encode: levels encode differently");
  });
  return noted(answer, answer < 0, {&first});
}

// References: float32, bfloat16, or an integer format.
struct Reference {
  int dtype;
  bool is_packed;
  tw_format packed;
  const tw_format* format() const { return is_packed ? &packed : nullptr; }
  int64_t nbytes(int64_t n) const { return is_packed ? row_nbytes(packed, n) : n * itemsize(dtype); }
};

Reference draw_reference(Random& random) {
  Reference how = {static_cast<int>(random.below(2)), random.once_in(2), draw_format(random)};
  if (how.is_packed) {
    how.dtype = TW_F32;
    if (random.once_in(2)) how.packed = {random.of({4, 8}), random.once_in(3) ? TW_SYMMETRIC : 0, 128};
    how.packed.flags &= ~TW_STOCHASTIC;
  }
  return how;
}

// Each row's reference on its own, before and after.
struct References {
  std::vector<Memory*> before, after, first;
  std::vector<void*> from, to;

  References(Random& random, const Reference& how, const Shape& s, bool in_place) {
    for (int64_t r = 0; r < s.rows; ++r) {
      const int64_t n = s.lengths[static_cast<size_t>(r)], nbytes = how.nbytes(n), align = how.is_packed ? 1 : 4;
      before.push_back(new Memory(random, nbytes, align));
      after.push_back(new Memory(random, nbytes, align));
      first.push_back(new Memory(random, nbytes, align));
      Shape row = s;
      row.rows = 1;
      row.stride = row.n = n;
      row.lengths = {n};
      row.ragged = false;
      row.dtype = how.dtype;
      if (how.is_packed)
        fill_payload(random, how.packed, row, *before.back());
      else
        fill_values(random, before.back()->data(), n, how.dtype);
      from.push_back(in_place ? after.back()->data() : before.back()->data());
      to.push_back(after.back()->data());
    }
  }
  ~References() {
    for (auto* all : {&before, &after, &first})
      for (Memory* one : *all) delete one;
  }
  // As before the first step.
  void reset() const {
    for (size_t r = 0; r < before.size(); ++r)
      std::memcpy(after[r]->data(), before[r]->data(), static_cast<size_t>(before[r]->nbytes()));
  }
  void remember() const {
    for (size_t r = 0; r < before.size(); ++r)
      std::memcpy(first[r]->data(), after[r]->data(), static_cast<size_t>(before[r]->nbytes()));
  }
  bool as_remembered() const {
    for (size_t r = 0; r < before.size(); ++r)
      if (!same(*after[r], *first[r])) return false;
    return true;
  }
  void note_remembered() const {
    for (const Memory* row : first) note(row->data(), row->nbytes());
  }
};

bool fuzz_delta_encode(Random& random) {
  const tw_format f = draw_format(random);
  const Shape s = draw_shape(random, false);
  const Reference how = draw_reference(random);
  const References references(random, how, s, random.once_in(2));
  Memory x(random, s.nbytes(), 4), payload(random, payload_nbytes(f, s), 1), first(random, payload.nbytes(), 1);
  Memory energies(random, s.rows * 8, 4), first_energies(random, s.rows * 8, 4);
  fill_values(random, x.data(), s.values(), s.dtype);
  const std::vector<int64_t> seeds = draw_seeds(random, s.rows);
  const bool wanted = random.once_in(2);
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    references.reset();
    std::memset(energies.data(), 0, static_cast<size_t>(energies.nbytes()));
    const int64_t place =
        tw_delta_encode(&f, s.dtype, x.data(), s.rows, s.n, s.stride, s.given(), how.dtype, how.format(),
                        references.from.data(), references.to.data(), seeds.data(), payload.data(),
                        wanted ? energies.as<float>() : nullptr, s.threads);
    if (is_first) {
      answer = place;
      references.remember();
      std::memcpy(first.data(), payload.data(), static_cast<size_t>(payload.nbytes()));
      std::memcpy(first_energies.data(), energies.data(), static_cast<size_t>(energies.nbytes()));
    }
    require(place == answer, "tw_delta_encode: levels disagree about codability");
    if (place >= 0) return;
    require(same(payload, first), "tw_delta_encode: levels encode differently");
    require(references.as_remembered(), "tw_delta_encode: levels move references differently");
    require(same(energies, first_energies), "tw_delta_encode: levels measure energies differently");
  });
  if (answer < 0) references.note_remembered();
  return noted(answer, answer < 0, {&first, &first_energies});
}

bool fuzz_delta_decode(Random& random) {
  const tw_format f = draw_format(random);
  const Shape s = draw_shape(random, false);
  const Reference how = draw_reference(random);
  const References references(random, how, s, random.once_in(2));
  Memory payload(random, payload_nbytes(f, s), 1), y(random, s.nbytes(), 4), first(random, s.nbytes(), 4);
  fill_payload(random, f, s, payload);
  const bool wanted = !random.once_in(3);
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    references.reset();
    std::memset(y.data(), kGap, static_cast<size_t>(y.nbytes()));
    const int64_t found = tw_delta_decode(&f, payload.data(), s.rows, s.n, s.given(), how.dtype, how.format(),
                                          references.from.data(), references.to.data(), s.dtype,
                                          wanted ? y.data() : nullptr, s.stride, s.threads);
    require(gaps_untouched(s, y.data()), "tw_delta_decode: wrote between rows");
    if (is_first) {
      answer = found;
      references.remember();
      std::memcpy(first.data(), y.data(), static_cast<size_t>(y.nbytes()));
    }
    require(found == answer, "tw_delta_decode: levels disagree about validity");
    if (found >= 0) return;
    require(references.as_remembered(), "tw_delta_decode: levels move references differently");
    require(same_rows(s, y.data(), first.data()), "tw_delta_decode: levels decode differently");
  });
  if (answer < 0) references.note_remembered();
  return noted(answer, answer < 0, {&first});
}

// What both ends know of a message: tables, ids of which tables may lack some, and references.
struct Expected {
  static constexpr tw_format kPacked = {8, 0, 128};
  Shape shape;
  int64_t positions, width;
  std::vector<Memory*> memory;
  std::vector<const int64_t*> ids;
  std::vector<const float*> tables;
  std::vector<int64_t> sizes;
  std::vector<const void*> from;
  std::vector<void*> to;
  tw_known known = {};

  explicit Expected(Random& random) : positions(random.within(1, 12)), width(random.within(1, 200)) {
    shape.rows = random.within(1, 3), shape.n = shape.stride = positions * width;
    shape.dtype = static_cast<int>(random.below(2)), shape.threads = static_cast<int>(random.within(1, 2));
    shape.ragged = false, shape.lengths.assign(static_cast<size_t>(shape.rows), shape.n);
    for (int64_t k = random.within(1, 3); k > 0; --k) {
      sizes.push_back(random.within(1, 5));
      tables.push_back(floats(random, sizes.back() * width));
      memory.push_back(new Memory(random, 8 * shape.rows * positions, 8));
      auto* const some = reinterpret_cast<int64_t*>(memory.back()->data());
      for (int64_t i = 0; i < shape.rows * positions; ++i) some[i] = random.within(0, 8) - 2;
      ids.push_back(some);
    }
    known = {shape.rows, shape.n, width, static_cast<int64_t>(ids.size()), ids.data(), tables.data(), sizes.data()};
    known.scale = known.factor = random.once_in(2) ? 1.0f : 0.25f;
    if (random.once_in(3)) known.ready = floats(random, shape.rows * shape.n);
    if (random.once_in(3)) known.base = floats(random, shape.rows * shape.n);
    if (random.once_in(2)) {
      known.packed = &kPacked;
      const int64_t nbytes = row_nbytes(kPacked, shape.n);
      for (int64_t r = 0; r < shape.rows; ++r) {
        const float* const values = floats(random, shape.n);
        memory.push_back(new Memory(random, nbytes, 1));
        fill_bytes(random, memory.back()->data(), nbytes);
        tw_encode(&kPacked, TW_F32, values, 1, shape.n, shape.n, nullptr, nullptr, memory.back()->data(), 1);
        from.push_back(memory.back()->data());
        memory.push_back(new Memory(random, nbytes, 1));
        to.push_back(memory.back()->data());
      }
      known.from = from.data();
    }
  }
  ~Expected() {
    for (Memory* one : memory) delete one;
  }
  Expected(const Expected&) = delete;

  // So many of them, ordinary or, seldom, of any bits.
  const float* floats(Random& random, int64_t count) {
    memory.push_back(new Memory(random, 4 * count, 4));
    auto* const found = reinterpret_cast<float*>(memory.back()->data());
    for (int64_t i = 0; i < count; ++i) found[i] = static_cast<float>(random.within(0, 2000) - 1000) / 512.0f;
    if (random.once_in(8)) fill_values(random, memory.back()->data(), count, TW_F32);
    return found;
  }
};

bool fuzz_expected(Random& random) {
  tw_format f = draw_format(random);
  f.flags &= ~TW_STOCHASTIC;
  const Expected e(random);
  const Shape& s = e.shape;
  const int64_t values = 4 * s.rows * s.n;
  Memory rows(random, payload_nbytes(f, s), 1), payload(random, s.rows + rows.nbytes(), 1);
  Memory x(random, s.nbytes(), 4), y(random, values, 4), lesson(random, values, 4), energies(random, 8 * s.rows, 4);
  Memory first(random, payload.nbytes(), 1), first_y(random, values, 4), first_lesson(random, values, 4);
  fill_values(random, x.data(), s.rows * s.n, s.dtype);
  const bool sends = random.once_in(2);
  const int64_t ordinary = random.once_in(2) ? 0 : random.within(1, s.rows * e.positions);
  if (!sends) {
    fill_payload(random, f, s, rows);
    fill_bytes(random, payload.data(), s.rows);
    std::memcpy(payload.data() + s.rows, rows.data(), static_cast<size_t>(rows.nbytes()));
  }
  const tw_becomes out = {reinterpret_cast<float*>(y.data()), e.to.empty() ? nullptr : e.to.data(),
                          reinterpret_cast<float*>(lesson.data())};
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    const int64_t found =
        sends ? tw_expected_encode(&f, &e.known, s.dtype, x.data(), &out, ordinary, payload.data(),
                                   reinterpret_cast<float*>(energies.data()), s.threads)
              : tw_expected_decode(&f, &e.known, payload.data(), &out, s.dtype, x.data(), s.threads);
    require(found >= -2 && found < s.rows * s.n, "tw_expected: an answer that is none");
    if (is_first) {
      answer = found;
      for (auto [to, from] : {std::pair{&first, &payload}, {&first_y, &y}, {&first_lesson, &lesson}})
        std::memcpy(to->data(), from->data(), static_cast<size_t>(from->nbytes()));
    }
    // of values that are not finite a level may find that they are far away first
    require((found == -1) == (answer == -1), "tw_expected: levels disagree about validity");
    if (found != -1) return;
    require(same(payload, first), "tw_expected: levels encode differently");
    require(same(y, first_y) && same(lesson, first_lesson), "tw_expected: levels decode differently");
  });
  return noted(answer == -1 ? -1 : 0, answer == -1, {&first, &first_y, &first_lesson});
}

// Rows for top-k, whose values are coded apart (in `widths` bytes) or are in the payload as they are.
struct TopK {
  Shape shape;
  std::vector<int64_t> kept, widths;
  int64_t modulus, capacity = 0, coded = 0, most_kept = 0;
  bool apart;

  explicit TopK(Random& random) : shape(draw_shape(random)), apart(random.once_in(2)) {
    static const int64_t moduli[] = {0, 2, 3, 4, 6, 8, 12, 16, 64, 1024, 1 << 20};
    modulus = random.of(moduli);
    const int64_t part = random.of<int64_t>({1, 2, 4, 8, 10, 50, 1000});
    for (int64_t n : shape.lengths) {
      const int64_t k = n ? (random.once_in(3) ? random.within(1, n) : (n + part - 1) / part) : 0;
      kept.push_back(k);
      widths.push_back(apart ? random.within(0, 3 * k + 6) : k * itemsize(shape.dtype));
      coded += widths.back();
      capacity += widths.back() + positions(n, k);
      most_kept = k > most_kept ? k : most_kept;
    }
    if (!shape.ragged) shape.lengths.assign(shape.lengths.size(), shape.n);
  }
  // The most bytes that the positions take, as native/topk.py says.
  int64_t positions(int64_t n, int64_t k) const {
    const int64_t mask = (n + 7) / 8;
    if (modulus == 0 || n == 0) return mask;
    int bits = 0;
    const bool ternary = modulus % 3 == 0;
    for (int64_t power = ternary ? modulus / 3 : modulus; power > 1; power /= 2) ++bits;
    const int64_t code = (ternary ? (k + 4) / 5 : 0) + (k * bits + k + (n - k) / modulus + 7) / 8;
    return code < mask ? code : mask;
  }
  int64_t encode(const Memory& x, Memory& out, int64_t room, void* values, int64_t* starts) const {
    return tw_topk_encode(shape.rows, shape.lengths.data(), kept.data(), widths.data(), modulus, shape.dtype, x.data(),
                          shape.stride, out.data(), room, apart ? values : nullptr, most_kept, starts);
  }
};

bool fuzz_topk_encode(Random& random) {
  const TopK t(random);
  const Shape& s = t.shape;
  Memory x(random, s.nbytes(), 4), out(random, t.capacity, 1), first(random, t.capacity, 1);
  Memory values(random, s.rows * t.most_kept * itemsize(s.dtype), 4), coded(random, t.coded, 1);
  Memory starts(random, (s.rows + 1) * 8, 8);
  fill_values(random, x.data(), s.values(), s.dtype);
  fill_bytes(random, coded.data(), coded.nbytes());
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    std::memset(out.data(), 0, static_cast<size_t>(out.nbytes()));
    const int64_t written = t.encode(x, out, t.capacity, values.data(), starts.as<int64_t>());
    require(written >= -1 && written <= t.capacity, "tw_topk_encode: an answer that is none");
    if (t.apart && written >= 0)
      tw_topk_put_values(s.rows, s.lengths.data(), t.kept.data(), t.widths.data(), t.modulus, s.dtype, coded.data(),
                         starts.as<int64_t>(), out.data());
    if (is_first) answer = written, std::memcpy(first.data(), out.data(), static_cast<size_t>(out.nbytes()));
    require(written == answer, "tw_topk_encode: levels disagree about codability");
    require(written < 0 || std::memcmp(out.data(), first.data(), static_cast<size_t>(written)) == 0,
            "tw_topk_encode: levels encode differently");
    if (t.capacity > 0)
      require(t.encode(x, out, random.below(t.capacity), values.data(), starts.as<int64_t>()) <= t.capacity,
              "tw_topk_encode: more than its room");
  });
  if (answer >= 0) note(first.data(), answer);
  return noted(answer, answer >= 0, {});
}

bool fuzz_topk_decode(Random& random) {
  const TopK t(random);
  const Shape& s = t.shape;
  int64_t nbytes = t.capacity;
  Memory room(random, t.capacity, 1);
  fill_bytes(random, room.data(), t.capacity);
  Memory values(random, s.rows * t.most_kept * itemsize(s.dtype), 4);
  if (!random.once_in(6)) {  // encoded, else any bytes
    Memory x(random, s.nbytes(), 4), starts(random, (s.rows + 1) * 8, 8);
    fill_values(random, x.data(), s.values(), s.dtype);
    const int64_t written = t.encode(x, room, t.capacity, values.data(), starts.as<int64_t>());
    nbytes = written >= 0 ? written : nbytes;
    if (!random.once_in(3)) damage(random, room.data(), nbytes);
  }
  if (t.apart && random.once_in(2)) fill_values(random, values.data(), s.rows * t.most_kept, s.dtype);
  const int64_t whole = nbytes;
  if (random.once_in(4)) nbytes = random.within(nbytes > 9 ? nbytes - 9 : 0, nbytes + 9);
  Memory payload(random, nbytes, 1), coded(random, t.coded, 1), first_coded(random, t.coded, 1);
  fill_bytes(random, payload.data(), nbytes);
  std::memcpy(payload.data(), room.data(), static_cast<size_t>(nbytes < whole ? nbytes : whole));
  Memory y(random, s.nbytes(), 4), first(random, s.nbytes(), 4);
  int32_t answer = 0, taken = 0;
  at_every_level([&](bool is_first) {
    std::memset(y.data(), kGap, static_cast<size_t>(y.nbytes()));
    const int32_t took = tw_topk_take_values(s.rows, s.lengths.data(), t.kept.data(), t.widths.data(), t.modulus,
                                             s.dtype, payload.data(), nbytes, coded.data());
    const int32_t good =
        tw_topk_decode(s.rows, s.lengths.data(), t.kept.data(), t.widths.data(), t.modulus, s.dtype, payload.data(),
                       nbytes, t.apart ? values.data() : nullptr, t.most_kept, y.data(), s.stride, s.n);
    require(gaps_untouched(s, y.data()), "tw_topk_decode: wrote between rows");
    if (is_first) {
      answer = good, taken = took;
      std::memcpy(first.data(), y.data(), static_cast<size_t>(y.nbytes()));
      std::memcpy(first_coded.data(), coded.data(), static_cast<size_t>(coded.nbytes()));
    }
    require(good == answer && took == taken, "tw_topk_decode: levels disagree about validity");
    require(!took || same(coded, first_coded), "tw_topk_take_values: levels take different values");
    require(!good || same_rows(s, y.data(), first.data()), "tw_topk_decode: levels decode differently");
  });
  noted(taken, taken != 0, {&first_coded});
  return noted(answer, answer != 0, {&first});
}

// Bytes of a row of the codec tile, as native/tile.py says.
int64_t tile_nbytes(int bits, int64_t n) {
  const int64_t tiles = n / 32, left = n % 32;
  if (n == 0) return 0;
  return 2 + (n + 31) / 32 + 4 * (tiles ? bits * tiles - (tiles + 5) / 4 : 0) + (left + 7) / 8 * bits;
}
int64_t tile_nbytes(int bits, const Shape& s) {
  int64_t total = 0;
  for (int64_t n : s.lengths) total += tile_nbytes(bits, n);
  return total;
}

bool fuzz_tile_encode(Random& random) {
  const Shape s = draw_shape(random);
  const int bits = static_cast<int>(random.within(3, 8));
  Memory x(random, s.nbytes(), 4), payload(random, tile_nbytes(bits, s), 1), first(random, payload.nbytes(), 1);
  fill_values(random, x.data(), s.values(), s.dtype);
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    std::memset(payload.data(), kGap, static_cast<size_t>(payload.nbytes()));
    const int64_t place =
        tw_tile_encode(bits, s.dtype, x.data(), s.rows, s.n, s.stride, s.given(), payload.data(), s.threads);
    if (is_first) answer = place, std::memcpy(first.data(), payload.data(), static_cast<size_t>(payload.nbytes()));
    require(place == answer, "tw_tile_encode: levels disagree about codability");
    require(place >= 0 || same(payload, first), "tw_tile_encode: levels encode differently");
  });
  return noted(answer, answer < 0, {&first});
}

bool fuzz_tile_decode(Random& random) {
  const Shape s = draw_shape(random);
  const int bits = static_cast<int>(random.within(3, 8));
  Memory payload(random, tile_nbytes(bits, s), 1), y(random, s.nbytes(), 4), first(random, s.nbytes(), 4);
  fill_bytes(random, payload.data(), payload.nbytes());
  if (!random.once_in(5)) {
    Memory x(random, s.nbytes(), 4);
    fill_values(random, x.data(), s.values(), s.dtype);
    if (random.once_in(3)) {  // any bytes, but for the greatest scale of each row
      int64_t at = 0;
      for (int64_t n : s.lengths) {
        const uint16_t top = static_cast<uint16_t>(random.within(0, 0x7FF));
        if (n) std::memcpy(payload.data() + at, &top, 2);
        at += tile_nbytes(bits, n);
      }
    } else {
      tw_tile_encode(bits, s.dtype, x.data(), s.rows, s.n, s.stride, s.given(), payload.data(), s.threads);
    }
    damage(random, payload.data(), payload.nbytes());
  }
  int64_t answer = 0;
  at_every_level([&](bool is_first) {
    std::memset(y.data(), kGap, static_cast<size_t>(y.nbytes()));
    const int64_t found =
        tw_tile_decode(bits, payload.data(), s.dtype, y.data(), s.rows, s.n, s.stride, s.given(), s.threads);
    require(gaps_untouched(s, y.data()), "tw_tile_decode: wrote between rows");
    if (is_first) answer = found, std::memcpy(first.data(), y.data(), static_cast<size_t>(y.nbytes()));
    require(found == answer, "tw_tile_decode: levels disagree about validity");
    require(same_rows(s, y.data(), first.data()), "tw_tile_decode: levels decode differently");
  });
  return noted(answer, answer < 0, {&first});
}

// Returns whether the input was accepted.
struct Target {
  const char* name;
  bool (*run)(Random&);
  int64_t runs, accepted;
};
Target targets[] = {
    {"encode", fuzz_encode, 0, 0},
    {"decode", fuzz_decode, 0, 0},
    {"delta_encode", fuzz_delta_encode, 0, 0},
    {"delta_decode", fuzz_delta_decode, 0, 0},
    {"topk_encode", fuzz_topk_encode, 0, 0},
    {"topk_decode", fuzz_topk_decode, 0, 0},
    {"tile_encode", fuzz_tile_encode, 0, 0},
    {"tile_decode", fuzz_tile_decode, 0, 0},
    {"expected", fuzz_expected, 0, 0},
};
constexpr uint64_t kTargets = sizeof targets / sizeof *targets;

void run(uint64_t iteration) {
  iteration_now = iteration;
  digest_now = 0;
  Random random(seed_now, iteration);
  Target& target = targets[iteration % kTargets];
  target.accepted += target.run(random);
  ++target.runs;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 5) {
    std::fprintf(stderr, "usage: fuzz SECONDS SEED [ITERATION [LAST]]\n");
    return 2;
  }
  const double seconds = std::atof(argv[1]);
  seed_now = std::strtoull(argv[2], nullptr, 10);
  std::string levels;
  for (int k = 0; k < tw_level_count(); ++k) levels += std::string(" ") + tw_level_name(k);
#ifdef SANITIZED
  const char* const how = "with sanitizers";
  signal(SIGABRT, on_signal);
#else
  const char* const how = "between guard pages";
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) signal(number, on_signal);
#endif
  std::printf("fuzz: %s, levels%s, seed %llu\n", how, levels.c_str(), static_cast<unsigned long long>(seed_now));
  std::fflush(stdout);
  if (argc == 4) {
    run(std::strtoull(argv[3], nullptr, 10));
    std::printf("fuzz: iteration %s is fine\n", argv[3]);
    return 0;
  }
  if (argc == 5) {
    const uint64_t last = std::strtoull(argv[4], nullptr, 10);
    for (uint64_t k = std::strtoull(argv[3], nullptr, 10); k <= last; ++k) {
      run(k);
      std::printf("%llu %s %016llx\n", static_cast<unsigned long long>(k), targets[k % kTargets].name,
                  static_cast<unsigned long long>(digest_now));
    }
    return 0;
  }
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  uint64_t iteration = 0;
  do run(iteration++);
  while (elapsed() < seconds);
  std::printf("fuzz: %llu inputs in %.0f s, each at every level; of them (accepted)",
              static_cast<unsigned long long>(iteration), elapsed());
  for (const Target& target : targets)
    std::printf(" %s %lld (%lld)", target.name, static_cast<long long>(target.runs),
                static_cast<long long>(target.accepted));
  std::printf("\n");
  return 0;
}
