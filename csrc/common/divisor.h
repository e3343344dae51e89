// Division by numbers that only the host knows.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace diffkern {

// A divisor, prepared so that a division costs one multiplication and one shift, where the hardware needs some 20
// instructions: the method of Granlund and Montgomery ("Division by invariant integers using multiplication", 1994).
struct Divisor {
  uint32_t value;
  uint32_t magic;
  uint32_t shift;

  // Of a dividend below 2^31, so that the sum below holds 32 bits.
  DIFFKERN_HOST_DEVICE uint32_t divide(uint32_t dividend) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(dividend) * magic) >> 32);
    return (high + dividend) >> shift;
  }
};

inline Divisor make_divisor(uint32_t value) {
  uint32_t shift = 0;
  while (shift < 31 && (1u << shift) < value) ++shift;
  const uint64_t magic = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - value)) / value + 1;
  return {value, static_cast<uint32_t>(magic), shift};
}

}  // namespace diffkern
