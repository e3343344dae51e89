// Which block of the kernels for neighbouring channels does what.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/divisor.h"
#include "group_norm.h"
#include "group_norm_config.h"

namespace diffkern {
namespace {

// Positions in parts of one length, the first `longer` of which have one more.
struct PositionParts {
  Divisor number;
  uint32_t longer;
  int length;

  DIFFKERN_HOST_DEVICE int64_t begin(uint32_t part) const {
    return static_cast<int64_t>(part) * length + (part < longer ? part : longer);
  }
  DIFFKERN_HOST_DEVICE int length_of(uint32_t part) const { return length + (part < longer ? 1 : 0); }
};

// A block takes a part of the positions of a tile of channels, which is whole groups and whole packets of kCount
// channels: `width` threads side by side have a packet each, `height` rows of those have a position each.
struct PixelPlan {
  int count;     // channels of a thread
  int of_group;  // channels of a group
  int groups;    // of a tile
  int lanes;     // threads that merge a group, a power of two
  Divisor width;
  Divisor height;
  Divisor tiles;       // of a sample
  PositionParts sum;   // of the first pass
  PositionParts norm;  // of the second pass
  uint32_t folded;     // parts that the second pass merges: all, or fewer that have been merged before

  DIFFKERN_HOST_DEVICE int channels() const { return groups * of_group; }
  DIFFKERN_HOST_DEVICE bool folds() const { return folded != sum.number.value; }
};

// For about so many blocks, with `most` positions a thread at most and kLeastPositions or so at least.
inline PositionParts split_positions(int64_t positions, int64_t height, int64_t blocks, int64_t most) {
  const int64_t of_threads = ceil_div(positions, height);
  const int64_t number = std::clamp(blocks, ceil_div(of_threads, most), ceil_div(of_threads, kLeastPositions));
  return {make_divisor(static_cast<uint32_t>(number)), static_cast<uint32_t>(positions % number),
          static_cast<int>(positions / number)};
}

// The plan for `count` channels per thread, without groups if there is none. What the statistics depend on is chosen by
// the shape of a sample alone.
inline PixelPlan plan_pixels(const GroupNormParams& p, int count, const PixelConfig& config) {
  const int64_t of_group = p.shape.channels / p.groups;
  PixelPlan plan{};
  plan.count = count;
  if (p.shape.channels % count != 0) return plan;
  int64_t unit = 1;  // groups that are whole packets; their number divides that of all groups
  while (unit * of_group % count != 0) ++unit;
  const int64_t unit_width = unit * of_group / count;
  if (unit_width > config.threads) return plan;
  // Single elements are so small that a tile takes more of them.
  const int64_t most_width = count == 1 ? config.threads / 2 : config.tile;
  const int64_t units = p.groups / unit;
  int64_t taken = std::clamp<int64_t>(most_width / unit_width, 1, units);
  while (units % taken != 0) --taken;

  plan.of_group = static_cast<int>(of_group);
  plan.groups = static_cast<int>(taken * unit);
  plan.lanes = kMergeLanes;
  while (plan.lanes > 1 && plan.lanes * plan.groups > config.threads) plan.lanes /= 2;
  const int64_t width = taken * unit_width;
  const int64_t height = config.threads / width;
  const int64_t tiles = units / taken;
  plan.width = make_divisor(static_cast<uint32_t>(width));
  plan.height = make_divisor(static_cast<uint32_t>(height));
  plan.tiles = make_divisor(static_cast<uint32_t>(tiles));
  const int64_t positions = p.shape.positions;
  plan.sum = split_positions(positions, height, config.sum_blocks / tiles, config.sum_positions);
  plan.norm = split_positions(positions, height, config.norm_blocks / (tiles * p.shape.samples), config.norm_positions);
  const uint32_t parts = plan.sum.number.value;
  plan.folded = parts > static_cast<uint32_t>(std::max(config.most_parts, kFoldedParts)) ? kFoldedParts : parts;
  return plan;
}

}  // namespace
}  // namespace diffkern
