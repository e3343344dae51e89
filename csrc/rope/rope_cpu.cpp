// CPU kernel of rope, rope_3d and qk_norm_rope, compiled once per instruction set (DIFFKERN_CPU_LEVEL) and without
// fused multiply-add, since the rotation is promised to be that of a chain of torch ops.
//
// A row is a head. It is walked in short chunks until it is normalised, and turned as a whole then, with its angles as
// the elements lie in memory; rows that follow each other mostly have the same.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "rope.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

using Offsets = LeadingOffsets<kRopeStrides>;

// --- elements of any dtype, in the arithmetic A ----------------------------------------------------------

// Calls body(at, n) for chunks of a row.
template <typename Body>
void each_chunk(int size, Body&& body) {
  for (int at = 0; at < size; at += kChunk) body(at, std::min(kChunk, size - at));
}

template <typename A>
void read_chunk(const void* base, Dtype dtype, int64_t offset, int64_t step, int n, A* to) {
  if (dtype == Dtype::kFloat64) {
    const double* from = static_cast<const double*>(base) + offset;
    each(n, [&](int i) { to[i] = static_cast<A>(from[i * step]); });
  } else if constexpr (std::is_same_v<A, float>) {
    load(base, dtype, offset, step, n, to);
  } else {
    alignas(64) float buffer[kChunk];
    const float* narrow_values = floats(base, dtype, offset, step, n, buffer);
    each(n, [&](int i) { to[i] = narrow_values[i]; });
  }
}

// The elements in the arithmetic A: where they are, if they lie there so, or else in the buffer.
template <typename A>
const A* read(const void* base, Dtype dtype, int64_t offset, int64_t step, int n, A* buffer) {
  constexpr Dtype own = std::is_same_v<A, float> ? Dtype::kFloat32 : Dtype::kFloat64;
  if (dtype == own && step == 1) return static_cast<const A*>(base) + offset;
  each_chunk(n, [&](int at, int part) { read_chunk(base, dtype, offset + at * step, step, part, buffer + at); });
  return buffer;
}

template <typename A>
void write(const A* from, int n, void* base, Dtype dtype, int64_t offset, int64_t step) {
  each_chunk(n, [&](int at, int part) {
    const int64_t to = offset + at * step;
    if (dtype == Dtype::kFloat64) {
      double* place = static_cast<double*>(base) + to;
      for (int i = 0; i < part; ++i) place[i * step] = from[at + i];
    } else if constexpr (std::is_same_v<A, float>) {
      store(from + at, part, base, dtype, to, step);
    } else {
      alignas(64) float narrow_values[kChunk];  // from double to half by way of float, as torch does
      for (int i = 0; i < part; ++i) narrow_values[i] = static_cast<float>(from[at + i]);
      store(narrow_values, part, base, dtype, to, step);
    }
  });
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
        accumulate(floats(o.x, p.dtype, x + at * o.x_step, o.x_step, n, values), n, norm.mean, &sums);
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

// One chunk of a row, whose parameters begin at `at`.
template <typename A>
void normalise(const RopeParams& p, const RopeOperand& o, const Normaliser& norm, int64_t at, int n, const A* x,
               A* values) {
  alignas(64) A buffer[kChunk];
  const A mean = norm.mean, rest = norm.mean_rest, scale = norm.scale, offset = p.weight_offset;
  each(n, [&](int i) { values[i] = ((x[i] - mean) - rest) * scale; });
  round_to(p.round_dtype, values, n);
  if (o.weight != nullptr) {
    const A* weight = read(o.weight, o.weight_dtype, at, 1, n, buffer);
    each(n, [&](int i) { values[i] *= weight[i] + offset; });
  }
  if (o.bias != nullptr) {
    if (p.round_dtype != Dtype::kNone && p.round_norm) round_to(p.dtype, values, n);
    const A* bias = read(o.bias, o.bias_dtype, at, 1, n, buffer);
    each(n, [&](int i) { values[i] += bias[i]; });
  }
  if (p.round_norm) round_to(p.dtype, values, n);
}

// --- angles ----------------------------------------------------------------------------------------------

// Where the first of two elements that belong together is, and how far behind it the second.
struct Pairs {
  bool half;
  int count;

  int first(int pair) const { return half ? pair : 2 * pair; }
  int distance() const { return half ? count : 1; }
};

template <typename A>
void round_all(Dtype dtype, int size, A* values) {
  each_chunk(size, [&](int at, int n) { round_to(dtype, values + at, n); });
}

// Computes rows of one operand, one after the other.
template <typename A>
class Rows {
 public:
  Rows(const RopeParams& p, const RopeOperand& o)
      : p_(p),
        o_(o),
        pairs_{p.half, p.rotary / 2},
        values_(p.head_dim),
        turned_(p.head_dim),
        products_(p.rotary),
        cos_buffer_(p.rotary),
        sin_buffer_(p.rotary) {}

  void compute(int64_t begin, int64_t end) {
    int64_t last = -1;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t outer = p_.across ? unit : unit / o_.inner;
      const int64_t first = p_.across ? 0 : unit - outer * o_.inner;
      const int64_t rows = p_.across ? o_.inner : 1;
      const Offsets offsets = inner_row(o_, locate(o_.outer, outer), first);
      const Normaliser norm = normaliser_of(p_, o_, offsets, rows);
      for (int64_t row = 0; row < rows; ++row) {
        const Offsets place = inner_row(o_, offsets, row);
        if (!(o_.shared() && outer == last)) read_angles(place);
        last = outer;
        compute_row(norm, place, p_.across ? (first + row) * p_.head_dim : 0);
      }
    }
  }

 private:
  void compute_row(const Normaliser& norm, const Offsets& row, int64_t parameters) {
    const A* x = read(o_.x, p_.dtype, row.of[kX], o_.x_step, p_.head_dim, values_.data());
    if (p_.norm != RopeNorm::kNone) {
      each_chunk(p_.head_dim, [&](int at, int n) {
        normalise(p_, o_, norm, parameters + at, n, x + at, values_.data() + at);
      });
      x = values_.data();
    }
    if (turns_) {
      rotate(x);
      std::copy(x + p_.rotary, x + p_.head_dim, turned_.data() + p_.rotary);
      x = turned_.data();
    }
    write(x, p_.head_dim, o_.out, p_.dtype, row.of[kOut], o_.out_step);
  }

  // The products and their sum apart: at once, GCC 12 makes one rounding of a product and a sum, whatever it is told.
  void rotate(const A* x) {
    const A *cos = cos_, *sin = sin_;
    A *turned = turned_.data(), *products = products_.data();
    const int distance = pairs_.distance();
    each(p_.rotary, [&](int i) { turned[i] = x[i] * cos[i]; });
    if (p_.half) {
      each(distance, [&](int i) { products[i] = -(x[i + distance] * sin[i]); });
      each(distance, [&](int i) { products[i + distance] = x[i] * sin[i + distance]; });
    } else {
      each(pairs_.count, [&](int i) {
        products[2 * i] = -(x[2 * i + 1] * sin[2 * i]);
        products[2 * i + 1] = x[2 * i] * sin[2 * i + 1];
      });
    }
    if (p_.arithmetic == RopeArithmetic::kInput) {
      round_all(p_.dtype, p_.rotary, turned);
      round_all(p_.dtype, p_.rotary, products);
    }
    each(p_.rotary, [&](int i) { turned[i] += products[i]; });
  }

  // Sets whether a row turns, and the cosine and sine of each of its elements.
  void read_angles(const Offsets& row) {
    const int64_t position = row.of[kToken] - p_.start;
    turns_ = p_.tables != RopeTables::kNone && (!p_.partial || (position >= 0 && position < p_.length));
    if (!turns_) return;
    if (p_.tables == RopeTables::kFull) {
      cos_ = read_table(o_.cos[0], o_.cos_dtype, row.of[kFirst] - o_.first_shift, o_.first_step, o_.compact_cos,
                        cos_buffer_.data());
      sin_ = read_table(o_.sin[0], o_.sin_dtype, row.of[kSecond] - o_.second_shift, o_.second_step, o_.compact_sin,
                        sin_buffer_.data());
    } else {
      read_axes(row, axis_rows(p_, o_, row.of[kFirst] - o_.first_shift, position));
      cos_ = cos_buffer_.data();
      sin_ = sin_buffer_.data();
    }
    if (p_.arithmetic == RopeArithmetic::kInput) {
      cos_ = rounded(cos_, cos_buffer_.data());
      sin_ = rounded(sin_, sin_buffer_.data());
    }
  }

  const A* read_table(const void* base, Dtype dtype, int64_t offset, int64_t step, bool compact, A* buffer) {
    if (!compact) return read(base, dtype, offset, step, p_.rotary, buffer);
    const A* angles = read(base, dtype, offset, step, pairs_.count, turned_.data());
    for (int pair = 0; pair < pairs_.count; ++pair) set(buffer, pair, angles[pair]);
    return buffer;
  }

  void read_axes(const Offsets& row, const AxisRows& axes) {
    for (int pair = 0; pair < pairs_.count; ++pair) {
      const int index = static_cast<int>(row.of[kSecond]) + pair - p_.front_pad;
      A cos = 1, sin = 0;
      if (index >= 0) {
        const AxisColumn place = axis_column(p_, index);
        const int64_t at = axes.at[place.axis];
        cos = sin = std::numeric_limits<A>::quiet_NaN();
        if (at >= 0) {
          cos = *read(o_.cos[place.axis], o_.cos_dtype, at + place.column, 1, 1, &cos);
          sin = *read(o_.sin[place.axis], o_.sin_dtype, at + place.column, 1, 1, &sin);
        }
      }
      set(cos_buffer_.data(), pair, cos);
      set(sin_buffer_.data(), pair, sin);
    }
  }

  void set(A* angles, int pair, A angle) {
    angles[pairs_.first(pair)] = angles[pairs_.first(pair) + pairs_.distance()] = angle;
  }

  const A* rounded(const A* angles, A* buffer) {
    if (angles != buffer) std::copy_n(angles, p_.rotary, buffer);
    round_all(p_.dtype, p_.rotary, buffer);
    return buffer;
  }

  const RopeParams& p_;
  const RopeOperand& o_;
  const Pairs pairs_;
  bool turns_ = false;
  const A* cos_ = nullptr;
  const A* sin_ = nullptr;
  std::vector<A> values_;
  std::vector<A> turned_;
  std::vector<A> products_;
  std::vector<A> cos_buffer_;
  std::vector<A> sin_buffer_;
};

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void rope_cpu(const RopeParams& p, int operand, int64_t begin, int64_t end) {
  if (p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64) {
    Rows<double>(p, p.operands[operand]).compute(begin, end);
  } else {
    Rows<float>(p, p.operands[operand]).compute(begin, end);
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
