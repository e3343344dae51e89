// Chooses between the builds of channel_norm_cpu.cpp. Compiled for the oldest CPU, like any code before the choice.
#include "../common/cpu_level.h"
#include "channel_norm.h"

namespace diffkern {

namespace baseline {
void channel_norm_cpu(const ChannelNormParams& params, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void channel_norm_cpu(const ChannelNormParams& params, int64_t begin, int64_t end);
}
namespace avx512 {
void channel_norm_cpu(const ChannelNormParams& params, int64_t begin, int64_t end);
}
#endif

namespace {

auto choose() {
#if defined(__x86_64__)
  const CpuLevel level = cpu_level();
  if (level == CpuLevel::kAvx512) return avx512::channel_norm_cpu;
  if (level == CpuLevel::kAvx2) return avx2::channel_norm_cpu;
#endif
  return baseline::channel_norm_cpu;
}

}  // namespace

void channel_norm_cpu(const ChannelNormParams& params, int64_t begin, int64_t end) {
  static const auto chosen = choose();
  chosen(params, begin, end);
}

}  // namespace diffkern
