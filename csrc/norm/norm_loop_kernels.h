// The kernels of rms_norm and layer_norm that read a row again, from the caches: along memory and across it.
#pragma once

#include "norm_register_kernel.h"

namespace diffkern {
namespace {

// --- loop kernel ---------------------------------------------------------------------------------------

// Normalises, scales and stores kCount elements, for dtypes known only at run time.
template <int kCount>
__device__ __forceinline__ void finish(const NormParams& p, const Normaliser& normalise, int64_t at, int64_t out_offset,
                                       float* values) {
  float params[kCount];
  const bool rounds = p.round_dtype != Dtype::kNone;
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = rounded_to(p.round_dtype, normalise(values[j]));
  if (p.weight != nullptr) {
    load_elements<kCount>(p.weight, p.weight_dtype, at, params);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= params[j] + p.weight_offset;
  }
  if (p.bias != nullptr) {
    load_elements<kCount>(p.bias, p.bias_dtype, at, params);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = (rounds ? rounded_to(p.out_dtype, values[j]) : values[j]) + params[j];
  }
  store_elements<kCount>(values, p.out, p.out_dtype, out_offset);
}

// A row per block, or, where blockDim.y > 1, per blockDim.x lanes, a power of two within a wave. With one block as the
// least on a multiprocessor the compiler need not write registers to memory to make room for more.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kMaxThreads, 1) loop_kernel(const NormParams p) {
  constexpr int kCount = kVector ? kPacketSize<T> : 1;
  const int lanes = blockDim.x;
  __shared__ float singles[kMaxWaves];
  __shared__ float2 pairs[kMaxWaves];

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.map.rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int64_t size = row < p.map.rows ? p.size : 0;
    const RowOffsets offsets = locate(p.map, row < p.map.rows ? row : first);
    const T* x = static_cast<const T*>(p.x) + offsets.x;
    const int64_t begin = static_cast<int64_t>(threadIdx.x) * kCount;
    const int64_t step = static_cast<int64_t>(lanes) * kCount;

    const auto sum_group = [&](float value) {
      for (int mask = lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
      return value;
    };
    const auto sum = [&](auto value) {
      if constexpr (std::is_same_v<decltype(value), float>) {
        return blockDim.y == 1 ? block_sum(value, singles) : sum_group(value);
      } else {
        return blockDim.y == 1 ? block_sum(value, pairs) : float2{sum_group(value.x), sum_group(value.y)};
      }
    };
    const auto fold = [&](auto&& add, auto&&) {
#pragma unroll 4
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_elements<T, kCount>(x + (kVector ? at : at * p.x_stride), values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) add(values[j]);
      }
    };
    const Normaliser normalise = normaliser_of(p, sum, fold);

    for (int64_t at = begin; at < size; at += step) {
      float values[kCount];
      load_elements<T, kCount>(x + (kVector ? at : at * p.x_stride), values);
      finish<kCount>(p, normalise, at, offsets.out + (kVector ? at : at * p.out_stride), values);
    }
    if (blockDim.y == 1) __syncthreads();  // before the partial sums are used again
  }
}

// --- column kernel -------------------------------------------------------------------------------------

constexpr int64_t kFlushEvery = 64;

// kColumnRows rows per block, one per thread along x; the threads along y share the row's elements.
template <typename T>
__global__ void __launch_bounds__(kColumnRows* kColumnSplits) column_kernel(const NormParams p) {
  __shared__ float partials[kColumnSplits][kColumnRows];

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kColumnRows; first < p.map.rows;
       first += static_cast<int64_t>(gridDim.x) * kColumnRows) {
    const int64_t row = first + threadIdx.x;
    const int64_t size = row < p.map.rows ? p.size : 0;
    const RowOffsets offsets = locate(p.map, row < p.map.rows ? row : first);
    const T* x = static_cast<const T*>(p.x) + offsets.x;

    const auto sum_one = [&](float value) {
      __syncthreads();  // the previous sums have been read
      partials[threadIdx.y][threadIdx.x] = value;
      __syncthreads();
      float total = 0.0f;
#pragma unroll
      for (int split = 0; split < kColumnSplits; ++split) total += partials[split][threadIdx.x];
      return total;
    };
    const auto sum = [&](auto value) {
      if constexpr (std::is_same_v<decltype(value), float>) {
        return sum_one(value);
      } else {
        return float2{sum_one(value.x), sum_one(value.y)};
      }
    };
    const auto fold = [&](auto&& add, auto&& flush) {
      for (int64_t begin = threadIdx.y; begin < size; begin += kFlushEvery * kColumnSplits) {
        const int64_t end = min(begin + kFlushEvery * kColumnSplits, size);
#pragma unroll 8
        for (int64_t at = begin; at < end; at += kColumnSplits) add(to_float(x[at * p.x_stride]));
        flush();
      }
    };
    const Normaliser normalise = normaliser_of(p, sum, fold);

#pragma unroll 4
    for (int64_t at = threadIdx.y; at < size; at += kColumnSplits) {
      float value = to_float(x[at * p.x_stride]);
      finish<1>(p, normalise, at, offsets.out + at * p.out_stride, &value);
    }
  }
}

}  // namespace
}  // namespace diffkern
