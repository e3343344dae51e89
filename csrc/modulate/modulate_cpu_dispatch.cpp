// Chooses between the builds of modulate_cpu.cpp. Compiled for the oldest CPU, like any code before the choice.
#include "../common/cpu_level.h"
#include "modulate.h"

namespace diffkern {

namespace baseline {
void modulate_cpu(const ModulateParams& params, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void modulate_cpu(const ModulateParams& params, int64_t begin, int64_t end);
}
namespace avx512 {
void modulate_cpu(const ModulateParams& params, int64_t begin, int64_t end);
}
#endif

namespace {

auto choose() {
#if defined(__x86_64__)
  const CpuLevel level = cpu_level();
  if (level == CpuLevel::kAvx512) return avx512::modulate_cpu;
  if (level == CpuLevel::kAvx2) return avx2::modulate_cpu;
#endif
  return baseline::modulate_cpu;
}

}  // namespace

void modulate_cpu(const ModulateParams& params, int64_t begin, int64_t end) {
  static const auto chosen = choose();
  chosen(params, begin, end);
}

}  // namespace diffkern
