// Which thread of the kernels for neighbouring channels does what, by the plan of the host.
#pragma once

#include "../common/gpu.h"
#include "group_norm.h"
#include "group_norm_config.h"
#include "group_norm_pixel_plan.h"

namespace diffkern {
namespace {

// What a thread of a block does. Threads past the last row do nothing.
struct PixelPlace {
  uint32_t sample;
  uint32_t part;
  uint32_t tile;
  int length;     // positions of the block
  int64_t begin;  // the first of them
  int column;
  int row;

  // Tiles first: blocks that run side by side read side by side.
  __device__ __forceinline__ PixelPlace(const PixelPlan& plan, const PositionParts& parts, uint32_t block,
                                        uint32_t thread) {
    const uint32_t row_of_tiles = plan.tiles.divide(block);
    tile = block - row_of_tiles * plan.tiles.value;
    sample = parts.number.divide(row_of_tiles);
    part = row_of_tiles - sample * parts.number.value;
    begin = parts.begin(part);
    length = parts.length_of(part);
    row = plan.width.divide(thread);
    column = thread - row * plan.width.value;
  }

  // How many positions a row of threads has.
  __device__ __forceinline__ int positions_of(const PixelPlan& plan, int of_row) const {
    return plan.height.divide(length + plan.height.value - 1 - of_row);
  }

  __device__ __forceinline__ int positions(const PixelPlan& plan) const {
    return row < static_cast<int>(plan.height.value) ? positions_of(plan, row) : 0;
  }

  __device__ __forceinline__ int64_t first_channel(const PixelPlan& plan) const {
    return static_cast<int64_t>(tile) * plan.channels();
  }

  // Of a group of the tile.
  __device__ __forceinline__ int64_t group_index(const GroupNormParams& p, const PixelPlan& plan, int group) const {
    return sample * p.groups + static_cast<int64_t>(tile) * plan.groups + group;
  }

  // Where the thread begins.
  template <int kCount>
  __device__ __forceinline__ int64_t offset(const GroupNormParams& p, const PixelPlan& plan, const Steps& steps) const {
    return sample_offset(p.shape, steps, sample) + first_channel(plan) + column * kCount +
           (begin + row) * steps.position;
  }
};

// Calls each(j, group of the tile, whether it is the group's first channel) for the channels of a packet.
template <int kCount, typename Each>
__device__ __forceinline__ void each_channel(const PixelPlan& plan, int column, Each&& each) {
  int group = column * kCount / plan.of_group;
  int channel = column * kCount - group * plan.of_group;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    each(j, group, channel == 0);
    if (++channel == plan.of_group) {
      channel = 0;
      ++group;
    }
  }
}

// Calls each(group, whether there is such a group) for the groups of a tile, a team of so many lanes for each.
template <typename Each>
__device__ __forceinline__ void each_group(const PixelPlan& plan, int lanes, int threads, Each&& each) {
  const int teams = threads / lanes;
  const int team = static_cast<int>(threadIdx.x) / lanes;
  for (int first = 0; first < plan.groups; first += teams) each(first + team, first + team < plan.groups);
}

}  // namespace
}  // namespace diffkern
