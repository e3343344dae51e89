// What differs between CUDA and HIP: headers, names, the width of a wave, shuffles, half types.
#pragma once

#if defined(__HIP__) || defined(__HIPCC__)
#define DIFFKERN_HIP 1
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#else
#define DIFFKERN_HIP 0
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include "dtypes.h"

namespace diffkern {

#if DIFFKERN_HIP
using GpuStream = hipStream_t;
inline int last_launch_error() { return static_cast<int>(hipGetLastError()); }
// The host does not know for which of its targets a kernel will run, so thread counts that have to be whole
// waves are multiples of the wider one.
constexpr int kWaveMultiple = 64;
#if defined(__GFX8__) || defined(__GFX9__)
constexpr int kWaveSize = 64;
#else
constexpr int kWaveSize = 32;
#endif
#else
using GpuStream = cudaStream_t;
inline int last_launch_error() { return static_cast<int>(cudaGetLastError()); }
constexpr int kWaveMultiple = 32;
constexpr int kWaveSize = 32;
#endif

constexpr int kMaxThreads = 1024;  // of a block, on every GPU

// Calls launch with an element of the type that `dtype` names: a half one, or else float.
template <typename Launch>
void with_element(Dtype dtype, Launch&& launch) {
  switch (dtype) {
    case Dtype::kFloat16: launch(Half{}); break;
    case Dtype::kBFloat16: launch(BFloat16{}); break;
    default: launch(0.0f); break;
  }
}

// Product and sum, each rounded by itself: the compiler makes no fused multiply-add of them.
__device__ __forceinline__ float exact_mul(float a, float b) {
#if DIFFKERN_HIP
#pragma clang fp contract(off)
  return a * b;
#else
  return __fmul_rn(a, b);
#endif
}

__device__ __forceinline__ float exact_add(float a, float b) {
#if DIFFKERN_HIP
#pragma clang fp contract(off)
  return a + b;
#else
  return __fadd_rn(a, b);
#endif
}

__device__ __forceinline__ double exact_mul(double a, double b) {
#if DIFFKERN_HIP
#pragma clang fp contract(off)
  return a * b;
#else
  return __dmul_rn(a, b);
#endif
}

__device__ __forceinline__ double exact_add(double a, double b) {
#if DIFFKERN_HIP
#pragma clang fp contract(off)
  return a + b;
#else
  return __dadd_rn(a, b);
#endif
}

// The value of the lane whose index differs in the bits of `mask`. All lanes of the wave must take part.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
#if DIFFKERN_HIP
  return __shfl_xor(value, mask);
#else
  return __shfl_xor_sync(~0u, value, mask);
#endif
}

// The value of the first lane of each group of `lanes`, a power of two of them, in all lanes of the wave, which all must
// take part.
__device__ __forceinline__ float first_of_group(float value, int lanes) {
#if DIFFKERN_HIP
  return __shfl(value, 0, lanes);
#else
  return __shfl_sync(~0u, value, 0, lanes);
#endif
}

// The value of the first lane, in all lanes of the wave, which all must take part.
__device__ __forceinline__ float first_of_wave(float value) {
#if DIFFKERN_HIP
  return __shfl(value, 0);
#else
  return __shfl_sync(~0u, value, 0);
#endif
}

// The value of the lane `delta` before; the first ones keep their own. All lanes up to this one must take part.
__device__ __forceinline__ int shuffle_up(int value, int delta) {
#if DIFFKERN_HIP
  return __shfl_up(value, delta);
#else
  return __shfl_up_sync(~0u, value, delta);
#endif
}

// One bit for each of the first 32 lanes of the wave, which all must take part.
__device__ __forceinline__ uint32_t ballot(bool value) {
#if DIFFKERN_HIP
  return static_cast<uint32_t>(__ballot(value));
#else
  return __ballot_sync(~0u, value);
#endif
}

// Sum over aligned groups of kLanes lanes, in each of them.
template <int kLanes>
__device__ __forceinline__ float group_sum(float value) {
  static_assert(kLanes <= kWaveSize, "a group lies within one wave");
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

template <int kLanes>
__device__ __forceinline__ float2 group_sum(float2 value) {
  return float2{group_sum<kLanes>(value.x), group_sum<kLanes>(value.y)};
}

template <int kLanes>
__device__ __forceinline__ float group_max(float value) {
  static_assert(kLanes <= kWaveSize, "a group lies within one wave");
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

constexpr int kMinWaveSize = 32;
constexpr int kMaxWaves = kMaxThreads / kMinWaveSize;
static_assert(kMaxWaves <= kMinWaveSize, "one wave sums the partial sums of all");

// The power of two that is kValue or the next above it.
template <int kValue>
constexpr int kPowerOfTwo = 2 * kPowerOfTwo<(kValue + 1) / 2>;
template <>
inline constexpr int kPowerOfTwo<1> = 1;

// Sum over a block of whole waves, in each thread; kWaves is a power of two, no less than the waves there are.
// `partials` has room for one float per wave; it may be used again only after the block has been synchronised in
// between.
template <int kWaves = kMaxWaves>
__device__ __forceinline__ float block_sum(float value, float* partials) {
  value = group_sum<kWaveSize>(value);
  const int wave = threadIdx.x / kWaveSize;
  const int lane = threadIdx.x % kWaves;
  const int waves = blockDim.x / kWaveSize;
  if (threadIdx.x % kWaveSize == 0) partials[wave] = value;
  __syncthreads();
  return group_sum<kWaves>(lane < waves ? partials[lane] : 0.0f);
}

// The same for the largest of values that are none below 0.
template <int kWaves = kMaxWaves>
__device__ __forceinline__ float block_max(float value, float* partials) {
  value = group_max<kWaveSize>(value);
  const int lane = threadIdx.x % kWaves;
  const int waves = blockDim.x / kWaveSize;
  if (threadIdx.x % kWaveSize == 0) partials[threadIdx.x / kWaveSize] = value;
  __syncthreads();
  return group_max<kWaves>(lane < waves ? partials[lane] : 0.0f);
}

// The sum of two values at once, in one synchronisation.
template <int kWaves = kMaxWaves>
__device__ __forceinline__ float2 block_sum(float2 value, float2* partials) {
  value = group_sum<kWaveSize>(value);
  const int wave = threadIdx.x / kWaveSize;
  const int lane = threadIdx.x % kWaves;
  const int waves = blockDim.x / kWaveSize;
  if (threadIdx.x % kWaveSize == 0) partials[wave] = value;
  __syncthreads();
  value = lane < waves ? partials[lane] : float2{0.0f, 0.0f};
  return group_sum<kWaves>(value);
}

}  // namespace diffkern
