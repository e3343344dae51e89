// What the GPU kernels of the norms over channels and groups share.
#pragma once

#include "gpu_activation.h"
#include "gpu_vector.h"
#include "samples.h"

namespace diffkern {

// A parameter of a channel, or what changes nothing.
__device__ __forceinline__ float parameter(const void* base, Dtype dtype, int64_t at, float absent) {
  if (base == nullptr) return absent;
  float value;
  load_elements<1>(base, dtype, at, &value);
  return value;
}

template <typename T>
__device__ __forceinline__ float silu(float x) {
  return sizeof(T) == sizeof(float) ? sigmoid_product(x, x) : quick_silu(x);
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPacketBytes == 0; }

template <typename... Values>
bool all_multiples(int64_t count, Values... values) {
  return ((values % count == 0) && ...);
}

}  // namespace diffkern
