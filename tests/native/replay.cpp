// Makes the calls that a file holds, at every level, and tells the first one that gives anything else
// than what the file says: how a library for another machine is tested (see aarch64.py).
//
//   replay FILE
//
// The file, written by calls.py, is of little-endian int64 and of bytes, padded to a multiple of 8. A
// call: the function's place in `functions`, what it returns, the number of arguments, and those:
//   0, number
//   1, count, bytes                                        memory that is only read
//   2, count, fill, bytes expected, bytes, before, bytes   memory written to; `fill` where `before` ends
//   3, count, arguments                                    an array of pointers to the like
//   4, index                                               the same pointer as an argument before
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

extern "C" {
int tw_level_count();
const char* tw_level_name(int index);
int tw_set_level(const char* name);
int64_t tw_encode(const void*, int, const void*, int64_t, int64_t, int64_t, const void*, const void*, void*, int);
int64_t tw_decode(const void*, const void*, int, void*, int64_t, int64_t, int64_t, const void*, int);
int64_t tw_delta_encode(const void*, int, const void*, int64_t, int64_t, int64_t, const void*, int, const void*,
                        const void*, const void*, const void*, void*, void*, int);
int64_t tw_delta_decode(const void*, const void*, int64_t, int64_t, const void*, int, const void*, const void*,
                        const void*, int, void*, int64_t, int);
int64_t tw_tile_encode(int, int, const void*, int64_t, int64_t, int64_t, const void*, void*, int);
int64_t tw_tile_decode(int, const void*, int, void*, int64_t, int64_t, int64_t, const void*, int);
int64_t tw_topk_encode(int64_t, const void*, const void*, const void*, int64_t, int32_t, const void*, int64_t, void*,
                       int64_t, void*, int64_t, void*);
int32_t tw_topk_decode(int64_t, const void*, const void*, const void*, int64_t, int32_t, const void*, int64_t,
                       const void*, int64_t, void*, int64_t, int64_t);
}

namespace {

// An argument as whatever type the function asks for.
struct Value {
  int64_t bits;
  operator int() const { return static_cast<int>(bits); }
  operator int64_t() const { return bits; }
  operator void*() const { return reinterpret_cast<void*>(bits); }
  operator const void*() const { return reinterpret_cast<const void*>(bits); }
};

template <class R, class... A, size_t... at>
int64_t call(R (*function)(A...), const std::vector<Value>& values, std::index_sequence<at...>) {
  return function(static_cast<A>(values[at])...);
}
template <auto function>
struct Called;
template <class R, class... A, R (*function)(A...)>
struct Called<function> {
  static int64_t with(const std::vector<Value>& values) {
    if (values.size() != sizeof...(A)) std::fprintf(stderr, "replay: wrong number of arguments\n"), std::exit(2);
    return call(function, values, std::index_sequence_for<A...>{});
  }
};

constexpr struct {
  const char* name;
  int64_t (*with)(const std::vector<Value>&);
} functions[] = {
    {"tw_encode", Called<tw_encode>::with},           {"tw_decode", Called<tw_decode>::with},
    {"tw_delta_encode", Called<tw_delta_encode>::with}, {"tw_delta_decode", Called<tw_delta_decode>::with},
    {"tw_tile_encode", Called<tw_tile_encode>::with}, {"tw_tile_decode", Called<tw_tile_decode>::with},
    {"tw_topk_encode", Called<tw_topk_encode>::with}, {"tw_topk_decode", Called<tw_topk_decode>::with},
};

class File {
 public:
  explicit File(const char* path) {
    std::FILE* const file = std::fopen(path, "rb");
    if (!file) std::perror(path), std::exit(2);
    char block[1 << 16];
    while (const size_t count = std::fread(block, 1, sizeof block, file)) all_.insert(all_.end(), block, block + count);
    std::fclose(file);
  }
  bool at_end() const { return at_ == all_.size(); }
  int64_t number() {
    int64_t x;
    std::memcpy(&x, all_.data() + at_, 8);
    at_ += 8;
    return x;
  }
  const uint8_t* bytes(int64_t count) {
    const uint8_t* const p = all_.data() + at_;
    at_ += static_cast<size_t>((count + 7) / 8 * 8);
    return p;
  }

 private:
  std::vector<uint8_t> all_;
  size_t at_ = 0;
};

// Memory for one argument, with bytes after it that nothing may write to.
struct Memory {
  static constexpr int64_t kAfter = 64;
  static constexpr uint8_t kUntouched = 0xC3;
  int64_t count, expected_count;
  const uint8_t* expected;
  std::unique_ptr<uint8_t[]> bytes;

  Memory(int64_t count_, int fill, const uint8_t* expected_, int64_t expected_count_)
      : count(count_), expected_count(expected_count_), expected(expected_), bytes(new uint8_t[count + kAfter]) {
    std::memset(bytes.get(), fill, static_cast<size_t>(count));
    std::memset(bytes.get() + count, kUntouched, kAfter);
  }
  // The first byte that is not as it should be, or -1.
  int64_t wrong() const {
    for (int64_t i = 0; i < expected_count; ++i)
      if (bytes[i] != expected[i]) return i;
    for (int64_t i = count; i < count + kAfter; ++i)
      if (bytes[i] != kUntouched) return i;
    return -1;
  }
};

// One call's arguments, fresh from the file.
class Arguments {
 public:
  explicit Arguments(File& file) {
    for (int64_t left = file.number(); left; --left) values.push_back(next(file));
  }
  std::vector<Value> values;
  std::vector<Memory> memory;

 private:
  std::vector<std::unique_ptr<int64_t[]>> pointers_;

  Value next(File& file) {
    const int64_t kind = file.number(), number = file.number();
    if (kind == 0) return {number};
    if (kind == 4) return values[static_cast<size_t>(number)];
    if (kind == 3) {
      std::unique_ptr<int64_t[]> all(new int64_t[number + 1]);
      for (int64_t k = 0; k < number; ++k) all[k] = next(file).bits;
      pointers_.push_back(std::move(all));
      return {reinterpret_cast<int64_t>(pointers_.back().get())};
    }
    int64_t fill = 0, expected_count = number, before_count = number;
    const uint8_t *expected, *before;
    if (kind == 1) {
      expected = before = file.bytes(number);
    } else {
      fill = file.number();
      expected_count = file.number();
      expected = file.bytes(expected_count);
      before_count = file.number();
      before = file.bytes(before_count);
    }
    memory.emplace_back(number, static_cast<int>(fill), expected, expected_count);
    uint8_t* const bytes = memory.back().bytes.get();
    std::memcpy(bytes, before, static_cast<size_t>(before_count));
    return {reinterpret_cast<int64_t>(bytes)};
  }
};

// Whether the call gives what it should.
bool good(int64_t number, const char* name, const char* level, int64_t expected, int64_t found, const Arguments& arguments) {
  if (found != expected) {
    std::printf("call %" PRId64 ", %s, %s: returned %" PRId64 ", expected %" PRId64 "\n", number, name, level, found, expected);
    return false;
  }
  for (size_t k = 0; k < arguments.memory.size(); ++k) {
    const Memory& memory = arguments.memory[k];
    const int64_t at = memory.wrong();
    if (at < 0) continue;
    std::printf("call %" PRId64 ", %s, %s: memory %zu of %" PRId64 " bytes: %02x at byte %" PRId64 ", expected %02x\n",
                number, name, level, k, memory.count, memory.bytes[at], at,
                at < memory.count ? memory.expected[at] : Memory::kUntouched);
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: replay FILE\n");
    return 2;
  }
  int64_t calls = 0;
  for (int k = 0; k < tw_level_count(); ++k) {
    const char* const level = tw_level_name(k);
    tw_set_level(level);
    File file(argv[1]);
    for (calls = 0; !file.at_end(); ++calls) {
      const auto& function = functions[file.number()];
      const int64_t expected = file.number();
      Arguments arguments(file);
      const int64_t found = function.with(arguments.values);
      if (!good(calls, function.name, level, expected, found, arguments)) return 1;
    }
    std::printf("%s: %" PRId64 " calls as expected\n", level, calls);
  }
  return 0;
}
