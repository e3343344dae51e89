// channel_rms_norm_silu: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/dtypes.h"
#include "../common/samples.h"

namespace diffkern {

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
