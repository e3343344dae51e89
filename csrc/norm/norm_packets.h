// NormParams and sums for the kernels that count in packets of 16 bytes.
#pragma once

#include "../common/gpu_vector.h"
#include "../common/packet_map.h"

namespace diffkern {
namespace {

// NormParams as the register kernels read them: rows and what they are made of counted in packets.
struct RegisterParams {
  const uint4* x;
  const uint4* weight;
  const uint4* bias;
  uint4* out;
  uint32_t rows;
  uint32_t packets;  // of a row
  uint32_t size;
  float inverse_size;
  float eps;
  float weight_offset;
  int clamp_eps;
  int rounds;
  PacketMap<2> map;
};

enum RowOperand : int { kX, kOut };

// Whether the registers hold the parameters next to so many packets of a row.
template <int kPackets>
constexpr bool kHoldsParameters = kPackets <= 4;

// The sum of a power of two of values, in pairs: no addition waits for more than two others of its size.
template <int kCount>
__device__ __forceinline__ float sum_of(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return sum_of<kCount / 2>(values) + sum_of<kCount / 2>(values + kCount / 2);
  }
}

}  // namespace
}  // namespace diffkern
