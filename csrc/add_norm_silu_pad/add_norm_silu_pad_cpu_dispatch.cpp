// Chooses between the builds of add_norm_silu_pad_cpu.cpp. Compiled for the oldest CPU, like any code before the choice.
#include "../common/cpu_level.h"
#include "add_norm_silu_pad.h"

namespace diffkern {

namespace baseline {
void add_norm_silu_pad_cpu(const AddNormSiluPadParams& params, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void add_norm_silu_pad_cpu(const AddNormSiluPadParams& params, int64_t begin, int64_t end);
}
namespace avx512 {
void add_norm_silu_pad_cpu(const AddNormSiluPadParams& params, int64_t begin, int64_t end);
}
#endif

namespace {

auto choose() {
#if defined(__x86_64__)
  const CpuLevel level = cpu_level();
  if (level == CpuLevel::kAvx512) return avx512::add_norm_silu_pad_cpu;
  if (level == CpuLevel::kAvx2) return avx2::add_norm_silu_pad_cpu;
#endif
  return baseline::add_norm_silu_pad_cpu;
}

}  // namespace

void add_norm_silu_pad_cpu(const AddNormSiluPadParams& params, int64_t begin, int64_t end) {
  static const auto chosen = choose();
  chosen(params, begin, end);
}

}  // namespace diffkern
