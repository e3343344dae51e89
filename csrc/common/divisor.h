// Division by numbers that only the host knows.
#pragma once

#include <cstdint>

#include "gpu.h"

namespace diffkern {

// Divides by one multiplication and one shift what the hardware needs some 20 instructions for, by the method of
// Granlund and Montgomery ("Division by invariant integers using multiplication", 1994). Numbers and divisors are
// below 2^31, so that their sum below holds 32 bits.
class Divisor {
 public:
  Divisor() : Divisor(1) {}
  explicit Divisor(uint32_t value) : shift_(0) {
    while ((uint32_t{1} << shift_) < value) ++shift_;
    multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - value) << 32) / value + 1);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t number) const {
    return (__umulhi(number, multiplier_) + number) >> shift_;
  }

 private:
  uint32_t shift_;
  uint32_t multiplier_;
};

}  // namespace diffkern
