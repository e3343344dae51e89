// CUDA and HIP kernels for group_norm_silu.
//
// One kernel where a multiprocessor has the shared memory that it asks for: it keeps what it has read last, and reads
// only the rest again (group_norm_resident.h). Else two, each over enough blocks to fill the GPU even for one sample of a few
// groups: the first leaves statistics for each part of a group, the second normalises. Which of them depends on what is
// next to what in memory: the positions of a channel (planes), or the channels of a position (pixels).
#include <algorithm>

#include "../common/gpu.h"
#include "group_norm.h"
#include "group_norm_pixels.h"
#include "group_norm_planes.h"
#include "group_norm_resident.h"

namespace diffkern {
namespace {

template <typename T>
void launch(const GroupNormParams& p, GpuStream stream) {
#if !DIFFKERN_HIP
  if (launch_resident<T>(p, stream)) return;
#endif
  channels_are_neighbours(p.x_steps, p.out_steps) ? launch_pixels<T>(p, stream) : launch_planes<T>(p, stream);
}

}  // namespace

int64_t group_norm_gpu_floats(const GroupNormParams& p) {
  const bool pixels = channels_are_neighbours(p.x_steps, p.out_steps);
  const int64_t floats = pixels ? pixel_floats(p) : plane_floats(p);
#if DIFFKERN_HIP
  return floats;
#else
  return floats == 0 ? 0 : std::max(floats, resident_floats(p));
#endif
}

int group_norm_gpu(const GroupNormParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  with_element(p.x_dtype, [&](auto element) { launch<decltype(element)>(p, stream); });
  return last_launch_error();
}

}  // namespace diffkern
