// Where the rows of a strided input, and of the strided output written from it, begin: LeadingMap for the
// most common case, with names in place of numbers.
#pragma once

#include <cstdint>

#include "leading_map.h"

namespace diffkern {

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
  split_row(map.dims, map.sizes, row, [&](int dim, int64_t index) {
    offsets.x += index * map.x_strides[dim];
    offsets.out += index * map.out_strides[dim];
  });
  return offsets;
}

}  // namespace

// Orders and merges the leading dimensions. Returns false when more than kMaxLeadingDims remain.
inline bool make_row_map(int leading, const int64_t* sizes, const int64_t* x_strides, const int64_t* out_strides,
                         RowMap* map) {
  LeadingMap<2> merged;
  if (!make_leading_map(leading, sizes, {x_strides, out_strides}, &merged)) return false;
  *map = RowMap{merged.rows, merged.dims, {}, {}, {}};
  for (int dim = 0; dim < merged.dims; ++dim) {
    map->sizes[dim] = merged.sizes[dim];
    map->x_strides[dim] = merged.strides[0][dim];
    map->out_strides[dim] = merged.strides[1][dim];
  }
  return true;
}

}  // namespace diffkern
