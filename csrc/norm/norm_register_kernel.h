// The register kernel of rms_norm and layer_norm: contiguous aligned rows of one dtype, read once and kept in
// registers.
#pragma once

#include <type_traits>

#include "../common/gpu_vector.h"
#include "norm.h"
#include "norm_config.h"
#include "norm_packets.h"

namespace diffkern {
namespace {

// What a row's sums say: the normalised value is ((x - mean) - mean_rest) * scale. What rounding left out of
// the mean comes to light as the mean of x - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean;
  float mean_rest;
  float scale;

  __device__ __forceinline__ float operator()(float value) const { return ((value - mean) - mean_rest) * scale; }
};

// Params: NormParams or RegisterParams.
template <typename Params>
__device__ __forceinline__ float scale_of(const Params& p, float sum_of_squares, float inverse_size) {
  if (p.clamp_eps) {
    const float length = sqrtf(sum_of_squares);
    return sqrtf(static_cast<float>(p.size)) / (length < p.eps ? p.eps : length);  // lets NaN through
  }
  return rsqrtf(fmaf(sum_of_squares, inverse_size, p.eps));
}

// A sum in two levels: many additions in a row would lose what short sums, added up, keep.
struct Accumulator {
  float total = 0.0f;
  float part = 0.0f;

  __device__ __forceinline__ void add(float value) { part += value; }
  __device__ __forceinline__ void flush() {
    total += part;
    part = 0.0f;
  }
};

// The steps between a row's values and its Normaliser. `sum` adds up a float, or two in one go, over the threads of
// the row; fold(add, flush) calls add with every value that this thread holds, and flush where there are many.
template <typename Sum, typename Fold>
__device__ __forceinline__ Normaliser normaliser_of(const NormParams& p, Sum&& sum, Fold&& fold) {
  const float inverse_size = 1.0f / static_cast<float>(p.size);
  Accumulator squares;
  if (!p.layer_norm) {
    fold([&](float value) { squares.add(value * value); }, [&] { squares.flush(); });
    squares.flush();
    return {0.0f, 0.0f, scale_of(p, sum(squares.total), inverse_size)};
  }
  Accumulator plain;
  fold([&](float value) { plain.add(value); }, [&] { plain.flush(); });
  plain.flush();
  const float mean = sum(plain.total) * inverse_size;
  plain = Accumulator{};
  fold(
      [&](float value) {
        plain.add(value - mean);
        squares.add((value - mean) * (value - mean));
      },
      [&] {
        plain.flush();
        squares.flush();
      });
  plain.flush();
  squares.flush();
  const float2 sums = sum(float2{plain.total, squares.total});
  const float rest = sums.x * inverse_size;
  return {mean, rest, scale_of(p, sums.y - rest * sums.x, inverse_size)};
}

// 1 / x to within a few units in the last place.
__device__ __forceinline__ float quick_inverse(float x) {
#if DIFFKERN_HIP
  return 1.0f / x;
#else
  return __fdividef(1.0f, x);
#endif
}

// The statistics of one wave's share of a row: its mean is mean + rest / count, its squares are around `mean`.
struct WaveSums {
  float count;
  float mean;
  float rest;
  float squares;
};

// Merges the waves' shares of a row, in one synchronisation; kWaves is a power of two, no less than the waves there
// are. `partials` may be used again only after the block has been synchronised in between.
template <int kWaves>
__device__ __forceinline__ WaveSums block_merge(const WaveSums& mine, WaveSums* partials, float inverse_size) {
  if (threadIdx.x % kWaveSize == 0) partials[threadIdx.x / kWaveSize] = mine;
  __syncthreads();
  const unsigned wave = threadIdx.x % kWaves;
  WaveSums share{};
  if (wave < blockDim.x / kWaveSize) share = partials[wave];
  const float pivot = partials[0].mean;
  const float delta = share.count > 0.0f ? share.mean - pivot : 0.0f;
  const float rest = group_sum<kWaves>(share.rest + share.count * delta);
  const float centred = delta - rest * inverse_size;
  const float squares = share.squares + centred * (2.0f * share.rest + share.count * centred);
  return {0.0f, pivot, rest, group_sum<kWaves>(squares)};
}

// A row per kLanes threads, several rows per block; kLanes 0: a row per block. Input, output and round_dtype are T,
// weight and bias are Param, which is T or float32.
template <typename T, typename Param, bool kLayerNorm, int kLanes, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) register_kernel(const RegisterParams p) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kGroup = kLanes == 0 ? kWaveSize : kLanes;  // lanes that sum up by shuffles
  constexpr int kWaves = kPowerOfTwo<kThreads / kWaveSize>;
  constexpr bool kAhead = kHoldsParameters<kPackets>;
  __shared__ WaveSums partials[kLanes == 0 ? kWaves : 1];
  __shared__ float squares[kLanes == 0 ? kWaves : 1];

  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const uint32_t row = kLanes == 0 ? blockIdx.x : blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = kLanes == 0 || row < p.rows;
  const unsigned packets = inside ? p.packets : 0;
  const unsigned lanes = kLanes == 0 ? blockDim.x : kLanes;
  const auto each_packet = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const unsigned packet = threadIdx.x + i * lanes;
      if (packet < packets) body(i, packet);
    }
  };

  const auto at = p.map.locate(row);
  uint4 held[kPackets];
  each_packet([&](int i, unsigned packet) { held[i] = load_once(p.x + (at.of[kX] + packet)); });
  // Before the sums, so that these loads are in flight while the threads wait for each other.
  Raw<T, Param> weights[kAhead ? kPackets : 1];
  Raw<T, Param> biases[kAhead ? kPackets : 1];
  if constexpr (kAhead) {
    each_packet([&](int i, unsigned packet) {
      if (p.weight != nullptr) weights[i].load(p.weight, packet);
      if (p.bias != nullptr) biases[i].load(p.bias, packet);
    });
  }

  // The values that this thread holds, a packet at a time.
  const auto each_values = [&](auto&& body) {
    each_packet([&](int i, unsigned) {
      float values[kCount];
      optimization_barrier(held[i]);
      unpack<T>(held[i], values);
      body(values);
    });
  };
  WaveSums sums;
  if constexpr (kLayerNorm) {
    // How many values the lanes hold that shuffle together.
    float count = static_cast<float>(p.size);
    float inverse_count = p.inverse_size;
    if constexpr (kLanes == 0) {
      int held_packets = 0;
      const int before = static_cast<int>(threadIdx.x / kWaveSize * kWaveSize);
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        const int left = static_cast<int>(packets) - before - i * static_cast<int>(lanes);
        held_packets += max(0, min(left, kWaveSize));
      }
      count = static_cast<float>(held_packets * kCount);
      inverse_count = quick_inverse(fmaxf(count, 1.0f));
    }
    float sum = 0.0f;
    each_values([&](const float* values) { sum += sum_of<kCount>(values); });
    const float mean = group_sum<kGroup>(sum) * inverse_count;
    // What rounding left out of the mean comes to light as the mean of x - mean.
    float2 around{0.0f, 0.0f};
    each_values([&](float* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        values[j] -= mean;
        around.y += values[j] * values[j];
      }
      around.x += sum_of<kCount>(values);
    });
    around = group_sum<kGroup>(around);
    if constexpr (kLanes == 0) {
      sums = block_merge<kWaves>({count, mean, around.x, around.y}, partials, p.inverse_size);
    } else {
      sums = {count, mean, around.x, around.y - around.x * around.x * p.inverse_size};
    }
  } else {
    float sum = 0.0f;
    each_values([&](const float* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum += values[j] * values[j];
    });
    if constexpr (kLanes == 0) {
      sum = block_sum<kWaves>(sum, squares);
    } else {
      sum = group_sum<kGroup>(sum);
    }
    sums = {0.0f, 0.0f, 0.0f, sum};
  }

  const float rest = sums.rest * p.inverse_size;
  const float centre = sums.mean + rest;
  const float scale = scale_of(p, sums.squares, p.inverse_size);
  each_packet([&](int i, unsigned packet) {
    float values[kCount], params[kCount];
    optimization_barrier(held[i]);
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (kLayerNorm) {
        // In a half dtype x - mean is no finer than that the mean as one float would do.
        values[j] = sizeof(T) == sizeof(float) ? (values[j] - sums.mean) - rest : values[j] - centre;
      }
      values[j] *= scale;
    }
    if (p.rounds) round_values<T, kCount>(values);
    if (p.weight != nullptr) {
      if constexpr (!kAhead) weights[0].load(p.weight, packet);
      weights[kAhead ? i : 0].unpack_to(params);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] *= kLayerNorm ? params[j] : params[j] + p.weight_offset;
    }
    if (p.bias != nullptr) {
      if constexpr (!kAhead) biases[0].load(p.bias, packet);
      biases[kAhead ? i : 0].unpack_to(params);
      if (p.rounds) round_values<T, kCount>(values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] += params[j];
    }
    p.out[at.of[kOut] + packet] = pack_packet<T>(values);
  });
}

}  // namespace
}  // namespace diffkern
