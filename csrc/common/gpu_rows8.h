// Rows of 8 bits on NVIDIA's GPUs: numbers in e4m3, and one scale for each row, which brings its peak to the largest
// of them.
#pragma once

#include "gpu.h"

#if !DIFFKERN_HIP
#include <cuda_fp8.h>

namespace diffkern {

// Of a row: what its values are multiplied with, and what takes them back.
struct RowScale {
  float factor;
  float scale;
};

// Of the largest magnitude of a row, which may be 0.
__device__ __forceinline__ RowScale row_scale(float peak) {
  constexpr float kLargest = 448.0f;
  peak = fmaxf(peak, 1e-12f);
  return {__fdiv_rn(kLargest, peak), __fdiv_rn(peak, kLargest)};
}

template <int kCount>
__device__ __forceinline__ float peak_of(const float* values, float peak) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) peak = fmaxf(peak, fabsf(values[j]));
  return peak;
}

__device__ __forceinline__ uint32_t pack_rows8(const float* from, float factor) {
  const float2 low{from[0] * factor, from[1] * factor};
  const float2 high{from[2] * factor, from[3] * factor};
  return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3)) |
         static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
}

// Stores kCount neighbouring values: 1, or 4 or 8 of them at a multiple of their number of bytes.
template <int kCount>
__device__ __forceinline__ void store_rows8(const float* values, float factor, uint8_t* to) {
  if constexpr (kCount == 1) {
    *to = __nv_cvt_float_to_fp8(values[0] * factor, __NV_SATFINITE, __NV_E4M3);
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint32_t*>(to) = pack_rows8(values, factor);
  } else {
    static_assert(kCount == 8, "packets of other sizes are not stored");
    *reinterpret_cast<uint2*>(to) = uint2{pack_rows8(values, factor), pack_rows8(values + 4, factor)};
  }
}

}  // namespace diffkern
#endif
