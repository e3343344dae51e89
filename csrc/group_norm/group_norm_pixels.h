// Kernels for tensors where the channels of a position are neighbours in memory.
//
// The first pass leaves statistics of each part of each group. A thread sums up around the first value that it sees of
// each channel, which is robust as it sees few; everything above that is merged around the mean. The second pass
// merges the parts while its first packets are on their way; where there are many parts, a small kernel makes a few of
// them in between.
#pragma once

#include "../common/gpu_samples.h"
#include "group_norm.h"
#include "group_norm_config.h"
#include "group_norm_packets.h"
#include "group_norm_pixel_place.h"
#include "group_norm_pixel_plan.h"
#include "group_norm_statistics.h"

#if defined(DIFFKERN_BENCH)
#include <cstdio>
#include <cstdlib>
#include <iterator>
#endif

namespace diffkern {
namespace {

template <int kCount>
constexpr int kMostTileGroups = kCount == 1 ? kPixelThreads / 2 : kMostTile * kCount;

// The parts of a group; those that have been folded follow those of the first pass.
__device__ __forceinline__ Part* first_parts(const GroupNormParams& p, const PixelPlan& plan, int64_t group) {
  return static_cast<Part*>(p.partials) + group * plan.sum.number.value;
}

__device__ __forceinline__ Part* last_parts(const GroupNormParams& p, const PixelPlan& plan, int64_t group) {
  const int64_t before = plan.folds() ? p.shape.samples * p.groups * plan.sum.number.value : 0;
  return static_cast<Part*>(p.partials) + before + group * plan.folded;
}

// Has what depends on a value computed anew from here on: kept over a loop, it would take registers there.
__device__ __forceinline__ void forget(uint32_t& value) {
#if !DIFFKERN_HIP
  asm volatile("" : "+r"(value));
#endif
}

template <typename T, int kCount, int kDepth, int kBlocks>
__global__ void __launch_bounds__(kPixelThreads, kBlocks)
    pixels_statistics(const GroupNormParams p, const PixelPlan plan) {
  __shared__ float references[kMostTileGroups<kCount>];  // the first value of each group in this block
  __shared__ float2 sums_of[kCount][kPixelThreads];      // mean, relative to that, and squares
  uint32_t block = blockIdx.x;
  uint32_t thread = threadIdx.x;
  float pivots[kCount] = {};
  float sums[kCount] = {};
  float squares[kCount] = {};
  {
    const PixelPlace place(plan, plan.sum, block, thread);
    const int positions = place.positions(plan);
    const T* from = static_cast<const T*>(p.x) + place.offset<kCount>(p, plan, p.x_steps);
    Stream<T, kCount, kDepth> stream(from, plan.height.value * p.x_steps.position, positions);
    if (positions > 0) stream.first(pivots);
    stream.each([&](const float* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float value = values[j] - pivots[j];
        sums[j] += value;
        squares[j] = fmaf(value, value, squares[j]);
      }
    });
  }

  forget(block);
  forget(thread);
  const PixelPlace place(plan, plan.sum, block, thread);
  const int height = static_cast<int>(plan.height.value);
  if (place.row == 0) {
    each_channel<kCount>(plan, place.column, [&](int j, int group, bool first) {
      if (first) references[group] = pivots[j];
    });
  }
  __syncthreads();
  if (place.row < height) {
    const int positions = place.positions_of(plan, place.row);
    const float share = positions > 0 ? 1.0f / static_cast<float>(positions) : 0.0f;
    each_channel<kCount>(plan, place.column, [&](int j, int group, bool) {
      const float mean = sums[j] * share;
      const float around = squares[j] - sums[j] * mean;
      const int64_t tile_channel = place.first_channel(plan);
      const float more = added(p, place.sample, tile_channel + group * plan.of_group,
                               tile_channel + place.column * kCount + j);
      // Rounding may leave less than nothing; a NaN is let through.
      sums_of[j][thread] = {(pivots[j] - references[group]) + (mean + more), around < 0.0f ? 0.0f : around};
    });
  }
  __syncthreads();
  each_group(plan, plan.lanes, kPixelThreads, [&](int group, bool exists) {
    const Statistics all = team_merge(plan.lanes, exists ? plan.of_group * height : 0, [&](int i) {
      const int in_group = plan.height.divide(i);
      const int row = i - in_group * height;
      const int channel = group * plan.of_group + in_group;
      const float2 sum = sums_of[channel % kCount][row * plan.width.value + channel / kCount];
      return Statistics{static_cast<float>(place.positions_of(plan, row)), sum.x, sum.y};
    });
    if (!exists || thread % plan.lanes != 0) return;
    first_parts(p, plan, place.group_index(p, plan, group))[place.part] = Part(references[group], all);
  });
}

// A team for each part that is to be left.
__global__ void __launch_bounds__(kPixelThreads) pixels_fold(const GroupNormParams p, const PixelPlan plan) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kPixelThreads + threadIdx.x) / kMergeLanes;
  const int64_t group = index / kFoldedParts;
  const int64_t part = index - group * kFoldedParts;
  const bool exists = group < p.shape.samples * p.groups;
  const int64_t begin = plan.sum.number.value * part / kFoldedParts;
  const int64_t end = plan.sum.number.value * (part + 1) / kFoldedParts;
  const Part* parts = first_parts(p, plan, exists ? group : 0) + begin;
  const Part all = team_merge(kMergeLanes, parts, static_cast<int>(end - begin));
  if (exists && threadIdx.x % kMergeLanes == 0) last_parts(p, plan, group)[part] = all;
}

template <typename T, int kCount, int kDepth, int kBlocks>
__global__ void __launch_bounds__(kPixelThreads, kBlocks)
    pixels_normalise(const GroupNormParams p, const PixelPlan plan) {
  __shared__ GroupNormaliser norms[kMostTileGroups<kCount>];
  __shared__ float2 weights_and_biases[kCount * kPixelThreads];
  // Backwards: what the first pass read last is still in the cache.
  const PixelPlace place(plan, plan.norm, gridDim.x - 1 - blockIdx.x, threadIdx.x);
  const T* from = static_cast<const T*>(p.x) + place.offset<kCount>(p, plan, p.x_steps);
  Stream<T, kCount, kDepth> stream(from, plan.height.value * p.x_steps.position, place.positions(plan));

#pragma unroll 1
  for (int channel = threadIdx.x; channel < plan.channels(); channel += kPixelThreads) {
    const int64_t at = place.first_channel(plan) + channel;
    weights_and_biases[channel] = {parameter(p.weight, p.weight_dtype, at, 1.0f),
                                   parameter(p.bias, p.bias_dtype, at, 0.0f)};
  }
  each_group(plan, plan.lanes, kPixelThreads, [&](int group, bool exists) {
    const Part* parts = last_parts(p, plan, place.group_index(p, plan, exists ? group : 0));
    const Part all = team_merge(plan.lanes, parts, static_cast<int>(plan.folded));
    if (!exists || threadIdx.x % plan.lanes != 0) return;
    norms[group] = {all.mean, all.rest, rsqrtf(all.squares / all.count + p.eps)};
  });
  __syncthreads();
  float means[kCount];
  float factors[kCount];
  float offsets[kCount];
  each_channel<kCount>(plan, place.column, [&](int j, int group, bool) {
    const GroupNormaliser norm = norms[group];
    const float2 parameters = weights_and_biases[place.column * kCount + j];
    means[j] = norm.mean;
    factors[j] = norm.rate * parameters.x;
    const int64_t first = place.first_channel(plan);
    const float more =
        added(p, place.sample, first + group * plan.of_group, first + place.column * kCount + j);
    offsets[j] = parameters.y + (more - norm.rest) * factors[j];
  });

  T* out = static_cast<T*>(p.out) + place.offset<kCount>(p, plan, p.out_steps);
  const int64_t out_stride = plan.height.value * p.out_steps.position;
  stream.each([&](float* values) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = fmaf(values[j] - means[j], factors[j], offsets[j]);
    if (p.silu) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = silu<T>(values[j]);
    }
    store<T, kCount>(values, out);
    out += out_stride;
  });
}

// --- launches ------------------------------------------------------------------------------------------

inline PixelConfig pixel_config() {
  PixelConfig config = kPixelConfig;
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_PIXEL_CONFIG")) {
    std::sscanf(chosen, "%d,%d,%d,%d,%d,%d", &config.tile, &config.sum_blocks, &config.sum_positions,
                &config.norm_blocks, &config.norm_positions, &config.most_parts);
  }
#endif
  return config;
}

// The plan of a call, without groups if there is none. Where packets are not aligned, a thread takes single elements.
inline PixelPlan plan_pixels(const GroupNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  const Steps& x = p.x_steps;
  const Steps& out = p.out_steps;
  const PixelConfig config = pixel_config();
  if (aligned(p.x) && aligned(p.out) &&
      all_multiples(count, x.batch, x.frame, x.position, out.batch, out.frame, out.position)) {
    const PixelPlan plan = plan_pixels(p, static_cast<int>(count), config);
    if (plan.groups != 0) return plan;
  }
  return plan_pixels(p, 1, config);
}

// What the parts of all groups need; 0 if the kernels do not know the layout.
inline int64_t pixel_floats(const GroupNormParams& p) {
  const PixelPlan plan = plan_pixels(p);
  if (plan.groups == 0) return 0;
  const int64_t parts = plan.sum.number.value + (plan.folds() ? plan.folded : 0);
  return p.shape.samples * p.groups * parts * static_cast<int64_t>(sizeof(Part) / sizeof(float));
}

template <typename T, int kCount, int kIndex>
void launch_pixel_kernels(const GroupNormParams& p, const PixelPlan& plan, GpuStream stream) {
  constexpr PixelKernel kernel = kPixelKernels[kIndex];
  const int64_t tiles = p.shape.samples * plan.tiles.value;
  const unsigned sum_blocks = static_cast<unsigned>(tiles * plan.sum.number.value);
  pixels_statistics<T, kCount, kernel.depth, kernel.blocks><<<sum_blocks, kPixelThreads, 0, stream>>>(p, plan);
  if (plan.folds()) {
    const int64_t teams = p.shape.samples * p.groups * kFoldedParts;
    const unsigned fold_blocks = static_cast<unsigned>(ceil_div(teams, kPixelThreads / kMergeLanes));
    pixels_fold<<<fold_blocks, kPixelThreads, 0, stream>>>(p, plan);
  }
  const unsigned norm_blocks = static_cast<unsigned>(tiles * plan.norm.number.value);
  pixels_normalise<T, kCount, kernel.depth, kernel.blocks><<<norm_blocks, kPixelThreads, 0, stream>>>(p, plan);
}

template <typename T, int kIndex = 0>
void launch_pixels(const GroupNormParams& p, GpuStream stream) {
#if defined(DIFFKERN_BENCH)
  if constexpr (kIndex + 1 < static_cast<int>(std::size(kPixelKernels))) {
    const char* chosen = std::getenv("DIFFKERN_PIXEL_KERNEL");
    if (chosen != nullptr && std::atoi(chosen) > kIndex) return launch_pixels<T, kIndex + 1>(p, stream);
  }
#endif
  const PixelPlan plan = plan_pixels(p);
  plan.count > 1 ? launch_pixel_kernels<T, kPacketSize<T>, kIndex>(p, plan, stream)
                 : launch_pixel_kernels<T, 1, kIndex>(p, plan, stream);
}

}  // namespace
}  // namespace diffkern
