// Working memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace tw {
namespace TW_NS {
namespace {

enum Slot { kReferenceSlot, kRotatedSlot, kTileSlot, kSlots };

struct Scratch {
  void* bytes = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(bytes); }
};

// `size` bytes, aligned to 64, of this thread; what lay in the slot before is lost.
inline void* scratch(Slot slot, int64_t size) {
  static thread_local Scratch all[kSlots];
  Scratch& s = all[slot];
  if (s.size < size) {
    std::free(s.bytes);
    s.size = (size + 63) / 64 * 64;
    s.bytes = std::aligned_alloc(64, static_cast<size_t>(s.size));
    if (s.bytes == nullptr) std::abort();  // as an allocation that fails in a container would
  }
  return s.bytes;
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
