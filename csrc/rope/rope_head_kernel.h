// The kernel for heads that are normalised alone or not at all, in packets.
#pragma once

#include "rope_angles.h"
#include "rope_config.h"

namespace diffkern {
namespace {

// How the heads of an operand are divided among groups of lanes.
struct HeadGrid {
  uint32_t groups;  // of lanes, all in all
  Divisor chunks;   // of the innermost loop
  Divisor columns;  // groups side by side in a row, for long rows without a norm
  int rows;          // that a group takes of a stream; more than one have the same angles
  int span;          // that it takes of the operand
  TableVectors vectors;
};

struct HeadGrids {
  HeadGrid of[2];
  int lanes;  // of a group, a power of two
  bool both;  // a group holds heads of q and of k, which have the same angles; else blockIdx.y says whose
};

template <typename T, int kCount, int kShape, KnownNorm kNorm, bool kHalf, KnownTables kTables>
__global__ void __launch_bounds__(kHeadShapes[kShape].threads, kHeadShapes[kShape].blocks)
    head_kernel(const RopeParams p, const HeadGrids grids) {
  using Elements = Unit<T, kCount, kHalf>;
  constexpr bool kPlain = kNorm != KnownNorm::kAny;
  constexpr bool kEach = kTables != KnownTables::kAxes;
  constexpr int kRows = kStreamRows<kShape, kHalf>;
  const int number = blockIdx.y;
  const RopeOperand& angles_of = p.operands[number];
  const HeadGrid grid = number == 0 ? grids.of[0] : grids.of[1];  // an index would go through local memory
  const int lanes = grids.lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const uint32_t group = blockIdx.x * (kHeadShapes[kShape].threads / lanes) + threadIdx.x / lanes;

  // Groups past the end take part in the shuffles, and touch no memory.
  const uint32_t live_group = group < grid.groups ? group : 0;
  const uint32_t chunk_of_all = grid.columns.divide(live_group);
  const uint32_t column_block = live_group - chunk_of_all * grid.columns.value;
  const uint32_t outer = grid.chunks.divide(chunk_of_all);
  const uint32_t chunk = chunk_of_all - outer * grid.chunks.value;

  const int unit = static_cast<int>(column_block) * lanes + lane;
  const bool live = group < grid.groups && unit < p.head_dim / (2 * Elements::kPairs);
  int at[2] = {unit * kCount, 0};  // where the packets of the unit begin in a head
  bool turned = at[0] < p.rotary;
  if (kHalf) {
    const int rotary_units = p.rotary / (2 * kCount);
    turned = unit < rotary_units;
    if (!turned) at[0] = p.rotary + (unit - rotary_units) * 2 * kCount;
    at[1] = at[0] + (turned ? p.rotary / 2 : kCount);
  }

  const int64_t first_row = static_cast<int64_t>(chunk) * grid.span;
  const T* x[kStreams];
  T* out[kStreams];
  int64_t x_stride[kStreams], out_stride[kStreams];
  int rows[kStreams];
  Elements held[kStreams][kRows];
  UnitNorm<T, kCount, kHalf, kNorm> norm_of[kStreams];
  Offsets offsets;
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    const RopeOperand& o = p.operands[grids.both ? stream : number];
    if (stream == 0 || grids.both) offsets = locate_below_31_bits(o, outer);
    const int64_t first = first_row + (grids.both ? 0 : stream * grid.rows);
    const int64_t end = first_row + grid.span < o.inner ? first_row + grid.span : o.inner;
    const int64_t left = end - first;
    rows[stream] = live ? static_cast<int>(left < 0 ? 0 : left < grid.rows ? left : grid.rows) : 0;
    x_stride[stream] = o.inner_strides[kX];
    out_stride[stream] = o.inner_strides[kOut];
    x[stream] = static_cast<const T*>(o.x) + offsets.of[kX] + first * x_stride[stream];
    out[stream] = static_cast<T*>(o.out) + offsets.of[kOut] + first * out_stride[stream];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row < rows[stream]) held[stream][row].load_streamed(x[stream] + row * x_stride[stream], at);
    }
  }
#pragma unroll
  for (const RopeStride which : {kFirst, kSecond, kToken}) offsets.of[which] += first_row * angles_of.inner_strides[which];

  // The parameters and the angles are on their way while the sums are made.
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    if (live) norm_of[stream].load_ahead(p.operands[grids.both ? stream : number], at);
  }
  turned = turned && live && turns(p, offsets.of[kToken]);
  Angles<Elements::kPairs, kEach> angles;
  if (turned) {
    const int64_t cos_row = offsets.of[kFirst] - angles_of.first_shift;
    const int64_t sin_row = offsets.of[kSecond] - angles_of.second_shift;
    if (kTables == KnownTables::kAxes || (kTables == KnownTables::kAny && p.tables == RopeTables::kAxes)) {
      const AxisRows axes = axis_rows(p, angles_of, cos_row, offsets.of[kToken] - p.start);
      unsigned outside = 0;
#pragma unroll
      for (int axis = 0; axis < kMaxAxes; ++axis) outside |= static_cast<unsigned>(axis < p.axes && axes.at[axis] < 0) << axis;
      set_identity(angles);
      const AxisSlots<Elements::kPairs> slots(p, static_cast<int>(sin_row) + (kHalf ? at[0] : at[0] / 2));
      const auto row_of = [&](unsigned axis) {
        // Chosen by comparisons: an array that is indexed at run time would go through local memory.
        TableRow row{};
#pragma unroll
        for (int i = 0; i < kMaxAxes; ++i) {
          const int64_t begin = axes.at[i] < 0 ? 0 : axes.at[i];
          if (axis == static_cast<unsigned>(i)) {
            row = {static_cast<const float*>(angles_of.cos[i]) + begin, static_cast<const float*>(angles_of.sin[i]) + begin};
          }
        }
        return row;
      };
      read_axes(slots, (1u << kMaxAxes) - 1, outside, row_of, angles);
    } else if constexpr (kTables != KnownTables::kAxes) {
      const TableRow row{
          static_cast<const float*>(angles_of.cos[0]) + cos_row + full_offset<kHalf>(at[0], angles_of.first_step, angles_of.compact_cos),
          static_cast<const float*>(angles_of.sin[0]) + sin_row + full_offset<kHalf>(at[0], angles_of.second_step, angles_of.compact_sin)};
      read_full<T, kCount, kHalf>(p, angles_of, grid.vectors, row, angles);
    }
    if (!kPlain && p.arithmetic == RopeArithmetic::kInput) round_angles<T>(angles);
  }

  Normaliser norms[kStreams * kRows];
  normalise<kNorm, sizeof(T) == 2>(
      p, norms, [&](int) { return angles_of.inverse_size; },
      [&](int row) { return first_of_group(held[row / kRows][row % kRows].packets[0].first(), lanes); },
      [&](auto&... values) {
        for (int mask = lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
          for (int row = 0; row < kStreams * kRows; ++row) ((values[row] += shuffle_xor(values[row], mask)), ...);
        }
      },
      [&](auto&& add) {
#pragma unroll
        for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            if (row < rows[stream]) {
              typename Elements::Values values;
              held[stream][row].optimization_barrier();
              held[stream][row].unpack_to(values);
#pragma unroll
              for (int i = 0; i < 2 * Elements::kPairs; ++i) add(stream * kRows + row, values[i / Elements::kPairs][i % Elements::kPairs]);
            }
          }
        }
      });

#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    const RopeOperand& o = p.operands[grids.both ? stream : number];
    if (rows[stream] > 0) norm_of[stream].load(p, o, at);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row < rows[stream]) {
        Elements& elements = held[stream][row];
        elements.optimization_barrier();
        typename Elements::Values values;
        elements.unpack_to(values);
        norm_of[stream].apply(p, o, norms[stream * kRows + row], values);
        if (turned) rotate<T, kPlain>(p, angles, values);
        elements.pack_from(values);
        elements.store(out[stream] + row * out_stride[stream], at);
      }
    }
  }
}

}  // namespace
}  // namespace diffkern
