// The kernel for any dtypes, alignment, strides and sizes, and for float64.
#pragma once

#include "rope_angles.h"

namespace diffkern {
namespace {

constexpr int kGeneralLanes = 32;
constexpr int kGeneralRows = 4;  // waves of a block

template <typename A>
__device__ __forceinline__ A read_value(const void* base, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kFloat64) return static_cast<A>(static_cast<const double*>(base)[at]);
  float value;
  load_elements<1>(base, dtype, at, &value);
  return value;
}

// Rounds from float64 by way of float32, as torch does.
template <typename A>
__device__ __forceinline__ void write_value(A value, void* base, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kFloat64) {
    static_cast<double*>(base)[at] = value;
  } else {
    const float narrow = static_cast<float>(value);
    store_elements<1>(&narrow, base, dtype, at);
  }
}

template <typename A>
__device__ __forceinline__ A round_value(bool rounds, Dtype dtype, A value) {
  if (!rounds || dtype == Dtype::kFloat64) return value;
  return rounded_to(dtype, static_cast<float>(value));
}

// The angle of a pair in the tables of the axes.
template <typename A>
__device__ __forceinline__ void read_axis_angle(const RopeParams& p, const RopeOperand& o, const AxisRows& rows, int pair,
                                                A* cos, A* sin) {
  *cos = 1.0f;
  *sin = 0.0f;
  const int index = pair - p.front_pad;
  if (index < 0) return;
  const AxisColumn place = axis_column(p, index);
  int at = -1;
#pragma unroll
  for (int axis = 0; axis < kMaxAxes; ++axis) at = place.axis == axis ? rows.at[axis] : at;
  if (at < 0) {
    *cos = *sin = float_of(0x7fc00000u);
    return;
  }
  *cos = read_value<A>(o.cos[place.axis], o.cos_dtype, at + place.column);
  *sin = read_value<A>(o.sin[place.axis], o.sin_dtype, at + place.column);
}

// The work of an operand, a wave to each: a head, or all heads of a token. A is the arithmetic of the rotation.
template <typename A>
__global__ void __launch_bounds__(kGeneralLanes* kGeneralRows) general_kernel(const RopeParams p) {
  const RopeOperand& o = p.operands[blockIdx.y];
  const int lane = threadIdx.x;
  const int pairs = p.rotary / 2;
  const bool each = p.arithmetic == RopeArithmetic::kInput;
  const int64_t work = p.work(o);
  const int heads = p.across ? static_cast<int>(o.inner) : 1;

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGeneralRows; first < work;
       first += static_cast<int64_t>(gridDim.x) * kGeneralRows) {
    // Waves past the end take part in the shuffles, and touch no memory.
    const int64_t unit = first + threadIdx.y;
    const bool live = unit < work;
    const int64_t number = live ? unit : first;
    const int64_t outer = p.across ? number : number / o.inner;
    const int64_t inner = p.across ? 0 : number - outer * o.inner;
    Offsets begin = locate(o.outer, outer);
#pragma unroll
    for (int i = 0; i < kRopeStrides; ++i) begin.of[i] += inner * o.inner_strides[i];

    const int size = live ? heads * p.head_dim : 0;
    Normaliser norms[1];
    normalise<KnownNorm::kAny, false>(
        p, norms, [&](int) { return o.inverse_size; }, [](int) { return 0.0f; },
        [](auto&... values) { ((values[0] = group_sum<kGeneralLanes>(values[0])), ...); },
        [&](auto&& add) {
          for (int i = lane; i < size; i += kGeneralLanes) {
            const int head = i / p.head_dim;
            const int at = i - head * p.head_dim;
            add(0, read_value<float>(o.x, p.dtype, begin.of[kX] + head * o.inner_strides[kX] + at * o.x_step));
          }
        });
    if (!live) continue;
    const auto normed = [&](A value, int parameter) {
      if (p.norm == RopeNorm::kNone) return value;
      float result = rounded_to(p.round_dtype, norms[0](p, static_cast<float>(value)));
      if (o.weight != nullptr) result *= read_value<float>(o.weight, o.weight_dtype, parameter) + p.weight_offset;
      if (o.bias != nullptr) {
        if (p.round_dtype != Dtype::kNone && p.round_norm) result = rounded_to(p.dtype, result);
        result = exact_add(result, read_value<float>(o.bias, o.bias_dtype, parameter));
      }
      return static_cast<A>(p.round_norm ? rounded_to(p.dtype, result) : result);
    };

    for (int head = 0; head < heads; ++head) {
      Offsets row = begin;
#pragma unroll
      for (int i = 0; i < kRopeStrides; ++i) row.of[i] += head * o.inner_strides[i];
      const int64_t position = row.of[kToken] - p.start;
      const bool rotates = turns(p, row.of[kToken]);
      AxisRows axes{};
      if (rotates && p.tables == RopeTables::kAxes) axes = axis_rows(p, o, row.of[kFirst] - o.first_shift, position);
      const int parameters = p.across ? head * p.head_dim : 0;
      for (int pair = lane; pair < pairs; pair += kGeneralLanes) {
        const int at_a = p.half ? pair : 2 * pair;
        const int at_b = p.half ? pair + pairs : 2 * pair + 1;
        A a = normed(read_value<A>(o.x, p.dtype, row.of[kX] + at_a * o.x_step), parameters + at_a);
        A b = normed(read_value<A>(o.x, p.dtype, row.of[kX] + at_b * o.x_step), parameters + at_b);
        if (rotates) {
          A cos_a, cos_b, sin_a, sin_b;
          if (p.tables == RopeTables::kFull) {
            const int64_t cos_row = row.of[kFirst] - o.first_shift;
            const int64_t sin_row = row.of[kSecond] - o.second_shift;
            cos_a = read_value<A>(o.cos[0], o.cos_dtype, cos_row + (o.compact_cos ? pair : at_a) * o.first_step);
            cos_b = read_value<A>(o.cos[0], o.cos_dtype, cos_row + (o.compact_cos ? pair : at_b) * o.first_step);
            sin_a = read_value<A>(o.sin[0], o.sin_dtype, sin_row + (o.compact_sin ? pair : at_a) * o.second_step);
            sin_b = read_value<A>(o.sin[0], o.sin_dtype, sin_row + (o.compact_sin ? pair : at_b) * o.second_step);
          } else {
            read_axis_angle(p, o, axes, static_cast<int>(row.of[kSecond]) + pair, &cos_a, &sin_a);
            cos_b = cos_a;
            sin_b = sin_a;
          }
          cos_a = round_value(each, p.dtype, cos_a);
          cos_b = round_value(each, p.dtype, cos_b);
          sin_a = round_value(each, p.dtype, sin_a);
          sin_b = round_value(each, p.dtype, sin_b);
          const A turned_a = exact_add(round_value(each, p.dtype, exact_mul(a, cos_a)),
                                       -round_value(each, p.dtype, exact_mul(b, sin_a)));
          const A turned_b = exact_add(round_value(each, p.dtype, exact_mul(b, cos_b)),
                                       round_value(each, p.dtype, exact_mul(a, sin_b)));
          a = turned_a;
          b = turned_b;
        }
        write_value(a, o.out, p.dtype, row.of[kOut] + at_a * o.out_step);
        write_value(b, o.out, p.dtype, row.of[kOut] + at_b * o.out_step);
      }
      for (int at = p.rotary + lane; at < p.head_dim; at += kGeneralLanes) {
        const A value = read_value<A>(o.x, p.dtype, row.of[kX] + at * o.x_step);
        write_value(normed(value, parameters + at), o.out, p.dtype, row.of[kOut] + at * o.out_step);
      }
    }
  }
}

}  // namespace
}  // namespace diffkern
