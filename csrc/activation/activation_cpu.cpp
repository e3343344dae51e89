// CPU kernels for activations and gated units, compiled once per instruction set (DIFFKERN_CPU_LEVEL).
#include <algorithm>

#include "../common/cpu_activation.h"
#include "../common/cpu_elements.h"
#include "activation.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace DIFFKERN_CPU_LEVEL {

void activation_cpu(const ActivationParams& p, int64_t begin, int64_t end) {
  alignas(64) float values[kChunk];
  alignas(64) float factors[kChunk];
  const int64_t pieces = ceil_div(p.size, kPieceSize);
  for (int64_t piece = begin; piece < end; ++piece) {
    const auto run = locate(p.runs, piece / pieces);
    const int64_t first = piece % pieces * kPieceSize;
    const int64_t last = std::min(first + kPieceSize, p.size);
    for (int64_t at = first; at < last; at += kChunk) {
      const int n = static_cast<int>(std::min<int64_t>(kChunk, last - at));
      load(p.gate, p.gate_dtype, run.of[kGate] + at * p.steps[kGate], p.steps[kGate], n, values);
      apply(p.activation, values, n);
      if (p.value != nullptr) {
        if (p.round_activation) round_to(p.gate_dtype, values, n);
        const float* value =
            floats(p.value, p.value_dtype, run.of[kValue] + at * p.steps[kValue], p.steps[kValue], n, factors);
        each(n, [&](int i) { values[i] *= value[i]; });
      }
      store(values, n, p.out, p.out_dtype, run.of[kOut] + at * p.steps[kOut], p.steps[kOut]);
    }
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
