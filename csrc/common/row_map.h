// Where the rows of a strided input, and of the strided output written from it, begin.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace diffkern {

constexpr int kMaxLeadingDims = 4;

// The leading dimensions after merging, the fastest one first. All strides are in elements.
struct RowMap {
  int64_t rows;
  int dims;
  int64_t sizes[kMaxLeadingDims];
  int64_t x_strides[kMaxLeadingDims];
  int64_t out_strides[kMaxLeadingDims];
};

struct RowOffsets {
  int64_t x;
  int64_t out;
};

namespace {

DIFFKERN_HOST_DEVICE RowOffsets locate(const RowMap& map, int64_t row) {
  RowOffsets offsets{0, 0};
  int dim = 0;
  for (; dim + 1 < map.dims; ++dim) {
    int64_t quotient;
    if (row <= UINT32_MAX && map.sizes[dim] <= UINT32_MAX) {  // a 64-bit division is slow on a GPU
      quotient = static_cast<uint32_t>(row) / static_cast<uint32_t>(map.sizes[dim]);
    } else {
      quotient = row / map.sizes[dim];
    }
    const int64_t index = row - quotient * map.sizes[dim];
    offsets.x += index * map.x_strides[dim];
    offsets.out += index * map.out_strides[dim];
    row = quotient;
  }
  offsets.x += row * map.x_strides[dim];
  offsets.out += row * map.out_strides[dim];
  return offsets;
}

}  // namespace

// Orders and merges the leading dimensions. Returns false when more than kMaxLeadingDims remain.
inline bool make_row_map(int leading, const int64_t* sizes, const int64_t* x_strides, const int64_t* out_strides,
                         RowMap* map) {
  constexpr int kMaxRank = 64;
  if (leading > kMaxRank) return false;
  // A broadcast dimension (stride 0) goes last: neighbouring rows should be neighbours in memory.
  const auto before = [&](int a, int b) {
    const uint64_t key_a = static_cast<uint64_t>(x_strides[a]) - 1;
    const uint64_t key_b = static_cast<uint64_t>(x_strides[b]) - 1;
    return key_a != key_b ? key_a < key_b : out_strides[a] < out_strides[b];
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
    if (last >= 0 && x_strides[dim] == map->x_strides[last] * map->sizes[last] &&
        out_strides[dim] == map->out_strides[last] * map->sizes[last]) {
      map->sizes[last] *= sizes[dim];
      continue;
    }
    if (map->dims == kMaxLeadingDims) return false;
    map->sizes[map->dims] = sizes[dim];
    map->x_strides[map->dims] = x_strides[dim];
    map->out_strides[map->dims] = out_strides[dim];
    ++map->dims;
  }
  if (map->dims == 0) {
    map->sizes[0] = 1;
    map->x_strides[0] = 0;
    map->out_strides[0] = 0;
    map->dims = 1;
  }
  return true;
}

}  // namespace diffkern
