// Chooses between the builds of activation_cpu.cpp. Compiled for the oldest CPU, like any code before the choice.
#include "../common/cpu_level.h"
#include "activation.h"

namespace diffkern {

namespace baseline {
void activation_cpu(const ActivationParams& params, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void activation_cpu(const ActivationParams& params, int64_t begin, int64_t end);
}
namespace avx512 {
void activation_cpu(const ActivationParams& params, int64_t begin, int64_t end);
}
#endif

namespace {

auto choose() {
#if defined(__x86_64__)
  const CpuLevel level = cpu_level();
  if (level == CpuLevel::kAvx512) return avx512::activation_cpu;
  if (level == CpuLevel::kAvx2) return avx2::activation_cpu;
#endif
  return baseline::activation_cpu;
}

}  // namespace

void activation_cpu(const ActivationParams& params, int64_t begin, int64_t end) {
  static const auto chosen = choose();
  chosen(params, begin, end);
}

}  // namespace diffkern
