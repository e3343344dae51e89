// Chooses between the builds of rope_cpu.cpp. Compiled for the oldest CPU, like any code before the choice.
#include "../common/cpu_level.h"
#include "rope.h"

namespace diffkern {

namespace baseline {
void rope_cpu(const RopeParams& params, int operand, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void rope_cpu(const RopeParams& params, int operand, int64_t begin, int64_t end);
}
namespace avx512 {
void rope_cpu(const RopeParams& params, int operand, int64_t begin, int64_t end);
}
#endif

namespace {

auto choose() {
#if defined(__x86_64__)
  const CpuLevel level = cpu_level();
  if (level == CpuLevel::kAvx512) return avx512::rope_cpu;
  if (level == CpuLevel::kAvx2) return avx2::rope_cpu;
#endif
  return baseline::rope_cpu;
}

}  // namespace

void rope_cpu(const RopeParams& params, int operand, int64_t begin, int64_t end) {
  static const auto chosen = choose();
  chosen(params, operand, begin, end);
}

}  // namespace diffkern
