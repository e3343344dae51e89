// CPU kernel for modulated norms and gated residuals, compiled once per instruction set (DIFFKERN_CPU_LEVEL)
// and without fused multiply-add, since products and sums are promised to be those of a chain of torch ops.
//
// Rows are walked in short chunks that are widened to float32 in a buffer of the first-level cache, so
// that each step is one plain loop over floats, whatever the dtypes are.
#include <algorithm>
#include <cmath>

#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "modulate.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

using Offsets = LeadingOffsets<kMappedOperands>;

void load(const Operand& operand, int64_t row, int64_t at, int n, float* to) {
  load(operand.data, operand.dtype, row + at * operand.stride, operand.stride, n, to);
}

void activate(GateActivation activation, int n, float* values) {
  if (activation == GateActivation::kTanh) {
    for (int i = 0; i < n; ++i) values[i] = std::tanh(values[i]);
  } else if (activation == GateActivation::kSigmoid) {
    for (int i = 0; i < n; ++i) values[i] = 1.0f / (1.0f + std::exp(-values[i]));
  }
}

// One chunk of x, or of the new residual, which is also stored.
void load_input(const ModulateParams& p, const Offsets& row, int64_t at, int n, float* values) {
  alignas(64) float others[kChunk];
  load(p.x, row.of[kX], at, n, values);
  if (p.residual.data == nullptr) return;
  if (p.gate.data != nullptr) {
    load(p.gate, row.of[kGate], at, n, others);
    activate(p.activation, n, others);
    round_to(p.gate_round, others, n);
    for (int i = 0; i < n; ++i) values[i] *= others[i];
    round_to(p.gated_round, values, n);
  }
  load(p.residual, row.of[kResidual], at, n, others);
  for (int i = 0; i < n; ++i) values[i] += others[i];
  round_to(p.sum_round, values, n);
  store(values, n, p.new_residual, p.new_dtype, row.of[kOut] + at, 1);
  round_to(p.new_dtype, values, n);
}

// The normalised value is ((v - mean) - mean_rest) * factor. What rounding left out of the mean comes to
// light as the mean of v - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean = 0.0f;
  float mean_rest = 0.0f;
  float factor = 1.0f;
};

// Modulates one normalised chunk, and stores it.
void finish(const ModulateParams& p, const Offsets& row, int64_t at, int n, float* values) {
  alignas(64) float others[kChunk];
  if (p.weight.data != nullptr) {
    load(p.weight, 0, at, n, others);
    for (int i = 0; i < n; ++i) values[i] *= others[i];
  }
  if (p.bias.data != nullptr) {
    load(p.bias, 0, at, n, others);
    for (int i = 0; i < n; ++i) values[i] += others[i];
  }
  round_to(p.norm_round, values, n);
  if (p.scale.data != nullptr) {
    load(p.scale, row.of[kScale], at, n, others);
    for (int i = 0; i < n; ++i) others[i] += p.scale_offset;
    round_to(p.scale_round, others, n);
    for (int i = 0; i < n; ++i) values[i] *= others[i];
    round_to(p.product_round, values, n);
  }
  if (p.shift.data != nullptr) {
    load(p.shift, row.of[kShift], at, n, others);
    for (int i = 0; i < n; ++i) values[i] += others[i];
    round_to(p.modulated_round, values, n);
  }
  store(values, n, p.out, p.out_dtype, row.of[kOut] + at, 1);
}

void modulate_row(const ModulateParams& p, const Offsets& row) {
  alignas(64) float values[kChunk];
  const auto each_chunk = [&](auto&& body) {
    for (int64_t at = 0; at < p.size; at += kChunk) {
      body(at, static_cast<int>(std::min<int64_t>(kChunk, p.size - at)));
    }
  };
  if (p.out == nullptr || p.norm == NormKind::kNone) {
    each_chunk([&](int64_t at, int n) {
      load_input(p, row, at, n, values);
      if (p.out != nullptr) finish(p, row, at, n, values);
    });
    return;
  }

  // From the second pass on the new residual is there to be read.
  const Operand input = p.residual.data == nullptr ? p.x : Operand{p.new_residual, p.new_dtype, 1, false};
  const int64_t input_row = p.residual.data == nullptr ? row.of[kX] : row.of[kOut];
  const double size = static_cast<double>(p.size);
  Normaliser norm;
  Sums sums;
  each_chunk([&](int64_t at, int n) {
    load_input(p, row, at, n, values);
    accumulate(values, n, &sums);
  });
  if (p.norm == NormKind::kLayer) {
    norm.mean = static_cast<float>(sums.plain / size);
    sums = Sums{};
    each_chunk([&](int64_t at, int n) {
      load(input, input_row, at, n, values);
      for (int i = 0; i < n; ++i) values[i] -= norm.mean;
      accumulate(values, n, &sums);
    });
    const double rest = sums.plain / size;
    norm.mean_rest = static_cast<float>(rest);
    sums.squares -= rest * sums.plain;
  }
  norm.factor = static_cast<float>(1.0 / std::sqrt(sums.squares / size + static_cast<double>(p.eps)));
  each_chunk([&](int64_t at, int n) {
    load(input, input_row, at, n, values);
    for (int i = 0; i < n; ++i) values[i] = ((values[i] - norm.mean) - norm.mean_rest) * norm.factor;
    finish(p, row, at, n, values);
  });
}

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void modulate_cpu(const ModulateParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) modulate_row(p, locate(p.map, row));
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
