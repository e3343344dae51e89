// rope, rope_3d and qk_norm_rope: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/divisor.h"
#include "../common/dtypes.h"
#include "../common/leading_map.h"

namespace diffkern {

constexpr int kMaxAxes = 4;

enum class RopeTables : int32_t { kNone, kFull, kAxes };
enum class RopeArithmetic : int32_t { kFloat32, kFloat64, kInput };  // as the ops number them
enum class RopeNorm : int32_t { kNone, kRms, kLayer };

// What is located along the leading dimensions. With full tables kFirst and kSecond are the rows of cosines and
// sines; with tables of axes they are the coordinates of a token and the number of the first pair of a row among
// the pairs of all heads. kToken counts tokens.
enum RopeStride { kX, kOut, kFirst, kSecond, kToken, kRopeStrides };

// One of q and k, seen as rows of a head each. Of the leading dimensions one is the innermost loop: the heads that
// are normalised together, or else one along which the tables do not change, if there is such a dimension.
struct RopeOperand {
  const void* x;
  void* out;
  const void* weight;  // contiguous, or null
  const void* bias;
  const void* cos[kMaxAxes];  // a full table first, or the contiguous tables of the axes
  const void* sin[kMaxAxes];
  const void* coords;  // or null
  Dtype weight_dtype;
  Dtype bias_dtype;
  Dtype cos_dtype;
  Dtype sin_dtype;
  bool wide_coords;  // int64 rather than int32
  bool compact_cos;  // one angle per pair
  bool compact_sin;
  int64_t x_step;  // strides along a row
  int64_t out_step;
  int64_t first_step;
  int64_t second_step;
  int64_t first_shift;  // what the first token to rotate has in kFirst and kSecond
  int64_t second_shift;
  int64_t inner;  // size of the innermost loop
  int64_t inner_strides[kRopeStrides];
  LeadingMap<kRopeStrides> outer;  // the other loops
  Divisor outer_sizes[kMaxLeadingDims];  // of these loops, where there are fewer than 2^31 rows
  float inverse_size;  // of what is normalised together

  DIFFKERN_HOST_DEVICE int64_t rows() const { return inner * outer.rows; }
  // Whether all rows of the innermost loop have the same angles.
  DIFFKERN_HOST_DEVICE bool shared() const {
    return inner_strides[kFirst] == 0 && inner_strides[kSecond] == 0 && inner_strides[kToken] == 0;
  }
};

//   y = rotation(norm(x) * (weight + weight_offset) + bias)
//   out[a] = y[a] * cos[a] - y[b] * sin[a],  out[b] = y[b] * cos[b] + y[a] * sin[b]
//
// for the pairs (a, b) of the first `rotary` elements of a row. Tokens outside [start, start + length) and the
// other elements are not rotated. All in float32 and rounded once, unless the options say otherwise.
struct RopeParams {
  RopeOperand operands[2];
  int count;
  Dtype dtype;  // of x and out
  RopeTables tables;
  RopeArithmetic arithmetic;
  RopeNorm norm;
  bool across;  // the rows of the innermost loop are normalised together
  bool half;    // pairs are half of `rotary` apart; else they are neighbours
  bool partial;
  bool alternating;
  bool round_norm;
  Dtype round_dtype;
  float eps;
  float weight_offset;
  int head_dim;
  int rotary;
  int axes;
  int front_pad;
  int widths[kMaxAxes];  // columns of the tables of the axes
  int64_t sizes[kMaxAxes];
  Divisor grid[kMaxAxes];
  int64_t start;
  int64_t length;

  // Units of independent work of an operand.
  DIFFKERN_HOST_DEVICE int64_t work(const RopeOperand& operand) const {
    return across ? operand.outer.rows : operand.rows();
  }
};

namespace {

// Where a token is read in the tables of the axes: the offset of its row in each, or -1 where its coordinate is
// outside, which makes NaN of what it turns.
struct AxisRows {
  int at[kMaxAxes];
};

DIFFKERN_HOST_DEVICE AxisRows axis_rows(const RopeParams& p, const RopeOperand& o, int64_t coords, int64_t position) {
  AxisRows rows{};
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#pragma unroll
#endif
  for (int axis = kMaxAxes - 1; axis >= 0; --axis) {  // a fixed count keeps the rows in registers
    if (axis >= p.axes) continue;
    int64_t index;
    if (o.coords == nullptr) {  // row-major: the last axis is the fastest
      const uint32_t rest = static_cast<uint32_t>(position);
      const uint32_t quotient = p.grid[axis].divide(rest);
      index = rest - quotient * p.grid[axis].value;
      position = quotient;
    } else {
      const int64_t at = coords + axis * o.first_step;
      index = o.wide_coords ? static_cast<const int64_t*>(o.coords)[at] : static_cast<const int32_t*>(o.coords)[at];
    }
    const bool inside = index >= 0 && index < p.sizes[axis];
    rows.at[axis] = inside ? static_cast<int>(index) * p.widths[axis] : -1;
  }
  return rows;
}

// The axis of a pair (counted over all heads, behind the padding) and its column there.
struct AxisColumn {
  int axis;
  int column;
};

DIFFKERN_HOST_DEVICE AxisColumn axis_column(const RopeParams& p, int pair) {
  if (p.alternating) {
    const uint32_t index = static_cast<uint32_t>(pair);
    const uint32_t axes = static_cast<uint32_t>(p.axes);
    const uint32_t column = axes == 3 ? index / 3u : index / axes;
    return {static_cast<int>(index - column * axes), static_cast<int>(column)};
  }
  AxisColumn place{0, pair};
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#pragma unroll
#endif
  for (int axis = 0; axis + 1 < kMaxAxes; ++axis) {
    if (axis + 1 < p.axes && place.axis == axis && place.column >= p.widths[axis]) {
      place = {axis + 1, place.column - p.widths[axis]};
    }
  }
  return place;
}

}  // namespace

// Computes the units of work [begin, end) of one operand with the best instruction set of this CPU.
void rope_cpu(const RopeParams& params, int operand, int64_t begin, int64_t end);

// Enqueues all work on a CUDA or HIP stream of the current device; returns the runtime's error code.
int rope_gpu(const RopeParams& params, void* stream);

}  // namespace diffkern
