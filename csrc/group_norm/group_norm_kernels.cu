// CUDA and HIP kernels for group_norm_silu.
//
// Two passes, each over enough blocks to fill the GPU even for one sample of a few groups: the first leaves statistics
// for each part of a group, the second normalises. Which of them depends on what is next to what in memory: the
// positions of a channel (planes), or the channels of a position (pixels).
#include "../common/gpu.h"
#include "group_norm.h"
#include "group_norm_pixels.h"
#include "group_norm_planes.h"

namespace diffkern {
namespace {

template <typename T>
void launch(const GroupNormParams& p, GpuStream stream) {
  channels_are_neighbours(p.x_steps, p.out_steps) ? launch_pixels<T>(p, stream) : launch_planes<T>(p, stream);
}

}  // namespace

int64_t group_norm_gpu_floats(const GroupNormParams& p) {
  const bool pixels = channels_are_neighbours(p.x_steps, p.out_steps);
  return pixels ? pixel_floats(p) : plane_floats(p);
}

int group_norm_gpu(const GroupNormParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  with_element(p.x_dtype, [&](auto element) { launch<decltype(element)>(p, stream); });
  return last_launch_error();
}

}  // namespace diffkern
