// Tensors of shape [batch, channels, positions...], as the norms of convolutional networks step through them.
#pragma once

#include "divisor.h"
#include "dtypes.h"

namespace diffkern {

// All in elements. A sample is one image or video, or one frame of it where every frame counts by itself.
struct Steps {
  int64_t batch;
  int64_t frame;  // 0 where a sample has all frames
  int64_t channel;
  int64_t position;
};

struct SampleShape {
  int64_t samples;
  int64_t frames;  // samples that lie `frame` apart, before the next `batch`; 1 where a sample has all frames
  int64_t channels;
  int64_t positions;
  Divisor by_frames;

  SampleShape() = default;
  SampleShape(int64_t samples, int64_t frames, int64_t channels, int64_t positions)
      : samples(samples), frames(frames), channels(channels), positions(positions),
        by_frames(make_divisor(frames > 0 ? static_cast<uint32_t>(frames) : 1)) {}
};

namespace {  // internal linkage: the same header is compiled for several instruction sets

// Whether the channels of a position, and not the positions of a channel, are neighbours in memory.
DIFFKERN_HOST_DEVICE bool channels_are_neighbours(const Steps& x, const Steps& out) {
  return x.channel == 1 && out.channel == 1 && x.position != 1;
}

// The entry of the batch that a sample is, or is a frame of.
DIFFKERN_HOST_DEVICE int64_t sample_batch(const SampleShape& shape, int64_t sample) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  return shape.by_frames.divide(static_cast<uint32_t>(sample));  // a GPU has fewer blocks than 2^31
#else
  return sample / shape.frames;
#endif
}

DIFFKERN_HOST_DEVICE int64_t sample_offset(const SampleShape& shape, const Steps& steps, int64_t sample) {
  const int64_t batch = sample_batch(shape, sample);
  return batch * steps.batch + (sample - batch * shape.frames) * steps.frame;
}

}  // namespace
}  // namespace diffkern
