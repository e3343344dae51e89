// CPU kernel for modulated norms and gated residuals, compiled once per instruction set (DIFFKERN_CPU_LEVEL)
// and without fused multiply-add, since products and sums are promised to be those of a chain of torch ops.
//
// Rows are walked in short chunks that are widened to float32 in a buffer of the first-level cache, so
// that each step is one plain loop over floats, whatever the dtypes are.
#include <algorithm>
#include <cmath>

#include "../common/cpu_activation.h"
#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "modulate.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

using Offsets = LeadingOffsets<kMappedOperands>;

const float* floats(const Operand& operand, int64_t row, int64_t at, int n, float* buffer) {
  return floats(operand.data, operand.dtype, row + at * operand.stride, operand.stride, n, buffer);
}

// What stands for an operand that is absent, and changes no bit: a factor of 1, a term of -0.
struct Constants {
  alignas(64) float ones[kChunk];
  alignas(64) float zeros[kChunk];

  Constants() {
    std::fill_n(ones, kChunk, 1.0f);
    std::fill_n(zeros, kChunk, -0.0f);
  }
};
const Constants kAbsent;

const float* factors(const Operand& operand, int64_t row, int64_t at, int n, float* buffer) {
  return operand.data == nullptr ? kAbsent.ones : floats(operand, row, at, n, buffer);
}

const float* terms(const Operand& operand, int64_t row, int64_t at, int n, float* buffer) {
  return operand.data == nullptr ? kAbsent.zeros : floats(operand, row, at, n, buffer);
}

void activate(GateActivation activation, const float* gate, int n, float* values) {
  if (activation == GateActivation::kTanh) {
    each(n, [&](int i) { values[i] = std::tanh(gate[i]); });
  } else {
    each(n, [&](int i) { values[i] = sigmoid_product(1.0f, gate[i]); });
  }
}

// One chunk of x, or of the new residual, which is also stored.
const float* load_input(const ModulateParams& p, const Offsets& row, int64_t at, int n, float* buffer) {
  alignas(64) float gates[kChunk];
  alignas(64) float others[kChunk];
  const float* x = floats(p.x, row.of[kX], at, n, buffer);
  if (p.residual.data == nullptr) return x;
  const float* gate = factors(p.gate, row.of[kGate], at, n, gates);
  if (p.gate.data != nullptr && p.activation != GateActivation::kNone) {
    activate(p.activation, gate, n, gates);
    round_to(p.gate_round, gates, n);
    gate = gates;
  }
  const float* residual = floats(p.residual, row.of[kResidual], at, n, others);
  float* values = room(p.new_residual, p.new_dtype, row.of[kNew] + at, 1, buffer);
  if (p.round_each) {
    each(n, [&](int i) { values[i] = x[i] * gate[i]; });
    round_to(p.gated_round, values, n);
    each(n, [&](int i) { values[i] = residual[i] + values[i]; });
    round_to(p.sum_round, values, n);
  } else {
    each(n, [&](int i) { values[i] = residual[i] + x[i] * gate[i]; });
  }
  store(values, n, p.new_residual, p.new_dtype, row.of[kNew] + at, 1);
  round_to(p.new_dtype, values, n);
  return values;
}

// The normalised value is ((v - mean) - mean_rest) * factor. What rounding left out of the mean comes to
// light as the mean of v - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean = 0.0f;
  float mean_rest = 0.0f;
  float factor = 1.0f;
};

// Normalises and modulates one chunk, and stores it.
void finish(const ModulateParams& p, const Offsets& row, const Normaliser& norm, int64_t at, int n, const float* from) {
  alignas(64) float buffer[kChunk], weights[kChunk], biases[kChunk], scales[kChunk], shifts[kChunk];
  float* values = room(p.out, p.out_dtype, row.of[kOut] + at, 1, buffer);
  const float* weight = factors(p.weight, 0, at, n, weights);
  const float* bias = terms(p.bias, 0, at, n, biases);
  const float* scale = factors(p.scale, row.of[kScale], at, n, scales);
  const float* shift = terms(p.shift, row.of[kShift], at, n, shifts);
  const float offset = p.scale.data == nullptr ? -0.0f : p.scale_offset;
  const auto normalised = [&, mean = norm.mean, rest = norm.mean_rest, factor = norm.factor](int i) {
    return ((from[i] - mean) - rest) * factor * weight[i] + bias[i];
  };
  if (p.round_each) {
    each(n, [&](int i) { values[i] = normalised(i); });
    round_to(p.norm_round, values, n);
    each(n, [&](int i) { scales[i] = scale[i] + offset; });
    round_to(p.scale_round, scales, n);
    each(n, [&](int i) { values[i] *= scales[i]; });
    round_to(p.product_round, values, n);
    each(n, [&](int i) { values[i] += shift[i]; });
    round_to(p.modulated_round, values, n);
  } else {
    each(n, [&](int i) { values[i] = normalised(i) * (scale[i] + offset) + shift[i]; });
  }
  store(values, n, p.out, p.out_dtype, row.of[kOut] + at, 1);
}

void modulate_row(const ModulateParams& p, const Offsets& row) {
  alignas(64) float buffer[kChunk];
  const auto each_chunk = [&](auto&& body) {
    for (int64_t at = 0; at < p.size; at += kChunk) {
      body(at, static_cast<int>(std::min<int64_t>(kChunk, p.size - at)));
    }
  };
  Normaliser norm;
  if (p.out == nullptr || p.norm == NormKind::kNone) {
    each_chunk([&](int64_t at, int n) {
      const float* values = load_input(p, row, at, n, buffer);
      if (p.out != nullptr) finish(p, row, norm, at, n, values);
    });
    return;
  }

  // From the second pass on the new residual is there to be read.
  const Operand input = p.residual.data == nullptr ? p.x : Operand{p.new_residual, p.new_dtype, 1, false};
  const int64_t input_row = p.residual.data == nullptr ? row.of[kX] : row.of[kNew];
  const double size = static_cast<double>(p.size);
  Sums sums;
  if (p.norm == NormKind::kRms) {
    each_chunk([&](int64_t at, int n) { accumulate(load_input(p, row, at, n, buffer), n, 0.0f, &sums); });
  } else {
    each_chunk([&](int64_t at, int n) { accumulate<false>(load_input(p, row, at, n, buffer), n, 0.0f, &sums); });
    norm.mean = static_cast<float>(sums.plain / size);
    sums = Sums{};
    each_chunk([&](int64_t at, int n) { accumulate(floats(input, input_row, at, n, buffer), n, norm.mean, &sums); });
    const double rest = sums.plain / size;
    norm.mean_rest = static_cast<float>(rest);
    sums.squares -= rest * sums.plain;
  }
  norm.factor = static_cast<float>(1.0 / std::sqrt(sums.squares / size + static_cast<double>(p.eps)));
  each_chunk([&](int64_t at, int n) { finish(p, row, norm, at, n, floats(input, input_row, at, n, buffer)); });
}

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void modulate_cpu(const ModulateParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) modulate_row(p, locate(p.map, row));
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
