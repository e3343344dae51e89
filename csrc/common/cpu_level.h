// Which of the builds of a CPU source this processor can run. For sources compiled for the oldest one.
#pragma once

namespace diffkern {

enum class CpuLevel { kBaseline, kAvx2, kAvx512 };

inline CpuLevel cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512) return CpuLevel::kAvx512;
  if (has_avx2) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kBaseline;
}

}  // namespace diffkern
