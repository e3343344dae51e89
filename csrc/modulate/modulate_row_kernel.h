// The row kernel of modulated norms and gated residuals: contiguous aligned rows of one dtype, modulated in that dtype
// or in float32. Everything is read once and kept in registers.
#pragma once

#include <type_traits>

#include "../common/gpu_rows8.h"
#include "../common/gpu_vector.h"
#include "../common/packet_map.h"
#include "modulate.h"
#include "modulate_config.h"

namespace diffkern {
namespace {

using Offsets = LeadingOffsets<kMappedOperands>;

template <int kCount>
__device__ __forceinline__ void activate(GateActivation activation, float* gate) {
  if (activation == GateActivation::kTanh) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) gate[j] = tanhf(gate[j]);
  } else if (activation == GateActivation::kSigmoid) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) gate[j] = 1.0f / (1.0f + expf(-gate[j]));
  }
}

// What a row's sums say: the normalised value is (v - mean) * factor + rest. What rounding left out of the mean
// comes to light as the mean of v - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean;
  float factor;
  float rest;

  __device__ __forceinline__ float operator()(float value) const { return fmaf(value - mean, factor, rest); }
};

__device__ __forceinline__ Normaliser no_norm() { return {0.0f, 1.0f, -0.0f}; }  // keeps the sign of a zero

// The steps between a row's values and its Normaliser. `sum` adds up a float, or two in one go, over the threads
// of the row; `fold` calls its argument with every value that this thread holds.
// Params: ModulateParams or RowParams.
template <typename Params, typename Sum, typename Fold>
__device__ __forceinline__ Normaliser normaliser_of(const Params& p, Sum&& sum, Fold&& fold) {
  if (p.norm == NormKind::kRms) {
    float squares = 0.0f;
    fold([&](float value) { squares += value * value; });
    return {0.0f, rsqrtf(sum(squares) * p.inverse_size + p.eps), -0.0f};
  }
  float plain = 0.0f;
  fold([&](float value) { plain += value; });
  const float mean = sum(plain) * p.inverse_size;
  float2 sums{0.0f, 0.0f};
  fold([&](float value) {
    const float centred = value - mean;
    sums.x += centred;
    sums.y += centred * centred;
  });
  sums = sum(sums);
  const float rest = sums.x * p.inverse_size;
  const float factor = rsqrtf((sums.y - rest * sums.x) * p.inverse_size + p.eps);
  return {mean, factor, -rest * factor};
}

// ModulateParams as the row kernel reads them: rows and what they are made of counted in packets.
struct RowParams {
  const uint4* x;
  const uint4* residual;
  const uint4* gate;
  const uint4* scale;
  const uint4* shift;
  Operand weight;
  Operand bias;
  uint4* new_residual;
  uint4* out;
  uint8_t* rows8;
  float* row_scales;
  uint32_t rows;
  uint32_t packets;  // of a row
  float inverse_size;
  float eps;
  float scale_offset;
  NormKind norm;
  int round_each;
  PacketMap<kMappedOperands> map;
};

// gate * x, in x.
template <bool kRoundEach, typename M, int kCount>
__device__ __forceinline__ void apply_gate(const float* gate, float* x) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = exact_mul(gate[j], x[j]);
  if (kRoundEach) round_values<M, kCount>(x);
}

// values * (offset + scale), in values; scale is used up.
template <bool kRoundEach, typename M, int kCount>
__device__ __forceinline__ void apply_scale(float* scale, float offset, float* values) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) scale[j] = exact_add(scale[j], offset);
  if (kRoundEach) round_values<M, kCount>(scale);
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], scale[j]);
  if (kRoundEach) round_values<M, kCount>(values);
}

// A row per kLanes threads, several rows per block; kLanes 0: a row per block. x, the residual and the outputs are T;
// gate, scale and shift are M, which is T or float32. What a chain of torch ops rounds to M last of all is rounded to T
// at once, which comes to the same. With kRows8 the modulated norm is written in 8 bits, too or alone.
template <typename T, typename M, bool kGated, bool kRows8, int kLanes, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) row_kernel(const RowParams p) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kWords = Raw<T, M>::kWords;
  constexpr int kWaves = kPowerOfTwo<kThreads / kWaveSize>;
  __shared__ float2 pairs[kWaves];
  __shared__ float singles[kWaves];

  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const uint32_t row = kLanes == 0 ? blockIdx.x : blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned lanes = kLanes == 0 ? blockDim.x : kLanes;
  const unsigned packets = kLanes == 0 || row < p.rows ? p.packets : 0;
  const auto at = p.map.locate(row);
  const auto each_packet = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const unsigned packet = threadIdx.x + i * lanes;
      if (packet < packets) body(i, packet);
    }
  };

  uint4 held[kPackets];
  if constexpr (kGated) {
    uint4 residuals[kPackets];
    Raw<T, M> gates[kPackets];
    each_packet([&](int i, unsigned packet) {
      held[i] = load_once(p.x + (at.of[kX] + packet));
      residuals[i] = load_once(p.residual + (at.of[kResidual] + packet));
      if (p.gate != nullptr) gates[i].load(p.gate + (at.of[kGate] + packet * kWords), 0);
    });
    each_packet([&](int i, unsigned packet) {
      float values[kCount], others[kCount];
      unpack<T>(held[i], values);
      if (p.gate != nullptr) {
        gates[i].unpack_to(others);
        if (p.round_each) {
          apply_gate<true, M, kCount>(others, values);
        } else {
          apply_gate<false, M, kCount>(others, values);
        }
      }
      unpack<T>(residuals[i], others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_add(others[j], values[j]);
      held[i] = pack_packet<T>(values);
      p.new_residual[at.of[kNew] + packet] = held[i];
    });
    if (!kRows8 && p.out == nullptr) return;
  } else {
    each_packet([&](int i, unsigned packet) { held[i] = load_once(p.x + (at.of[kX] + packet)); });
  }

  // Before the sums, so that these loads are in flight while the threads wait for each other.
  Raw<T, M> scales[kPackets];
  Raw<T, M> shifts[kPackets];
  each_packet([&](int i, unsigned packet) {
    if (p.scale != nullptr) scales[i].load(p.scale + (at.of[kScale] + packet * kWords), 0);
    if (p.shift != nullptr) shifts[i].load(p.shift + (at.of[kShift] + packet * kWords), 0);
  });

  Normaliser normalise = no_norm();
  if (p.norm != NormKind::kNone) {
    const auto sum = [&](auto value) {
      if constexpr (kLanes != 0) {
        return group_sum<kLanes>(value);
      } else if constexpr (std::is_same_v<decltype(value), float2>) {
        return block_sum<kWaves>(value, pairs);
      } else {
        return block_sum<kWaves>(value, singles);
      }
    };
    normalise = normaliser_of(p, sum, [&](auto&& add) {
      each_packet([&](int i, unsigned) {
        float values[kCount];
        optimization_barrier(held[i]);
        unpack<T>(held[i], values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) add(values[j]);
      });
    });
  }

  const auto modulate = [&](int i, unsigned packet, float* values) {
    float others[kCount];
    optimization_barrier(held[i]);
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = normalise(values[j]);
    if (p.weight.data != nullptr) {
      load_elements<kCount>(p.weight.data, p.weight.dtype, packet * kCount, others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], others[j]);
    }
    if (p.bias.data != nullptr) {
      load_elements<kCount>(p.bias.data, p.bias.dtype, packet * kCount, others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
    }
    if (p.round_each) round_values<T, kCount>(values);
    if (p.scale != nullptr) {
      scales[i].unpack_to(others);
      if (p.round_each) {
        apply_scale<true, M, kCount>(others, p.scale_offset, values);
      } else {
        apply_scale<false, M, kCount>(others, p.scale_offset, values);
      }
    }
    if (p.shift != nullptr) {
      shifts[i].unpack_to(others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
    }
  };
  if constexpr (kRows8) {
#if !DIFFKERN_HIP
    __shared__ float peaks[kWaves];
    float values[kPackets][kCount];
    float peak = 0.0f;
    each_packet([&](int i, unsigned packet) {
      modulate(i, packet, values[i]);
      if (p.out != nullptr) {  // rows of what a reader of the output would see
        const uint4 rounded = pack_packet<T>(values[i]);
        p.out[at.of[kOut] + packet] = rounded;
        unpack<T>(rounded, values[i]);
      }
      peak = peak_of<kCount>(values[i], peak);
    });
    if constexpr (kLanes != 0) {
      peak = group_max<kLanes>(peak);
    } else {
      peak = block_max<kWaves>(peak, peaks);
    }
    const RowScale scale = row_scale(peak);
    each_packet([&](int i, unsigned packet) {
      const auto index = static_cast<int64_t>(at.of[kOut]) + packet;
      store_rows8<kCount>(values[i], scale.factor, p.rows8 + index * kCount);
    });
    if (threadIdx.x == 0 && row < p.rows) p.row_scales[row] = scale.scale;
#endif
  } else {
    each_packet([&](int i, unsigned packet) {
      float values[kCount];
      modulate(i, packet, values);
      p.out[at.of[kOut] + packet] = pack_packet<T>(values);
    });
  }
}

}  // namespace
}  // namespace diffkern
