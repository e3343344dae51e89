// CPU kernel of rope, rope_3d and qk_norm_rope, compiled once per instruction set (DIFFKERN_CPU_LEVEL) and without
// fused multiply-add, since the rotation is promised to be that of a chain of torch ops.
//
// Rows are walked in chunks of pairs. The first and the second elements of the pairs lie in buffers of their own,
// so that each step is one plain loop, whatever the pairing and the dtypes are.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "rope.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

constexpr int kPairs = kChunk / 2;  // pairs in a chunk

using Offsets = LeadingOffsets<kRopeStrides>;

// --- elements of any dtype, in the arithmetic A ----------------------------------------------------------

template <typename A>
void read(const void* base, Dtype dtype, int64_t offset, int64_t step, int n, A* to) {
  if (dtype == Dtype::kFloat64) {
    const double* from = static_cast<const double*>(base) + offset;
    for (int i = 0; i < n; ++i) to[i] = static_cast<A>(from[i * step]);
  } else if constexpr (std::is_same_v<A, float>) {
    load(base, dtype, offset, step, n, to);
  } else {
    alignas(64) float narrow_values[kChunk];
    load(base, dtype, offset, step, n, narrow_values);
    for (int i = 0; i < n; ++i) to[i] = narrow_values[i];
  }
}

template <typename A>
void write(const A* from, int n, void* base, Dtype dtype, int64_t offset, int64_t step) {
  if (dtype == Dtype::kFloat64) {
    double* to = static_cast<double*>(base) + offset;
    for (int i = 0; i < n; ++i) to[i * step] = from[i];
  } else if constexpr (std::is_same_v<A, float>) {
    store(from, n, base, dtype, offset, step);
  } else {
    alignas(64) float narrow_values[kChunk];  // from double to half by way of float, as torch does
    for (int i = 0; i < n; ++i) narrow_values[i] = static_cast<float>(from[i]);
    store(narrow_values, n, base, dtype, offset, step);
  }
}

// The two elements of pairs [pair, pair + n) of a row of `rotary` elements that begins at `offset`.
template <typename A>
void read_pairs(const void* base, Dtype dtype, int64_t offset, int64_t step, bool half, int rotary, int pair, int n,
                A* first, A* second) {
  if (half) {
    read(base, dtype, offset + pair * step, step, n, first);
    read(base, dtype, offset + (rotary / 2 + pair) * step, step, n, second);
    return;
  }
  alignas(64) A both[kChunk];
  read(base, dtype, offset + 2 * pair * step, step, 2 * n, both);
  for (int i = 0; i < n; ++i) {
    first[i] = both[2 * i];
    second[i] = both[2 * i + 1];
  }
}

template <typename A>
void write_pairs(const A* first, const A* second, void* base, Dtype dtype, int64_t offset, int64_t step, bool half,
                 int rotary, int pair, int n) {
  if (half) {
    write(first, n, base, dtype, offset + pair * step, step);
    write(second, n, base, dtype, offset + (rotary / 2 + pair) * step, step);
    return;
  }
  alignas(64) A both[kChunk];
  for (int i = 0; i < n; ++i) {
    both[2 * i] = first[i];
    both[2 * i + 1] = second[i];
  }
  write(both, 2 * n, base, dtype, offset + 2 * pair * step, step);
}

void round_to(Dtype dtype, double* values, int n) {
  if (dtype != Dtype::kFloat16 && dtype != Dtype::kBFloat16) return;
  float narrow_values[kChunk] = {};
  for (int i = 0; i < n; ++i) narrow_values[i] = static_cast<float>(values[i]);
  round_to(dtype, narrow_values, n);
  for (int i = 0; i < n; ++i) values[i] = narrow_values[i];
}

// --- norm ------------------------------------------------------------------------------------------------

// The normalised value is ((x - mean) - mean_rest) * scale. What rounding left out of the mean comes to light as
// the mean of x - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean = 0.0f;
  float mean_rest = 0.0f;
  float scale = 1.0f;
};

Offsets inner_row(const RopeOperand& o, Offsets offsets, int64_t index) {
  for (int i = 0; i < kRopeStrides; ++i) offsets.of[i] += index * o.inner_strides[i];
  return offsets;
}

// Over `rows` rows of the innermost loop, the first of which is at `offsets`.
Normaliser normaliser_of(const RopeParams& p, const RopeOperand& o, const Offsets& offsets, int64_t rows) {
  Normaliser norm;
  if (p.norm == RopeNorm::kNone) return norm;
  const double size = static_cast<double>(rows) * p.head_dim;
  Sums sums;
  const auto sum = [&] {
    alignas(64) float values[kChunk];
    sums = Sums{};
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t x = offsets.of[kX] + row * o.inner_strides[kX];
      for (int at = 0; at < p.head_dim; at += kChunk) {
        const int n = std::min(kChunk, p.head_dim - at);
        load(o.x, p.dtype, x + at * o.x_step, o.x_step, n, values);
        for (int i = 0; i < n; ++i) values[i] -= norm.mean;
        accumulate(values, n, &sums);
      }
    }
  };
  sum();
  if (p.norm == RopeNorm::kLayer) {
    norm.mean = static_cast<float>(sums.plain / size);
    sum();
    const double rest = sums.plain / size;
    norm.mean_rest = static_cast<float>(rest);
    sums.squares -= rest * sums.plain;
  }
  norm.scale = static_cast<float>(1.0 / std::sqrt(sums.squares / size + static_cast<double>(p.eps)));
  return norm;
}

// Where the parameters of some elements are: a run in weight and bias.
struct ParameterRun {
  int64_t at;
  int64_t step;
};

template <typename A>
void normalise(const RopeParams& p, const RopeOperand& o, const Normaliser& norm, ParameterRun run, int n, A* values) {
  alignas(64) A params[kChunk];
  const A mean = norm.mean, rest = norm.mean_rest, scale = norm.scale, offset = p.weight_offset;
  for (int i = 0; i < n; ++i) values[i] = ((values[i] - mean) - rest) * scale;
  round_to(p.round_dtype, values, n);
  if (o.weight != nullptr) {
    read(o.weight, o.weight_dtype, run.at, run.step, n, params);
    for (int i = 0; i < n; ++i) values[i] *= params[i] + offset;
  }
  if (o.bias != nullptr) {
    if (p.round_dtype != Dtype::kNone && p.round_norm) round_to(p.dtype, values, n);
    read(o.bias, o.bias_dtype, run.at, run.step, n, params);
    for (int i = 0; i < n; ++i) values[i] += params[i];
  }
  if (p.round_norm) round_to(p.dtype, values, n);
}

// --- angles ----------------------------------------------------------------------------------------------

// The angles of a chunk of pairs, for the first and for the second element of each.
template <typename A>
struct Angles {
  alignas(64) A cos_a[kPairs];
  alignas(64) A cos_b[kPairs];
  alignas(64) A sin_a[kPairs];
  alignas(64) A sin_b[kPairs];
};

template <typename A>
A table_value(const void* base, Dtype dtype, int64_t at) {
  A value;
  read(base, dtype, at, 1, 1, &value);
  return value;
}

template <typename A>
void read_full(const RopeParams& p, const void* base, Dtype dtype, int64_t offset, int64_t step, bool compact, int pair,
               int n, A* first, A* second) {
  if (!compact) return read_pairs(base, dtype, offset, step, p.half, p.rotary, pair, n, first, second);
  read(base, dtype, offset + pair * step, step, n, first);
  std::copy_n(first, n, second);
}

template <typename A>
void read_angles(const RopeParams& p, const RopeOperand& o, const Offsets& row, const AxisRows& axes, int pair, int n,
                 Angles<A>* angles) {
  if (p.tables == RopeTables::kFull) {
    read_full(p, o.cos[0], o.cos_dtype, row.of[kFirst] - o.first_shift, o.first_step, o.compact_cos, pair, n,
              angles->cos_a, angles->cos_b);
    read_full(p, o.sin[0], o.sin_dtype, row.of[kSecond] - o.second_shift, o.second_step, o.compact_sin, pair, n,
              angles->sin_a, angles->sin_b);
  } else {
    for (int i = 0; i < n; ++i) {
      const int index = static_cast<int>(row.of[kSecond]) + pair + i - p.front_pad;
      A cos = 1, sin = 0;
      if (index >= 0) {
        const AxisColumn place = axis_column(p, index);
        const int64_t at = axes.at[place.axis];
        cos = sin = std::numeric_limits<A>::quiet_NaN();
        if (at >= 0) {
          cos = table_value<A>(o.cos[place.axis], o.cos_dtype, at + place.column);
          sin = table_value<A>(o.sin[place.axis], o.sin_dtype, at + place.column);
        }
      }
      angles->cos_a[i] = angles->cos_b[i] = cos;
      angles->sin_a[i] = angles->sin_b[i] = sin;
    }
  }
  if (p.arithmetic == RopeArithmetic::kInput) {
    for (A* values : {angles->cos_a, angles->cos_b, angles->sin_a, angles->sin_b}) round_to(p.dtype, values, n);
  }
}

// --- rows ------------------------------------------------------------------------------------------------

template <typename A>
void rotate(const RopeParams& p, const Angles<A>& angles, int n, A* a, A* b) {
  alignas(64) A by_cos_a[kPairs];
  alignas(64) A by_cos_b[kPairs];
  alignas(64) A by_sin_a[kPairs];
  alignas(64) A by_sin_b[kPairs];
  for (int i = 0; i < n; ++i) {
    by_cos_a[i] = a[i] * angles.cos_a[i];
    by_sin_a[i] = b[i] * angles.sin_a[i];
    by_cos_b[i] = b[i] * angles.cos_b[i];
    by_sin_b[i] = a[i] * angles.sin_b[i];
  }
  if (p.arithmetic == RopeArithmetic::kInput) {
    for (A* values : {by_cos_a, by_sin_a, by_cos_b, by_sin_b}) round_to(p.dtype, values, n);
  }
  for (int i = 0; i < n; ++i) {
    a[i] = by_cos_a[i] - by_sin_a[i];
    b[i] = by_cos_b[i] + by_sin_b[i];
  }
}

// Row `index` of the innermost loop, which begins at `row`.
template <typename A>
void compute_row(const RopeParams& p, const RopeOperand& o, const Normaliser& norm, const Offsets& row, int64_t index) {
  const int64_t position = row.of[kToken] - p.start;
  const bool turns = p.tables != RopeTables::kNone && (!p.partial || (position >= 0 && position < p.length));
  const bool normed = p.norm != RopeNorm::kNone;
  const int64_t parameters = p.across ? index * p.head_dim : 0;
  AxisRows axes{};
  if (turns && p.tables == RopeTables::kAxes) axes = axis_rows(p, o, row.of[kFirst] - o.first_shift, position);

  alignas(64) A a[kChunk];
  alignas(64) A b[kPairs];
  Angles<A> angles;
  for (int pair = 0; pair < p.rotary / 2; pair += kPairs) {
    const int n = std::min(kPairs, p.rotary / 2 - pair);
    read_pairs(o.x, p.dtype, row.of[kX], o.x_step, p.half, p.rotary, pair, n, a, b);
    if (normed) {
      const int64_t step = p.half ? 1 : 2;
      const int64_t first = parameters + pair * step;
      normalise(p, o, norm, {first, step}, n, a);
      normalise(p, o, norm, {p.half ? first + p.rotary / 2 : first + 1, step}, n, b);
    }
    if (turns) {
      read_angles(p, o, row, axes, pair, n, &angles);
      rotate(p, angles, n, a, b);
    }
    write_pairs(a, b, o.out, p.dtype, row.of[kOut], o.out_step, p.half, p.rotary, pair, n);
  }
  for (int at = p.rotary; at < p.head_dim; at += kChunk) {
    const int n = std::min(kChunk, p.head_dim - at);
    read(o.x, p.dtype, row.of[kX] + at * o.x_step, o.x_step, n, a);
    if (normed) normalise(p, o, norm, {parameters + at, 1}, n, a);
    write(a, n, o.out, p.dtype, row.of[kOut] + at * o.out_step, o.out_step);
  }
}

template <typename A>
void compute(const RopeParams& p, const RopeOperand& o, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t outer = p.across ? unit : unit / o.inner;
    const int64_t first = p.across ? 0 : unit - outer * o.inner;
    const int64_t rows = p.across ? o.inner : 1;
    const Offsets offsets = inner_row(o, locate(o.outer, outer), first);
    const Normaliser norm = normaliser_of(p, o, offsets, rows);
    for (int64_t row = 0; row < rows; ++row) compute_row<A>(p, o, norm, inner_row(o, offsets, row), first + row);
  }
}

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void rope_cpu(const RopeParams& p, int operand, int64_t begin, int64_t end) {
  if (p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64) {
    compute<double>(p, p.operands[operand], begin, end);
  } else {
    compute<float>(p, p.operands[operand], begin, end);
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
