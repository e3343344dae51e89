// What a thread of the kernel that keeps what it reads does of a part, where the channels of a position are neighbours in memory.
//
// A thread sums up around the first value that it sees of each channel; its block merges that by channels, then by
// groups.
#pragma once

#include "group_norm.h"
#include "group_norm_config.h"
#include "group_norm_packets.h"
#include "group_norm_pixel_place.h"
#include "group_norm_pixel_plan.h"
#include "group_norm_resident_copies.h"
#include "group_norm_statistics.h"

namespace diffkern {
namespace {

inline PixelPlan plan_resident_pixels(const GroupNormParams& p) {
  return plan_pixels(p, kPacketBytes / static_cast<int>(bytes_of(p.x_dtype)), kResidentPixels);
}

template <typename T>
struct ResidentPixels {
  using Plan = PixelPlan;
  static constexpr int kCount = kPacketSize<T>;
  static constexpr int kMostChannels = kCount * kResidentThreads / 4;  // of a tile

  // What the threads of a block tell each other.
  struct Scratch {
    union {
      float2 of_thread[kCount][kResidentThreads];  // mean, relative to the pivot of the channel, and squares
      struct {
        float means[kMostChannels];
        float factors[kMostChannels];
        float offsets[kMostChannels];
        GroupNormaliser norms[kMostChannels];
      };
    };
    float2 of_channel[kMostChannels];  // the same, with what is added to the channel
    float pivots[kMostChannels];       // the first value of each channel in this part
  };

  PixelPlace place;
  int items;
  const T* x;
  T* out;

  __device__ __forceinline__ ResidentPixels(const GroupNormParams& p, const Plan& plan, uint32_t part)
      : place(plan, plan.sum, tiles_first(plan, part), threadIdx.x),
        items(place.positions(plan)),
        x(static_cast<const T*>(p.x) + place.template offset<kCount>(p, plan, p.x_steps)),
        out(static_cast<T*>(p.out) + place.template offset<kCount>(p, plan, p.out_steps)) {}

  // The number of a part where tiles are counted first, as PixelPlace does: here a block has parts of one tile in a row,
  // whose norms it prepares once.
  static __device__ __forceinline__ uint32_t tiles_first(const Plan& plan, uint32_t index) {
    const uint32_t row = plan.sum.number.divide(index);
    const uint32_t part = index - row * plan.sum.number.value;
    const uint32_t sample = plan.tiles.divide(row);
    const uint32_t tile = row - sample * plan.tiles.value;
    return (sample * plan.sum.number.value + part) * plan.tiles.value + tile;
  }

  // From one of the thread's packets to its next.
  static __device__ __forceinline__ int64_t stride(const GroupNormParams&, const Plan& plan, const Steps& steps) {
    return plan.height.value * steps.position;
  }

  // Parts with the same one have the same means and variances.
  __device__ __forceinline__ uint32_t norms(const Plan& plan) const {
    return place.sample * plan.tiles.value + place.tile;
  }

  __device__ __forceinline__ void prefetch_parameters(const GroupNormParams& p, const Plan& plan) const {
    const int channel = static_cast<int>(threadIdx.x) * kCount;
    if (channel >= plan.channels()) return;
    prefetch(p.weight, p.weight_dtype, place.first_channel(plan) + channel);
    prefetch(p.bias, p.bias_dtype, place.first_channel(plan) + channel);
  }

  struct Sums {
    float pivots[kCount];
    float sums[kCount];
    float squares[kCount];

    __device__ __forceinline__ Sums() {
#pragma unroll
      for (int j = 0; j < kCount; ++j) pivots[j] = sums[j] = squares[j] = 0.0f;
    }

    __device__ __forceinline__ void begin(const GroupNormParams&, const Plan&, const ResidentPixels&,
                                          const uint4& packet) {
      unpack<T>(packet, pivots);
    }

    __device__ __forceinline__ void add(const GroupNormParams&, const Plan&, const ResidentPixels&, int,
                                        const uint4& packet) {
      float values[kCount];
      unpack<T>(packet, values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float value = values[j] - pivots[j];
        sums[j] += value;
        squares[j] = fmaf(value, value, squares[j]);
      }
    }

    // Adds the sums of few packets, which stay accurate so, and begins them again.
    __device__ __forceinline__ void take(Sums& block) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sums[j] += block.sums[j];
        squares[j] += block.squares[j];
        block.sums[j] = block.squares[j] = 0.0f;
      }
    }
  };

  // Where a channel of the tile stands in shared memory: threads side by side, each with a packet, are served at once.
  static __device__ __forceinline__ int index_of(const Plan& plan, int channel) {
    return channel % kCount * static_cast<int>(plan.width.value) + channel / kCount;
  }

  // Calls each(index, channel of the tile) for those that are the thread's.
  template <typename Each>
  static __device__ __forceinline__ void each_tile_channel(const Plan& plan, Each&& each) {
    const int width = static_cast<int>(plan.width.value);
#pragma unroll 1
    for (int index = threadIdx.x; index < plan.channels(); index += kResidentThreads) {
      const int in_packet = plan.width.divide(index);
      each(index, (index - in_packet * width) * kCount + in_packet);
    }
  }

  // What is added to a channel of the tile.
  __device__ __forceinline__ float shift(const GroupNormParams& p, const Plan& plan, int channel) const {
    if (p.add == nullptr) return 0.0f;
    const int64_t first = place.first_channel(plan);
    return added(p, place.sample, first + channel / plan.of_group * plan.of_group, first + channel);
  }

  // Leaves the statistics of the part.
  __device__ __forceinline__ void finish(const GroupNormParams& p, const Plan& plan, Scratch& scratch,
                                         const Sums& mine) const {
    const int width = static_cast<int>(plan.width.value);
    const int height = static_cast<int>(plan.height.value);
    if (place.row == 0) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) scratch.pivots[j * width + place.column] = mine.pivots[j];
    }
    __syncthreads();
    if (place.row < height) {
      const float share = items > 0 ? 1.0f / static_cast<float>(items) : 0.0f;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float mean = mine.sums[j] * share;
        const float around = mine.squares[j] - mine.sums[j] * mean;
        // Rounding may leave less than nothing; a NaN is let through.
        scratch.of_thread[j][threadIdx.x] = {(mine.pivots[j] - scratch.pivots[j * width + place.column]) + mean,
                                             around < 0.0f ? 0.0f : around};
      }
    }
    __syncthreads();
    const int least = plan.height.divide(place.length);  // positions of a row
    const int longer = place.length - least * height;    // rows that have one more
    const float all = 1.0f / static_cast<float>(place.length);
    each_tile_channel(plan, [&](int index, int channel) {
      const float2* rows = scratch.of_thread[channel % kCount] + channel / kCount;
      const auto positions = [&](int row) { return static_cast<float>(row < longer ? least + 1 : least); };
      float sum = 0.0f;
#pragma unroll 4
      for (int row = 0; row < height; ++row) sum += positions(row) * rows[row * width].x;
      const float mean = sum * all;
      float squares = 0.0f;
#pragma unroll 4
      for (int row = 0; row < height; ++row) {
        const float2 of_row = rows[row * width];
        const float delta = of_row.x - mean;
        squares += of_row.y + positions(row) * delta * delta;
      }
      scratch.of_channel[index] = {mean + shift(p, plan, channel), squares};
    });
    __syncthreads();
    each_group(plan, kChannelLanes, kResidentThreads, [&](int group, bool exists) {
      const int lane = static_cast<int>(threadIdx.x) % kChannelLanes;
      const int begin = exists ? group * plan.of_group : 0;
      const float reference = scratch.pivots[index_of(plan, begin)];
      const auto mean_of = [&](int index) { return (scratch.pivots[index] - reference) + scratch.of_channel[index].x; };
      float sum = 0.0f;
#pragma unroll 1
      for (int i = lane; i < plan.of_group; i += kChannelLanes) sum += mean_of(index_of(plan, begin + i));
      const float mean = group_sum<kChannelLanes>(sum) / static_cast<float>(plan.of_group);
      float squares = 0.0f;
      const float count = static_cast<float>(place.length);  // of each channel
#pragma unroll 1
      for (int i = lane; i < plan.of_group; i += kChannelLanes) {
        const int index = index_of(plan, begin + i);
        const float delta = mean_of(index) - mean;
        squares += scratch.of_channel[index].y + count * delta * delta;
      }
      squares = group_sum<kChannelLanes>(squares);
      if (!exists || lane != 0) return;
      static_cast<Part*>(p.partials)[place.group_index(p, plan, group) * plan.sum.number.value + place.part] =
          Part(reference, {count * static_cast<float>(plan.of_group), mean, squares});
    });
    __syncthreads();  // before another part uses the scratch
  }

  struct Norm {
    float means[kCount];
    float factors[kCount];
    float offsets[kCount];

    __device__ __forceinline__ void prepare(const GroupNormParams& p, const Plan& plan, Scratch& scratch,
                                            const ResidentPixels& task) {
      const PixelPlace& place = task.place;
      __syncthreads();
      each_group(plan, plan.lanes, kResidentThreads, [&](int group, bool exists) {
        const int number = static_cast<int>(plan.sum.number.value);
        const Part* parts =
            static_cast<const Part*>(p.partials) + place.group_index(p, plan, exists ? group : 0) * number;
        const Part all = team_merge(plan.lanes, parts, number);
        if (!exists || threadIdx.x % plan.lanes != 0) return;
        scratch.norms[group] = {all.mean, all.rest, rsqrtf(all.squares / all.count + p.eps)};
      });
      __syncthreads();
      each_tile_channel(plan, [&](int index, int channel) {
        const int64_t at = place.first_channel(plan) + channel;
        const GroupNormaliser norm = scratch.norms[channel / plan.of_group];
        const float factor = norm.rate * parameter(p.weight, p.weight_dtype, at, 1.0f);
        scratch.means[index] = norm.mean;
        scratch.factors[index] = factor;
        scratch.offsets[index] =
            parameter(p.bias, p.bias_dtype, at, 0.0f) + (task.shift(p, plan, channel) - norm.rest) * factor;
      });
      __syncthreads();
      if (task.items == 0) return;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int index = j * static_cast<int>(plan.width.value) + place.column;
        means[j] = scratch.means[index];
        factors[j] = scratch.factors[index];
        offsets[j] = scratch.offsets[index];
      }
    }

    __device__ __forceinline__ void apply(const GroupNormParams&, const Plan&, const ResidentPixels&, int,
                                          float* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = fmaf(values[j] - means[j], factors[j], offsets[j]);
    }
  };
};

}  // namespace
}  // namespace diffkern
