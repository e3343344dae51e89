// Chooses between the builds of norm_cpu.cpp. Compiled for the oldest CPU, like any code before the choice.
#include "norm.h"

namespace diffkern {

namespace baseline {
void norm_cpu(const NormParams& params, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void norm_cpu(const NormParams& params, int64_t begin, int64_t end);
}
namespace avx512 {
void norm_cpu(const NormParams& params, int64_t begin, int64_t end);
}
#endif

namespace {

auto choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512) return avx512::norm_cpu;
  if (has_avx2) return avx2::norm_cpu;
#endif
  return baseline::norm_cpu;
}

}  // namespace

void norm_cpu(const NormParams& params, int64_t begin, int64_t end) {
  static const auto chosen = choose();
  chosen(params, begin, end);
}

}  // namespace diffkern
