// What a thread of the kernel that keeps what it reads does of a part, where the positions of a channel are neighbours in memory.
#pragma once

#include <algorithm>

#include "group_norm.h"
#include "group_norm_config.h"
#include "group_norm_packets.h"
#include "group_norm_resident_copies.h"
#include "group_norm_statistics.h"

namespace diffkern {
namespace {


struct PlaneParts {
  Divisor groups;
  Divisor number;       // parts of a group
  Divisor per_channel;  // packets
  uint32_t packets;     // of a group
  uint32_t length;      // packets of a part; the last one may have fewer
};

inline PlaneParts plan_resident_planes(const GroupNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  const int64_t packets = p.shape.channels / p.groups * p.shape.positions / count;
  const int64_t most = ceil_div(packets, kResidentThreads * kLeastPositions);
  const int64_t parts = std::min(std::max<int64_t>(kResidentPixels.sum_blocks / p.groups, 1), most);
  const auto divisor = [](int64_t value) { return make_divisor(static_cast<uint32_t>(value)); };
  const int64_t length = ceil_div(packets, parts);
  return {divisor(p.groups), divisor(ceil_div(packets, length)), divisor(p.shape.positions / count),
          static_cast<uint32_t>(packets), static_cast<uint32_t>(length)};
}

template <typename T>
struct ResidentPlanes {
  using Plan = PlaneParts;
  static constexpr int kCount = kPacketSize<T>;

  static constexpr int kResidentWaves = kResidentThreads / kWaveSize;

  struct Scratch {
    float sums[2 * kResidentWaves];
    float reference;
  };

  uint32_t sample;
  uint32_t group;
  uint32_t part;
  uint32_t begin;  // the thread's first packet of the group
  int items;
  int64_t first_channel;
  const T* x;
  T* out;

  __device__ __forceinline__ ResidentPlanes(const GroupNormParams& p, const Plan& plan, uint32_t index) {
    const uint32_t row = plan.number.divide(index);
    part = index - row * plan.number.value;
    sample = plan.groups.divide(row);
    group = row - sample * plan.groups.value;
    begin = part * plan.length + threadIdx.x;
    const uint32_t end = min(plan.packets, (part + 1) * plan.length);
    items = begin < end ? static_cast<int>((end - begin - 1) / kResidentThreads + 1) : 0;
    first_channel = group * (static_cast<uint32_t>(p.shape.channels) / plan.groups.value);
    const int64_t in_sample = first_channel * p.shape.positions + static_cast<int64_t>(begin) * kCount;
    x = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, sample) + in_sample;
    out = static_cast<T*>(p.out) + sample_offset(p.shape, p.out_steps, sample) + in_sample;
  }

  __device__ __forceinline__ uint32_t channel_of(const Plan& plan, int item) const {
    return plan.per_channel.divide(begin + item * kResidentThreads);
  }

  static __device__ __forceinline__ int64_t stride(const GroupNormParams&, const Plan&, const Steps&) {
    return kResidentThreads * kCount;
  }

  // Parts with the same one have the same mean and variance.
  __device__ __forceinline__ uint32_t norms(const Plan& plan) const { return sample * plan.groups.value + group; }

  __device__ __forceinline__ void prefetch_parameters(const GroupNormParams& p, const Plan&) const {
    if (threadIdx.x != 0) return;
    prefetch(p.weight, p.weight_dtype, first_channel);
    prefetch(p.bias, p.bias_dtype, first_channel);
  }

  struct Sums {
    float pivot = 0.0f;
    float sum = 0.0f;
    float squares = 0.0f;

    __device__ __forceinline__ float shift(const GroupNormParams& p, const Plan& plan, const ResidentPlanes& task,
                                           int item) const {
      if (p.add == nullptr) return 0.0f;
      return added(p, task.sample, task.first_channel, task.first_channel + task.channel_of(plan, item));
    }

    __device__ __forceinline__ void begin(const GroupNormParams& p, const Plan& plan, const ResidentPlanes& task,
                                          const uint4& packet) {
      float values[kCount];
      unpack<T>(packet, values);
      pivot = values[0];
    }

    __device__ __forceinline__ void add(const GroupNormParams& p, const Plan& plan, const ResidentPlanes& task,
                                        int item, const uint4& packet) {
      float values[kCount];
      unpack<T>(packet, values);
      const float more = shift(p, plan, task, item);
      float packet_sum = 0.0f;
      float packet_squares = 0.0f;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float value = (values[j] - pivot) + more;  // in this order: a mean far from zero costs nothing
        packet_sum += value;
        packet_squares = fmaf(value, value, packet_squares);
      }
      sum += packet_sum;
      squares += packet_squares;
    }

    __device__ __forceinline__ void take(Sums& block) {
      sum += block.sum;
      squares += block.squares;
      block.sum = block.squares = 0.0f;
    }
  };

  __device__ __forceinline__ void finish(const GroupNormParams& p, const Plan& plan, Scratch& scratch,
                                         const Sums& mine) const {
    if (threadIdx.x == 0) scratch.reference = mine.pivot;
    __syncthreads();
    const float reference = scratch.reference;
    const float count = static_cast<float>(items * kCount);
    const float all = static_cast<float>(min(plan.length, plan.packets - part * plan.length) * kCount);
    const float share = items > 0 ? mine.sum / count : 0.0f;
    const float around = mine.squares - mine.sum * share;
    const float my_mean = (mine.pivot - reference) + share;
    const float mean = block_sum<kResidentWaves>(count * my_mean, scratch.sums) / all;
    const float delta = my_mean - mean;
    // Rounding may leave less than nothing; a NaN is let through.
    const float squares = block_sum<kResidentWaves>((around < 0.0f ? 0.0f : around) + count * delta * delta,
                                                    scratch.sums + kResidentWaves);
    if (threadIdx.x == 0) {
      static_cast<Part*>(p.partials)[static_cast<int64_t>(norms(plan)) * plan.number.value + part] =
          Part(reference, {all, mean, squares});
    }
    __syncthreads();  // before another part uses the scratch
  }

  struct Norm {
    float mean;
    float rest;
    float rate;
    uint32_t channel;
    float factor;
    float offset;

    __device__ __forceinline__ void prepare(const GroupNormParams& p, const Plan& plan, Scratch&,
                                            const ResidentPlanes& task) {
      const int number = static_cast<int>(plan.number.value);
      const Part all =
          team_merge(kWaveSize, static_cast<const Part*>(p.partials) + static_cast<int64_t>(task.norms(plan)) * number,
                     number);
      mean = all.mean;
      rest = all.rest;
      rate = rsqrtf(all.squares / all.count + p.eps);
      channel = ~0u;
    }

    __device__ __forceinline__ void apply(const GroupNormParams& p, const Plan& plan, const ResidentPlanes& task,
                                          int item, float* values) {
      const uint32_t of = task.channel_of(plan, item);
      if (of != channel) {
        channel = of;
        factor = rate * parameter(p.weight, p.weight_dtype, task.first_channel + of, 1.0f);
        const float more = p.add == nullptr ? 0.0f : added(p, task.sample, task.first_channel, task.first_channel + of);
        offset = parameter(p.bias, p.bias_dtype, task.first_channel + of, 0.0f) + (more - rest) * factor;
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = fmaf(values[j] - mean, factor, offset);
    }
  };
};

}  // namespace
}  // namespace diffkern
