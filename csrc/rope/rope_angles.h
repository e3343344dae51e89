// How the kernels find the angles of a unit in the tables.
#pragma once

#include "rope_unit.h"

namespace diffkern {
namespace {

using Offsets = LeadingOffsets<kRopeStrides>;

// Where a row of the outer loops begins, by multiplications: divisions are slow on a GPU. There are fewer than 2^31.
__device__ __forceinline__ Offsets locate_below_31_bits(const RopeOperand& o, uint32_t row) {
  Offsets offsets{};
#pragma unroll
  for (int dim = 0; dim < kMaxLeadingDims; ++dim) {
    if (dim >= o.outer.dims) break;
    uint32_t index = row;
    if (dim + 1 < o.outer.dims) {
      const uint32_t quotient = o.outer_sizes[dim].divide(row);
      index = row - quotient * o.outer_sizes[dim].value;
      row = quotient;
    }
#pragma unroll
    for (int i = 0; i < kRopeStrides; ++i) offsets.of[i] += index * o.outer.strides[i][dim];
  }
  return offsets;
}

// What a kernel knows of the tables when it is compiled. With full tables it keeps an angle for each element, with
// tables of axes, where it knows so, one for a pair.
enum class KnownTables { kAny, kFull, kAxes };

// Says that a pointer is one to global memory, which cannot be seen once it has been in shared memory: generic loads are
// slower.
__device__ __forceinline__ const float* in_global_memory(const float* table) {
#if !DIFFKERN_HIP
  __builtin_assume(__isGlobal(table));
#endif
  return table;
}

// Where a row of angles begins.
struct alignas(16) TableRow {
  const float* cos;
  const float* sin;
};

// --- full tables ---------------------------------------------------------------------------------------

// Which accesses to the full tables can be packets.
struct TableVectors {
  bool cos;
  bool sin;
};

// kCount neighbouring values of a table, in few accesses if `vector` says that they can be.
template <int kCount>
__device__ __forceinline__ void read_table(const float* from, int64_t step, bool vector, float* to) {
  from = in_global_memory(from);
  if (vector) return load_elements<float, kCount>(from, to);
#pragma unroll
  for (int j = 0; j < kCount; ++j) to[j] = from[j * step];
}

// Where in a row of a full table the values of a unit begin whose first element is `column` of its head.
template <bool kHalf>
__device__ __forceinline__ int64_t full_offset(int column, int64_t step, bool compact) {
  return (compact && !kHalf ? column / 2 : column) * step;
}

// The values of a unit in one full table. `from` points at the first; the second elements of pairs that are half a
// row apart are `apart` elements further.
template <typename T, int kCount, bool kHalf>
__device__ __forceinline__ void read_full_one(const float* from, int64_t step, bool compact, bool vector, int apart,
                                              typename Unit<T, kCount, kHalf>::Values& to) {
  constexpr int kPairs = Unit<T, kCount, kHalf>::kPairs;
  if (compact) {
    read_table<kPairs>(from, step, vector, to[0]);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) to[1][j] = to[0][j];
    return;
  }
  float flat[2 * kPairs];
#pragma unroll
  for (int i = 0; i < Unit<T, kCount, kHalf>::kPackets; ++i) {
    read_table<kCount>(from + i * apart * step, step, vector, flat + i * kCount);
  }
  Unit<T, kCount, kHalf>::split(flat, to);
}

template <typename T, int kCount, bool kHalf, int kPairs>
__device__ __forceinline__ void read_full(const RopeParams& p, const RopeOperand& o, const TableVectors& vectors,
                                          const TableRow& from, Angles<kPairs, true>& angles) {
  read_full_one<T, kCount, kHalf>(from.cos, o.first_step, o.compact_cos, vectors.cos, p.rotary / 2, angles.cos);
  read_full_one<T, kCount, kHalf>(from.sin, o.second_step, o.compact_sin, vectors.sin, p.rotary / 2, angles.sin);
}

// --- tables of axes ------------------------------------------------------------------------------------

// The axes and columns of the pairs of a unit, packed: they stay the same from row to row.
template <int kPairs>
struct AxisSlots {
  static constexpr unsigned kPadding = kMaxAxes;  // in place of an axis: a pair that is not turned
  unsigned packed[kPairs];

  AxisSlots() = default;
  __device__ __forceinline__ AxisSlots(const RopeParams& p, int pair) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int index = pair + j - p.front_pad;
      const AxisColumn place = axis_column(p, index < 0 ? 0 : index);
      packed[j] = index < 0 ? kPadding : static_cast<unsigned>(place.column) * 8 + place.axis;
    }
  }

  // Has the slots taken apart anew from here on, which costs less than the registers.
  __device__ __forceinline__ void forget_parts() {
#if !DIFFKERN_HIP
#pragma unroll
    for (int j = 0; j < kPairs; ++j) asm volatile("" : "+r"(packed[j]));
#endif
  }

  __device__ __forceinline__ unsigned axis(int j) const { return packed[j] & 7; }
  __device__ __forceinline__ unsigned column(int j) const { return packed[j] >> 3; }
};

constexpr int kMaxAxisWidth = 1 << 28;  // for the columns that slots hold

// No turn: what pairs in the padding get.
template <int kPairs, bool kEach>
__device__ __forceinline__ void set_identity(Angles<kPairs, kEach>& angles) {
#pragma unroll
  for (int side = 0; side < Angles<kPairs, kEach>::kSides; ++side) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      angles.cos[side][j] = 1.0f;
      angles.sin[side][j] = 0.0f;
    }
  }
}

// Reads the angles of the slots whose axis is in the set `moved`; those of the axes in `outside` are NaN.
// row_of(axis) is the row of the table of an axis.
template <int kPairs, bool kEach, typename RowOf>
__device__ __forceinline__ void read_axes(const AxisSlots<kPairs>& slots, unsigned moved, unsigned outside, RowOf&& row_of,
                                          Angles<kPairs, kEach>& angles) {
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    if (moved >> slots.axis(j) & 1) {
      const TableRow row = row_of(slots.axis(j));
      angles.cos[0][j] = in_global_memory(row.cos)[slots.column(j)];
      angles.sin[0][j] = in_global_memory(row.sin)[slots.column(j)];
    }
  }
  if (outside != 0) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (outside >> slots.axis(j) & 1) angles.cos[0][j] = angles.sin[0][j] = float_of(0x7fc00000u);
    }
  }
  if constexpr (kEach) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      angles.cos[1][j] = angles.cos[0][j];
      angles.sin[1][j] = angles.sin[0][j];
    }
  }
}

template <typename T, int kPairs, bool kEach>
__device__ __forceinline__ void round_angles(Angles<kPairs, kEach>& angles) {
#pragma unroll
  for (int side = 0; side < Angles<kPairs, kEach>::kSides; ++side) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      angles.cos[side][j] = rounded<T>(angles.cos[side][j]);
      angles.sin[side][j] = rounded<T>(angles.sin[side][j]);
    }
  }
}

}  // namespace
}  // namespace diffkern
