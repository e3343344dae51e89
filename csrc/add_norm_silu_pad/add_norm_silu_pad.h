// add_norm_silu_pad: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/dtypes.h"
#include "../common/samples.h"

namespace diffkern {

// sum = x + bias + residual;  normed = sum / sqrt(mean(sum^2) + eps) over the channels of each position, or sum itself;
// out = silu(normed * (1 + scale) + shift), with copies of the first frame before it and of the last one after it.
//
// All in float32 and rounded once.
struct AddNormSiluPadParams {
  const void* x;
  const void* bias;      // contiguous, or null
  const void* residual;  // of the shape of x, or null
  const void* scale;     // one value per batch entry and channel, or null
  const void* shift;
  void* out;
  Dtype x_dtype;  // and that of out
  Dtype bias_dtype;
  Dtype residual_dtype;
  Dtype scale_dtype;
  Dtype shift_dtype;
  bool norm;
  bool silu;
  float eps;
  int64_t front;  // frames of out before the first of x
  int64_t back;
  SampleShape shape;  // a sample is a frame
  Steps x_steps;
  Steps residual_steps;
  Steps out_steps;
  int64_t scale_steps[2];  // along batch entries and channels
  int64_t shift_steps[2];
};

namespace {  // internal linkage: the same header is compiled for several instruction sets

// Where a frame of x goes in out: to `copies` frames in a row, since the outer ones are also the padding.
struct Target {
  int64_t batch;
  int64_t offset;
  int64_t copies;
};

DIFFKERN_HOST_DEVICE Target target_of(const AddNormSiluPadParams& p, int64_t sample) {
  const int64_t batch = sample_batch(p.shape, sample);
  const int64_t frame = sample - batch * p.shape.frames;
  const int64_t first = frame == 0 ? 0 : p.front + frame;
  const int64_t last = p.front + frame + (frame + 1 == p.shape.frames ? p.back : 0);
  return {batch, batch * p.out_steps.batch + first * p.out_steps.frame, last + 1 - first};
}

}  // namespace

// On the CPU positions are computed in tiles.
constexpr int64_t kPadTilePositions = 64;

inline int64_t add_norm_silu_pad_tasks(const AddNormSiluPadParams& p) {
  return p.shape.samples * ((p.shape.positions + kPadTilePositions - 1) / kPadTilePositions);
}

void add_norm_silu_pad_cpu(const AddNormSiluPadParams& params, int64_t begin, int64_t end);
int add_norm_silu_pad_gpu(const AddNormSiluPadParams& params, void* stream);

}  // namespace diffkern
