// Chooses between the builds of group_norm_cpu.cpp. Compiled for the oldest CPU, like any code before the choice.
#include "../common/cpu_level.h"
#include "group_norm.h"

namespace diffkern {

#define DIFFKERN_DECLARE(level)                                                                  \
  namespace level {                                                                              \
  void group_norm_statistics_cpu(const GroupNormParams& params, int64_t begin, int64_t end);     \
  void group_norm_merge_cpu(const GroupNormParams& params);                                      \
  void group_norm_normalise_cpu(const GroupNormParams& params, int64_t begin, int64_t end);      \
  }

DIFFKERN_DECLARE(baseline)
#if defined(__x86_64__)
DIFFKERN_DECLARE(avx2)
DIFFKERN_DECLARE(avx512)
#endif

namespace {

struct Kernels {
  decltype(&baseline::group_norm_statistics_cpu) statistics;
  decltype(&baseline::group_norm_merge_cpu) merge;
  decltype(&baseline::group_norm_normalise_cpu) normalise;
};

#define DIFFKERN_KERNELS(level) \
  Kernels { level::group_norm_statistics_cpu, level::group_norm_merge_cpu, level::group_norm_normalise_cpu }

Kernels choose() {
#if defined(__x86_64__)
  const CpuLevel level = cpu_level();
  if (level == CpuLevel::kAvx512) return DIFFKERN_KERNELS(avx512);
  if (level == CpuLevel::kAvx2) return DIFFKERN_KERNELS(avx2);
#endif
  return DIFFKERN_KERNELS(baseline);
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

int64_t group_norm_tasks(const GroupNormParams& p) {
  return p.shape.samples * p.parts * (channels_are_neighbours(p.x_steps, p.out_steps) ? 1 : p.groups);
}

void group_norm_statistics_cpu(const GroupNormParams& params, int64_t begin, int64_t end) {
  kernels().statistics(params, begin, end);
}

void group_norm_merge_cpu(const GroupNormParams& params) { kernels().merge(params); }

void group_norm_normalise_cpu(const GroupNormParams& params, int64_t begin, int64_t end) {
  kernels().normalise(params, begin, end);
}

}  // namespace diffkern
