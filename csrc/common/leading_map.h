// Where the rows of several strided tensors begin that are walked together: inputs, broadcast ones among
// them, and outputs. All but the last dimension ("leading" ones) are merged into a few loops.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace diffkern {

constexpr int kMaxLeadingDims = 4;
constexpr int kMaxRank = 64;

// The leading dimensions after merging, the fastest one first. All strides are in elements.
template <int kOperands>
struct LeadingMap {
  int64_t rows;
  int dims;
  int64_t sizes[kMaxLeadingDims];
  int64_t strides[kOperands][kMaxLeadingDims];
};

template <int kOperands>
struct LeadingOffsets {
  int64_t of[kOperands];
};

namespace {

// Splits the number of a row into one index per merged dimension: calls step(dim, index) for each.
template <typename Step>
DIFFKERN_HOST_DEVICE void split_row(int dims, const int64_t* sizes, int64_t row, Step&& step) {
  int dim = 0;
  for (; dim + 1 < dims; ++dim) {
    int64_t quotient;
    if (row <= UINT32_MAX && sizes[dim] <= UINT32_MAX) {  // a 64-bit division is slow on a GPU
      quotient = static_cast<uint32_t>(row) / static_cast<uint32_t>(sizes[dim]);
    } else {
      quotient = row / sizes[dim];
    }
    step(dim, row - quotient * sizes[dim]);
    row = quotient;
  }
  step(dim, row);
}

template <int kOperands>
DIFFKERN_HOST_DEVICE LeadingOffsets<kOperands> locate(const LeadingMap<kOperands>& map, int64_t row) {
  LeadingOffsets<kOperands> offsets{};
  split_row(map.dims, map.sizes, row, [&](int dim, int64_t index) {
    for (int operand = 0; operand < kOperands; ++operand) offsets.of[operand] += index * map.strides[operand][dim];
  });
  return offsets;
}

}  // namespace

// Orders and merges the leading dimensions, by the memory order of operand 0 and, where that leaves a choice,
// of the next ones. Returns false when more than kMaxLeadingDims remain.
//
// sizes: of the shape that all operands have in common; strides: of each operand, 0 where it is broadcast.
template <int kOperands>
inline bool make_leading_map(int leading, const int64_t* sizes, const int64_t* const (&strides)[kOperands],
                             LeadingMap<kOperands>* map) {
  if (leading > kMaxRank) return false;
  const auto before = [&](int a, int b) {
    for (int operand = 0; operand < kOperands; ++operand) {
      // A broadcast dimension (stride 0) goes last: neighbouring rows should be neighbours in memory.
      const uint64_t key_a = static_cast<uint64_t>(strides[operand][a]) - 1;
      const uint64_t key_b = static_cast<uint64_t>(strides[operand][b]) - 1;
      if (key_a != key_b) return key_a < key_b;
    }
    return false;
  };
  int order[kMaxRank];
  int count = 0;
  map->rows = 1;
  for (int dim = leading - 1; dim >= 0; --dim) {
    map->rows *= sizes[dim];
    if (sizes[dim] == 1) continue;
    int place = count++;
    for (; place > 0 && before(dim, order[place - 1]); --place) order[place] = order[place - 1];
    order[place] = dim;
  }
  map->dims = 0;
  for (int i = 0; i < count; ++i) {
    const int dim = order[i];
    const int last = map->dims - 1;
    bool continues = last >= 0;
    for (int operand = 0; continues && operand < kOperands; ++operand) {
      continues = strides[operand][dim] == map->strides[operand][last] * map->sizes[last];
    }
    if (continues) {
      map->sizes[last] *= sizes[dim];
      continue;
    }
    if (map->dims == kMaxLeadingDims) return false;
    map->sizes[map->dims] = sizes[dim];
    for (int operand = 0; operand < kOperands; ++operand) map->strides[operand][map->dims] = strides[operand][dim];
    ++map->dims;
  }
  if (map->dims == 0) {
    map->sizes[0] = 1;
    for (int operand = 0; operand < kOperands; ++operand) map->strides[operand][0] = 0;
    map->dims = 1;
  }
  return true;
}

// The strides with which a tensor is read as one of the shape `to_sizes`, as torch broadcasts: aligned at the
// last dimension, 0 where it repeats. Returns false where torch would not broadcast.
inline bool broadcast_strides(int rank, const int64_t* sizes, const int64_t* strides, int to_rank,
                              const int64_t* to_sizes, int64_t* to_strides) {
  const int added = to_rank - rank;
  if (added < 0) return false;
  for (int dim = 0; dim < to_rank; ++dim) {
    const int own = dim - added;
    const bool repeats = own < 0 || (sizes[own] == 1 && to_sizes[dim] != 1);
    if (!repeats && sizes[own] != to_sizes[dim]) return false;
    to_strides[dim] = repeats ? 0 : strides[own];
  }
  return true;
}

}  // namespace diffkern
