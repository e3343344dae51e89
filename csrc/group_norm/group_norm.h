// group_norm_silu and channel_rms_norm_silu: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/dtypes.h"

namespace diffkern {

// How an input and the output of the same layout are stepped through. All in elements. A sample is one image or
// video, or one frame of it where every frame counts by itself.
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
};

// out = silu((x - mean) / sqrt(variance + eps) * weight + bias), with mean and variance of each sample and group.
// All in float32, rounded once.
struct GroupNormParams {
  const void* x;
  const void* weight;  // contiguous, or null
  const void* bias;    // contiguous, or null
  void* out;
  void* partials;  // samples * groups * parts times count, mean and squares: doubles on the CPU, floats on the GPU
  Dtype x_dtype;   // and that of out
  Dtype weight_dtype;
  Dtype bias_dtype;
  bool silu;
  float eps;
  SampleShape shape;
  int64_t groups;
  int64_t parts;  // shares in which the statistics of a group are computed
  Steps x_steps;
  Steps out_steps;
};

// Whether neighbouring channels, and not neighbouring positions, lie side by side.
inline bool channels_last(const GroupNormParams& p) {
  return p.x_steps.channel == 1 && p.out_steps.channel == 1 && p.x_steps.position != 1;
}

// A group is shared among up to 64 blocks or tasks. How many depends on the shape of a sample alone, so that
// results do not depend on what else is in the batch, nor on the machine.
constexpr int64_t kMaxParts = 64;
constexpr int64_t kPartElements = 8192;

inline int64_t parts_for(int64_t elements) {
  const int64_t parts = (elements + kPartElements - 1) / kPartElements;
  return parts > kMaxParts ? kMaxParts : parts;
}

// On the CPU: first statistics for all of [0, group_norm_tasks), then normalise for all of them.
int64_t group_norm_tasks(const GroupNormParams& params);
void group_norm_statistics_cpu(const GroupNormParams& params, int64_t begin, int64_t end);
void group_norm_normalise_cpu(const GroupNormParams& params, int64_t begin, int64_t end);

// Whether the GPU kernels know this layout; if not, contiguous tensors will do.
bool group_norm_gpu_fits(const GroupNormParams& params);

// Enqueues both passes on a CUDA or HIP stream of the current device; returns the runtime's error code.
int group_norm_gpu(const GroupNormParams& params, void* stream);

// normed = x / sqrt(mean(x^2) + eps), or with clamp_eps x / max(|x|, eps) * sqrt(channels), over the channels of
// each position;  out = silu((normed * weight + bias) * (1 + scale) + shift).
//
// All in float32 and rounded once. A round_dtype other than kNone rounds normed to it, and its product with the
// weight to the dtype of x before bias is added.
struct ChannelNormParams {
  const void* x;
  const void* weight;  // contiguous, or null
  const void* bias;    // contiguous, or null
  const void* scale;   // one value per sample and channel, or null
  const void* shift;
  void* out;
  Dtype x_dtype;  // and that of out
  Dtype weight_dtype;
  Dtype bias_dtype;
  Dtype scale_dtype;
  Dtype shift_dtype;
  Dtype round_dtype;
  bool clamp_eps;
  bool silu;
  float eps;
  SampleShape shape;
  Steps x_steps;
  Steps out_steps;
  int64_t scale_steps[2];  // along samples and channels
  int64_t shift_steps[2];
};

// On the CPU positions are computed in tiles.
constexpr int64_t kTilePositions = 64;

inline int64_t channel_norm_tasks(const ChannelNormParams& p) {
  return p.shape.samples * ((p.shape.positions + kTilePositions - 1) / kTilePositions);
}

void channel_norm_cpu(const ChannelNormParams& params, int64_t begin, int64_t end);
int channel_norm_gpu(const ChannelNormParams& params, void* stream);

}  // namespace diffkern
