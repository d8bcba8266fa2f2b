// Floats as IEEE 754 has them, whatever a thread was told before.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tw {

// While it lives, its thread rounds to nearest and keeps subnormals (torch.set_flush_denormal may have
// turned that off): bytes would depend on it.
class OrdinaryFloats {
 public:
#if defined(__x86_64__)
  OrdinaryFloats() : before_(_mm_getcsr()) {
    if ((before_ & ~kFlags) != kOrdinary) _mm_setcsr(kOrdinary);
  }
  ~OrdinaryFloats() {
    if ((before_ & ~kFlags) != kOrdinary) _mm_setcsr(static_cast<uint32_t>(before_));
  }

 private:
  static constexpr uint32_t kOrdinary = 0x1F80, kFlags = 0x3F;  // exceptions masked; those there were
#elif defined(__aarch64__)
  OrdinaryFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~OrdinaryFloats() {
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(before_));
  }

 private:
#endif
  uint64_t before_ = 0;
};

}  // namespace tw
