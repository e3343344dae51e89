// group_norm_silu: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/dtypes.h"
#include "../common/samples.h"

namespace diffkern {

// out = silu((x + add - mean) / sqrt(variance + eps) * weight + bias), with mean and variance of each sample and group.
// All in float32, rounded once.
struct GroupNormParams {
  const void* x;
  const void* weight;  // contiguous, or null
  const void* bias;    // contiguous, or null
  const void* add;     // a value for each entry of the batch and channel, add_steps apart, or null
  void* out;
  void* partials;  // on the CPU samples * groups * parts times count, mean and squares, as doubles
  Dtype x_dtype;   // and that of out
  Dtype weight_dtype;
  Dtype bias_dtype;
  Dtype add_dtype;
  int64_t add_steps[2];
  bool silu;
  float eps;
  SampleShape shape;
  int64_t groups;
  int64_t parts;  // shares in which the statistics of a group are computed
  Steps x_steps;
  Steps out_steps;
};

// A group is shared among many blocks or tasks. Among how many depends on the shape of a sample alone, so that
// results do not depend on what else is in the batch, nor on the machine.
constexpr int64_t kPartElements = 8192;
constexpr int64_t kMaxPlaneParts = 64;    // which every block merges for itself
constexpr int64_t kMaxPixelParts = 1024;  // the same with channels side by side, on the CPU
constexpr int64_t kPixelTile = 256;       // channels that such a part has, or so

// Where the value that is added to a channel of a sample is.
namespace {
DIFFKERN_HOST_DEVICE int64_t add_offset(const GroupNormParams& p, int64_t sample, int64_t channel) {
  return sample_batch(p.shape, sample) * p.add_steps[0] + channel * p.add_steps[1];
}
}  // namespace

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t parts_for(const GroupNormParams& p) {
  const bool pixels = channels_are_neighbours(p.x_steps, p.out_steps);
  const int64_t of_group = p.shape.channels / p.groups;
  const int64_t side_by_side = pixels ? (p.shape.channels < kPixelTile ? p.shape.channels : kPixelTile) : of_group;
  const int64_t parts = ceil_div(p.shape.positions * side_by_side, kPartElements);
  const int64_t most = pixels ? kMaxPixelParts : kMaxPlaneParts;
  return parts > most ? most : parts;
}

// On the CPU: first statistics for all of [0, group_norm_tasks), then merge, then normalise for all of them.
int64_t group_norm_tasks(const GroupNormParams& params);
void group_norm_statistics_cpu(const GroupNormParams& params, int64_t begin, int64_t end);
void group_norm_merge_cpu(const GroupNormParams& params);
void group_norm_normalise_cpu(const GroupNormParams& params, int64_t begin, int64_t end);

// How many floats the GPU kernels need at `partials`; 0 if they do not know this layout, and contiguous tensors have to
// do.
int64_t group_norm_gpu_floats(const GroupNormParams& params);

// Enqueues all passes on a CUDA or HIP stream of the current device; returns the runtime's error code.
int group_norm_gpu(const GroupNormParams& params, void* stream);

}  // namespace diffkern
