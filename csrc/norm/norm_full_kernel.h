// The plain case of the register kernel: rows of a half dtype that fill a block's threads to the last packet, and
// operands and options that are known when it is compiled. So there is little code, and none of it is jumped over.
#pragma once

#include "norm_packets.h"

namespace diffkern {
namespace {

// Which operands a call has and what it computes.
template <bool kLayerNorm_, bool kWeight_, bool kBias_, bool kRounds_>
struct Call {
  static constexpr bool kLayerNorm = kLayerNorm_;
  static constexpr bool kWeight = kWeight_;
  static constexpr bool kBias = kBias_;
  static constexpr bool kRounds = kRounds_;
};

// y = (x - centre) * scale
struct FullNormaliser {
  float centre;
  float scale;
};

// One wave's share of a row: its `rest` and `squares` are the sums of x - pivot and of (x - pivot)^2.
struct alignas(16) PivotSums {
  float pivot;
  float rest;
  float squares;
  float unused;
};

// What the waves of a block tell each other; used again only after the block has been synchronised in between.
template <int kThreads>
struct FullShared {
  static_assert(kThreads % kWaveSize == 0, "a block is whole waves");
  static constexpr int kWaves = kThreads / kWaveSize;
  float squares[kPowerOfTwo<kWaves>];
  PivotSums shares[kPowerOfTwo<kWaves>];
};

// The sums of one row, of which this thread holds kPackets packets of T. One synchronisation.
template <typename T, bool kLayerNorm, int kPackets, int kThreads>
struct FullSums {
  static constexpr int kCount = kPacketSize<T>;
  static constexpr int kHeld = kPackets * kCount;
  // Few packets may as well stay unpacked.
  static constexpr bool kUnpackAnew = kPackets > 3;
  using Shared = FullShared<kThreads>;
  static constexpr int kWaves = Shared::kWaves;

  static __device__ __forceinline__ FullNormaliser of(uint4 (&held)[kPackets], float inverse_size, float eps,
                                                      Shared& shared) {
    if constexpr (kLayerNorm) {
      return layer_norm(held, inverse_size, eps, shared);
    } else {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        float values[kCount];
        unpacked(held[i], values);
        float part = values[0] * values[0];
#pragma unroll
        for (int j = 1; j < kCount; ++j) part += values[j] * values[j];
        sum += part;
      }
      return {0.0f, rsqrtf(fmaf(total(sum, shared), inverse_size, eps))};
    }
  }

  static __device__ __forceinline__ void unpacked(uint4& packet, float* values) {
    if constexpr (kUnpackAnew) optimization_barrier(packet);
    unpack<T>(packet, values);
  }

 private:
  static __device__ __forceinline__ float total(float sum, Shared& shared) {
    sum = group_sum<kWaveSize>(sum);
    if (threadIdx.x % kWaveSize == 0) shared.squares[threadIdx.x / kWaveSize] = sum;
    __syncthreads();
    if constexpr (kWaves <= 4) {
      // All read all of them: one load, and no further shuffles.
      sum = shared.squares[0];
#pragma unroll
      for (int wave = 1; wave < kWaves; ++wave) sum += shared.squares[wave];
      return sum;
    } else {
      constexpr int kLanes = kPowerOfTwo<kWaves>;
      const int lane = threadIdx.x % kLanes;
      return group_sum<kLanes>(lane < kWaves ? shared.squares[lane] : 0.0f);
    }
  }

  // Each lane has sums around its own mean, without waiting for the others. Those of a wave are moved to the mean of
  // its first lane, and those of the block to that of the first wave. The pivot being the mean of one of n shares, the
  // sum of squares around it is no more than 1 + n times that around the mean, so that little is lost when the
  // difference is taken off.
  static __device__ __forceinline__ FullNormaliser layer_norm(uint4 (&held)[kPackets], float inverse_size, float eps,
                                                              Shared& shared) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      float values[kCount];
      unpacked(held[i], values);
      sum += sum_of<kCount>(values);
    }
    const float mean = sum * (1.0f / kHeld);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      float values[kCount];
      unpacked(held[i], values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) squares += (values[j] - mean) * (values[j] - mean);
    }
    const float pivot = first_of_wave(mean);
    // By fused multiply-adds, which also find what rounding left out of the means.
    const float around_mean = fmaf(-static_cast<float>(kHeld), mean, sum);
    const float around_pivot = fmaf(-static_cast<float>(kHeld), pivot, sum);
    squares += (mean - pivot) * (around_mean + around_pivot);
    const float2 sums = group_sum<kWaveSize>(float2{around_pivot, squares});
    if (threadIdx.x % kWaveSize == 0) {
      shared.shares[threadIdx.x / kWaveSize] = PivotSums{pivot, sums.x, sums.y, 0.0f};
    }
    __syncthreads();
    constexpr int kLanes = kPowerOfTwo<kWaves>;
    const int lane = threadIdx.x % kLanes;
    const PivotSums share = shared.shares[lane < kWaves ? lane : 0];
    const float block_pivot = shared.shares[0].pivot;
    const float delta = share.pivot - block_pivot;
    const float rest = fmaf(static_cast<float>(kHeld * kWaveSize), delta, share.rest);
    float2 block{rest, fmaf(delta, share.rest + rest, share.squares)};
    if (lane >= kWaves) block = float2{0.0f, 0.0f};
    block = group_sum<kLanes>(block);
    const float offset = block.x * inverse_size;
    return {block_pivot + offset, rsqrtf(fmaf(fmaf(-offset, block.x, block.y), inverse_size, eps))};
  }
};

// One packet's way from x to y.
template <typename T, typename Call>
__device__ __forceinline__ uint4 full_result(float* values, const FullNormaliser& normaliser, const uint4& weight,
                                             const uint4& bias) {
  constexpr int kCount = kPacketSize<T>;
  float params[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if constexpr (Call::kLayerNorm) values[j] -= normaliser.centre;
    values[j] *= normaliser.scale;
  }
  if constexpr (Call::kRounds) round_values<T, kCount>(values);
  if constexpr (Call::kWeight) {
    unpack<T>(weight, params);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= params[j];
  }
  if constexpr (Call::kBias) {
    if constexpr (Call::kRounds) round_values<T, kCount>(values);
    unpack<T>(bias, params);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] += params[j];
  }
  return pack_packet<T>(values);
}

// Where a row begins. Rows at one distance from each other need nothing but it.
__device__ __forceinline__ PacketOffsets<2> full_offsets(const RegisterParams& p, uint32_t row) {
  if (__builtin_expect(p.map.outer == 0, 1)) return {{row * p.map.strides[kX], row * p.map.strides[kOut]}};
  return p.map.locate(row);
}

// A row per block. kAhead: the parameters are loaded before the sums.
template <typename T, typename Call, int kPackets, int kThreads, bool kAhead>
__global__ void __launch_bounds__(kThreads) full_kernel(const RegisterParams p) {
  constexpr int kCount = kPacketSize<T>;
  using Sums = FullSums<T, Call::kLayerNorm, kPackets, kThreads>;
  __shared__ typename Sums::Shared shared;

  uint4 held[kPackets];
  uint4 weights[kPackets];
  uint4 biases[kPackets];
  const auto load_parameters = [&](int i) {
    if constexpr (Call::kWeight) weights[i] = p.weight[threadIdx.x + i * kThreads];
    if constexpr (Call::kBias) biases[i] = p.bias[threadIdx.x + i * kThreads];
  };
  // Before the row is located: behind that branch the compiler would move these loads to where their values are used,
  // and the threads would wait for memory twice.
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if constexpr (kAhead) load_parameters(i);
  }
  const auto at = full_offsets(p, blockIdx.x);
  const uint4* x = p.x + (at.of[kX] + threadIdx.x);
#pragma unroll
  for (int i = 0; i < kPackets; ++i) held[i] = load_once(x + i * kThreads);
  const FullNormaliser normaliser = Sums::of(held, p.inverse_size, p.eps, shared);
  uint4* out = p.out + (at.of[kOut] + threadIdx.x);
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if constexpr (!kAhead) load_parameters(i);
    float values[kCount];
    Sums::unpacked(held[i], values);
    out[i * kThreads] = full_result<T, Call>(values, normaliser, weights[i], biases[i]);
  }
}

}  // namespace
}  // namespace diffkern
