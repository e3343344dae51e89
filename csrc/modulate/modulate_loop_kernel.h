// The loop kernel of modulated norms and gated residuals: any dtypes, alignment, element strides, size and activation;
// a norm reads its row again, from the caches.
#pragma once

#include "modulate_row_kernel.h"

namespace diffkern {
namespace {

// kCount elements of a row, from the one numbered `at` on.
template <int kCount>
__device__ __forceinline__ void load_operand(const Operand& operand, int64_t row, int64_t at, float* to) {
  if (kCount == 1 || operand.aligned) {
    load_elements<kCount>(operand.data, operand.dtype, row + at * operand.stride, to);
  } else {
#pragma unroll 1
    for (int j = 0; j < kCount; ++j) {
      float element;
      load_elements<1>(operand.data, operand.dtype, row + (at + j) * operand.stride, &element);
      // Not to[j]: an index known only at run time would move the array to local memory.
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = i == j ? element : to[i];
    }
  }
}

template <int kCount>
__device__ __forceinline__ void round_to(Dtype dtype, float* values) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = rounded_to(dtype, values[j]);
}

// A part of x, or of the new residual, which is also stored.
template <int kCount>
__device__ __forceinline__ void load_input(const ModulateParams& p, const Offsets& row, int64_t at, float* values) {
  load_operand<kCount>(p.x, row.of[kX], at, values);
  if (p.residual.data == nullptr) return;
  float others[kCount];
  if (p.gate.data != nullptr) {
    load_operand<kCount>(p.gate, row.of[kGate], at, others);
    activate<kCount>(p.activation, others);
    round_to<kCount>(p.gate_round, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_mul(others[j], values[j]);
    round_to<kCount>(p.gated_round, values);
  }
  load_operand<kCount>(p.residual, row.of[kResidual], at, others);
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = exact_add(others[j], values[j]);
  round_to<kCount>(p.sum_round, values);
  store_elements<kCount>(values, p.new_residual, p.new_dtype, row.of[kNew] + at);
  round_to<kCount>(p.new_dtype, values);
}

// Modulates a normalised part of a row.
template <int kCount>
__device__ __forceinline__ void modulate(const ModulateParams& p, const Offsets& row, int64_t at, float* values) {
  float others[kCount];
  if (p.weight.data != nullptr) {
    load_operand<kCount>(p.weight, 0, at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], others[j]);
  }
  if (p.bias.data != nullptr) {
    load_operand<kCount>(p.bias, 0, at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
  }
  round_to<kCount>(p.norm_round, values);
  if (p.scale.data != nullptr) {
    load_operand<kCount>(p.scale, row.of[kScale], at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) others[j] = exact_add(others[j], p.scale_offset);
    round_to<kCount>(p.scale_round, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], others[j]);
    round_to<kCount>(p.product_round, values);
  }
  if (p.shift.data != nullptr) {
    load_operand<kCount>(p.shift, row.of[kShift], at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
    round_to<kCount>(p.modulated_round, values);
  }
}

// The same, and stores it.
template <int kCount>
__device__ __forceinline__ void finish(const ModulateParams& p, const Offsets& row, int64_t at, float* values) {
  modulate<kCount>(p, row, at, values);
  store_elements<kCount>(values, p.out, p.out_dtype, row.of[kOut] + at);
}

constexpr int kLoopLanes = 32;
constexpr int kLoopThreads = 256;

// A row per block, or, where blockDim.y > 1, per kLoopLanes threads. kCount elements at a time.
template <int kCount, bool kRows8>
__global__ void __launch_bounds__(kLoopThreads) loop_kernel(const ModulateParams p) {
  __shared__ float2 pairs[kMaxWaves];
  __shared__ float singles[kMaxWaves];
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kCount;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kCount;

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.map.rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int64_t size = row < p.map.rows ? p.size : 0;
    const Offsets offsets = locate(p.map, row < p.map.rows ? row : first);

    if (!kRows8 && (p.out == nullptr || p.norm == NormKind::kNone)) {
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_input<kCount>(p, offsets, at, values);
        if (p.out != nullptr) finish<kCount>(p, offsets, at, values);
      }
      continue;
    }

    const auto sum = [&](auto value) {
      if constexpr (std::is_same_v<decltype(value), float2>) {
        return blockDim.y > 1 ? group_sum<kLoopLanes>(value) : block_sum(value, pairs);
      } else {
        return blockDim.y > 1 ? group_sum<kLoopLanes>(value) : block_sum(value, singles);
      }
    };
    // From the second pass on the new residual, of which each thread reads what it wrote, is there to be read.
    const bool gated = p.residual.data != nullptr;
    const Operand input = gated ? Operand{p.new_residual, p.new_dtype, 1, true} : p.x;
    const int64_t input_row = gated ? offsets.of[kNew] : offsets.of[kX];
    bool stored = !gated;
    const auto load = [&](int64_t at, float* values) {
      if (stored) {
        load_operand<kCount>(input, input_row, at, values);
      } else {
        load_input<kCount>(p, offsets, at, values);
      }
    };
    const auto fold = [&](auto&& add) {
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load(at, values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) add(values[j]);
      }
      stored = true;
    };
    Normaliser normalise = no_norm();
    if (!kRows8 || p.norm != NormKind::kNone) {
      normalise = normaliser_of(p, sum, fold);
    } else if (gated) {
      fold([](float) {});  // which stores the new residual
    }
    const auto load_normalised = [&](int64_t at, float* values) {
      load(at, values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = normalise(values[j]);
    };
    if constexpr (kRows8) {
#if !DIFFKERN_HIP
      __shared__ float peaks[kMaxWaves];
      float peak = 0.0f;
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_normalised(at, values);
        modulate<kCount>(p, offsets, at, values);
        if (p.out != nullptr) {  // rows of what a reader of the output would see
          store_elements<kCount>(values, p.out, p.out_dtype, offsets.of[kOut] + at);
          round_to<kCount>(p.out_dtype, values);
        }
        peak = peak_of<kCount>(values, peak);
      }
      peak = blockDim.y > 1 ? group_max<kLoopLanes>(peak) : block_max(peak, peaks);
      const RowScale scale = row_scale(peak);
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_normalised(at, values);
        modulate<kCount>(p, offsets, at, values);
        if (p.out != nullptr) round_to<kCount>(p.out_dtype, values);
        store_rows8<kCount>(values, scale.factor, p.rows8 + offsets.of[kOut] + at);
      }
      if (threadIdx.x == 0 && row < p.map.rows) p.row_scales[row] = scale.scale;
#endif
    } else {
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_normalised(at, values);
        finish<kCount>(p, offsets, at, values);
      }
    }
    if (blockDim.y == 1) __syncthreads();  // before the partial sums are used again
  }
}

}  // namespace
}  // namespace diffkern
