// Kernels for tensors where the positions of a channel are neighbours in memory.
//
// The blocks of the second pass merge the few parts of their group. Values are taken relative to the first element of
// their group, so that a mean far from zero costs no accuracy.
#pragma once

#include "../common/gpu_samples.h"
#include "group_norm.h"
#include "group_norm_config.h"
#include "group_norm_packets.h"
#include "group_norm_statistics.h"

namespace diffkern {
namespace {

// Merges over the block, which has kGroupThreads threads; the result is that of thread 0.
__device__ __forceinline__ Statistics block_merge(Statistics mine, Statistics* waves) {
  const auto merge_lanes = [](Statistics value) {
#pragma unroll
    for (int mask = kWaveSize / 2; mask > 0; mask /= 2) {
      value.merge({shuffle_xor(value.count, mask), shuffle_xor(value.mean, mask), shuffle_xor(value.squares, mask)});
    }
    return value;
  };
  mine = merge_lanes(mine);
  if (threadIdx.x % kWaveSize == 0) waves[threadIdx.x / kWaveSize] = mine;
  __syncthreads();
  if (threadIdx.x >= kWaveSize) return mine;
  return merge_lanes(threadIdx.x < kGroupThreads / kWaveSize ? waves[threadIdx.x] : Statistics{0.0f, 0.0f, 0.0f});
}

__device__ __forceinline__ float* partial_of(const GroupNormParams& p, int64_t sample, int64_t group) {
  return static_cast<float*>(p.partials) + (sample * p.groups + group) * p.parts * 3;
}

__device__ __forceinline__ void write(float* to, const Statistics& value) {
  to[0] = value.count;
  to[1] = value.mean;
  to[2] = value.squares;
}

struct Normaliser {
  float mean;  // relative to the first element of the group
  float rate;
};

// Merges the parts of a group. All threads of a wave take part, and all have the result.
__device__ __forceinline__ Normaliser normaliser_of(const GroupNormParams& p, int64_t sample, int64_t group) {
  const float* partials = partial_of(p, sample, group);
  const int lane = threadIdx.x % kWaveSize;
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int first = 0; first < kMaxPlaneParts; first += kWaveSize) {
      const int part = first + lane;
      if (part < p.parts) body(Statistics{partials[part * 3], partials[part * 3 + 1], partials[part * 3 + 2]});
    }
  };
  float count = 0.0f;
  float sum = 0.0f;
  each([&](const Statistics& part) {
    count += part.count;
    sum += part.count * part.mean;
  });
  count = group_sum<kWaveSize>(count);
  const float mean = group_sum<kWaveSize>(sum) / count;
  float squares = 0.0f;
  each([&](const Statistics& part) {
    const float delta = part.mean - mean;
    squares += part.squares + part.count * delta * delta;
  });
  return {mean, rsqrtf(group_sum<kWaveSize>(squares) / count + p.eps)};
}

// Which block does what: kernels of planes have a row of blocks for each sample and group.
struct GroupBlock {
  int64_t sample;
  int64_t group;
  int64_t part;
};

__device__ __forceinline__ GroupBlock group_block(const GroupNormParams& p, uint32_t index, uint32_t parts) {
  const uint32_t row = index / parts;
  const uint32_t sample = row / static_cast<uint32_t>(p.groups);
  return {sample, row - sample * static_cast<uint32_t>(p.groups), index - row * parts};
}

// One part of one group. A group is one run of kCount-element items where its channels follow each other without
// a gap (items_per_channel covers all of it), else items_per_channel of them and a step.
template <typename T, int kCount>
__global__ void __launch_bounds__(kGroupThreads) planes_statistics(const GroupNormParams p, const uint32_t items,
                                                                   const uint32_t items_per_channel) {
  __shared__ Statistics waves[kMaxWaves];
  const uint32_t parts = static_cast<uint32_t>(p.parts);
  const GroupBlock block = group_block(p, blockIdx.x, parts);
  const int64_t first_channel = block.group * (p.shape.channels / p.groups);
  const T* x = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, block.sample) +
               first_channel * p.x_steps.channel;
  const float pivot = to_float(*x);
  const uint32_t begin = static_cast<uint32_t>(static_cast<uint64_t>(items) * block.part / parts);
  const uint32_t end = static_cast<uint32_t>(static_cast<uint64_t>(items) * (block.part + 1) / parts);

  Statistics mine{0.0f, 0.0f, 0.0f};
  for (uint32_t at = begin + threadIdx.x; at < end; at += kGroupThreads * kSumPackets) {
    Held<T, kCount> held[kSumPackets];
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      const uint32_t item = at + i * kGroupThreads;
      if (item >= end) continue;
      const uint32_t channel = items_per_channel == items ? 0 : item / items_per_channel;
      held[i].load(x + channel * p.x_steps.channel + static_cast<int64_t>(item - channel * items_per_channel) * kCount);
    }
    // Sum, mean, and sum of squares around it, of what is held; then merge.
    float values[kSumPackets][kCount];
    float sum = 0.0f;
    float count = 0.0f;
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      const uint32_t item = at + i * kGroupThreads;
      if (item >= end) continue;
      held[i].unpack_to(values[i]);
      count += kCount;
      const uint32_t channel = items_per_channel == items ? 0 : item / items_per_channel;
      const float more = added(p, block.sample, first_channel, first_channel + channel);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        values[i][j] = (values[i][j] - pivot) + more;
        sum += values[i][j];
      }
    }
    Statistics batch{count, sum / count, 0.0f};
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      if (at + i * kGroupThreads >= end) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float centred = values[i][j] - batch.mean;
        batch.squares += centred * centred;
      }
    }
    mine.merge(batch);
  }
  mine = block_merge(mine, waves);
  if (threadIdx.x == 0) write(partial_of(p, block.sample, block.group) + block.part * 3, mine);
}

// kNormPackets items per thread of one group.
template <typename T, int kCount>
__global__ void __launch_bounds__(kGroupThreads)
    planes_normalise(const GroupNormParams p, const uint32_t items, const uint32_t items_per_channel,
                     const uint32_t blocks_per_group) {
  // Backwards: what the first pass read last is still in the cache.
  const GroupBlock block = group_block(p, gridDim.x - 1 - blockIdx.x, blocks_per_group);
  const int64_t first_channel = block.group * (p.shape.channels / p.groups);
  const T* x = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, block.sample) +
               first_channel * p.x_steps.channel;
  T* out = static_cast<T*>(p.out) + sample_offset(p.shape, p.out_steps, block.sample) +
           first_channel * p.out_steps.channel;
  const uint32_t begin = static_cast<uint32_t>(block.part) * (kGroupThreads * kNormPackets) + threadIdx.x;

  Held<T, kCount> held[kNormPackets];
#pragma unroll
  for (int i = 0; i < kNormPackets; ++i) {
    const uint32_t item = begin + i * kGroupThreads;
    if (item >= items) continue;
    const uint32_t channel = item / items_per_channel;
    held[i].load(x + channel * p.x_steps.channel + static_cast<int64_t>(item - channel * items_per_channel) * kCount);
  }
  const float pivot = to_float(*x);
  const Normaliser norm = normaliser_of(p, block.sample, block.group);
#pragma unroll
  for (int i = 0; i < kNormPackets; ++i) {
    const uint32_t item = begin + i * kGroupThreads;
    if (item >= items) continue;
    const uint32_t channel = item / items_per_channel;
    const float factor = norm.rate * parameter(p.weight, p.weight_dtype, first_channel + channel, 1.0f);
    const float offset = parameter(p.bias, p.bias_dtype, first_channel + channel, 0.0f);
    const float mean = norm.mean - added(p, block.sample, first_channel, first_channel + channel);
    float values[kCount];
    held[i].unpack_to(values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      values[j] = ((values[j] - pivot) - mean) * factor + offset;
      if (p.silu) values[j] = silu<T>(values[j]);
    }
    store<T, kCount>(values, out + channel * p.out_steps.channel +
                                 static_cast<int64_t>(item - channel * items_per_channel) * kCount);
  }
}

// The plan of the planes kernels. Statistics may walk several channels as one run.
struct PlanePlan {
  bool sum_packets;   // whether the statistics can be read in packets of 16 bytes
  bool norm_packets;  // the same for input and output of the second pass
  bool run;           // whether a group is one run
  int64_t group_size;
};

PlanePlan plan_planes(const GroupNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  const int64_t of_group = p.shape.channels / p.groups;
  const Steps& x = p.x_steps;
  const Steps& out = p.out_steps;
  PlanePlan plan{};
  plan.group_size = of_group * p.shape.positions;
  plan.run = of_group == 1 || (x.channel == p.shape.positions && p.add == nullptr);
  const bool x_fits = aligned(p.x) && all_multiples(count, x.batch, x.frame);
  plan.sum_packets = x_fits && (plan.run ? all_multiples(count, plan.group_size, of_group * x.channel)
                                         : all_multiples(count, p.shape.positions, x.channel));
  plan.norm_packets = x_fits && aligned(p.out) &&
                      all_multiples(count, p.shape.positions, x.channel, out.batch, out.frame, out.channel);
  return plan;
}

template <typename T, int kCount>
void launch_planes_statistics(const GroupNormParams& p, const PlanePlan& plan, GpuStream stream) {
  const int64_t items = plan.group_size / kCount;
  const int64_t per_channel = plan.run ? items : p.shape.positions / kCount;
  const int64_t blocks = p.shape.samples * p.groups * p.parts;
  planes_statistics<T, kCount><<<static_cast<unsigned>(blocks), kGroupThreads, 0, stream>>>(
      p, static_cast<uint32_t>(items), static_cast<uint32_t>(per_channel));
}

template <typename T, int kCount>
void launch_planes_normalise(const GroupNormParams& p, const PlanePlan& plan, GpuStream stream) {
  const int64_t items = plan.group_size / kCount;
  const int64_t per_group = ceil_div(items, kGroupThreads * kNormPackets);
  planes_normalise<T, kCount>
      <<<static_cast<unsigned>(p.shape.samples * p.groups * per_group), kGroupThreads, 0, stream>>>(
          p, static_cast<uint32_t>(items), static_cast<uint32_t>(p.shape.positions / kCount),
          static_cast<uint32_t>(per_group));
}

template <typename T>
void launch_planes(const GroupNormParams& p, GpuStream stream) {
  constexpr int kCount = kPacketSize<T>;
  const PlanePlan plan = plan_planes(p);
  plan.sum_packets ? launch_planes_statistics<T, kCount>(p, plan, stream)
                   : launch_planes_statistics<T, 1>(p, plan, stream);
  plan.norm_packets ? launch_planes_normalise<T, kCount>(p, plan, stream)
                    : launch_planes_normalise<T, 1>(p, plan, stream);
}

// What the parts of all groups need; 0 if the kernels do not know the layout.
inline int64_t plane_floats(const GroupNormParams& p) {
  constexpr int64_t kMost = 0x7fffffff;  // items of a group
  const bool fits = p.x_steps.position == 1 && p.out_steps.position == 1 &&
                    p.shape.channels / p.groups * p.shape.positions <= kMost;
  return fits ? p.shape.samples * p.groups * p.parts * 3 : 0;
}

}  // namespace
}  // namespace diffkern
