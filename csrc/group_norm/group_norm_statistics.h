// Statistics of some values, and how the GPU kernels of group_norm_silu merge them.
#pragma once

#include "../common/gpu_samples.h"
#include "group_norm.h"

namespace diffkern {
namespace {

// What is added to a channel before the norm, less what is added to the first channel of its group: what is added to all
// of a group, the norm takes out again.
__device__ __forceinline__ float added(const GroupNormParams& p, int64_t sample, int64_t first_channel,
                                       int64_t channel) {
  if (p.add == nullptr) return 0.0f;
  return parameter(p.add, p.add_dtype, add_offset(p, sample, channel), 0.0f) -
         parameter(p.add, p.add_dtype, add_offset(p, sample, first_channel), 0.0f);
}

// With the mean relative to something that the values are close to.
struct Statistics {
  float count;
  float mean;
  float squares;  // sum of squares around the mean

  __device__ __forceinline__ void merge(const Statistics& other) {
    const float total = count + other.count;
    const float share = total > 0.0f ? other.count / total : 0.0f;
    const float delta = other.mean - mean;
    mean += delta * share;
    squares += other.squares + delta * delta * (count * share);
    count = total;
  }
};

__device__ __forceinline__ float team_sum(float value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// Merges read(0), ..., read(number - 1) by an aligned team of lanes, a power of two, each of which has the result. All
// lanes of the wave must take part. Reads everything twice, so that squares are those of centred values.
template <typename Read>
__device__ __forceinline__ Statistics team_merge(int lanes, int number, Read&& read) {
  const int lane = threadIdx.x & (lanes - 1);
  float count = 0.0f;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = lane; i < number; i += lanes) {
    const Statistics part = read(i);
    count += part.count;
    sum += part.count * part.mean;
  }
  count = team_sum(count, lanes);
  const float mean = team_sum(sum, lanes) / count;
  float squares = 0.0f;
#pragma unroll 4
  for (int i = lane; i < number; i += lanes) {
    const Statistics part = read(i);
    const float delta = part.mean - mean;
    squares += part.squares + part.count * delta * delta;
  }
  return {count, mean, team_sum(squares, lanes)};
}

// Statistics that stand for themselves, as one kernel leaves them to the next.
struct alignas(16) Part {
  float count;
  float mean;
  float rest;  // what the mean lacks as a single float
  float squares;

  Part() = default;
  __device__ __forceinline__ Part(float reference, const Statistics& relative)
      : count(relative.count), mean(reference + relative.mean), squares(relative.squares) {
    const float added = mean - reference;
    rest = (reference - (mean - added)) + (relative.mean - added);
  }
};

// What the second pass needs of a group: its mean, what that lacks as a single float, and 1 / deviation.
struct GroupNormaliser {
  float mean;
  float rest;
  float rate;
};

__device__ __forceinline__ Part team_merge(int lanes, const Part* parts, int number) {
  const float reference = parts[0].mean;
  return Part(reference, team_merge(lanes, number, [&](int i) {
                const float4 part = reinterpret_cast<const float4*>(parts)[i];
                return Statistics{part.x, (part.y - reference) + part.z, part.w};
              }));
}

}  // namespace
}  // namespace diffkern
