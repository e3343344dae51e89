// rms_norm and layer_norm over rows: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/dtypes.h"
#include "../common/row_map.h"

namespace diffkern {

// rms_norm:   y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) + bias
//   clamp_eps: y = x / max(|x|, eps) * sqrt(size) * ...
// layer_norm: y = (x - mean) / sqrt(variance + eps) * weight + bias
//
// All in float32 and rounded once, to the output dtype. A round_dtype other than kNone rounds the
// normalised value to it, and the product with the weight to the output dtype before bias is added.
struct NormParams {
  const void* x;
  const void* weight;  // contiguous, size elements, or null
  const void* bias;    // contiguous, size elements, or null
  void* out;
  Dtype x_dtype;
  Dtype weight_dtype;
  Dtype bias_dtype;
  Dtype out_dtype;
  Dtype round_dtype;
  bool layer_norm;
  bool clamp_eps;
  float eps;
  float weight_offset;
  int64_t size;  // of the normalised dimension
  int64_t x_stride;
  int64_t out_stride;
  RowMap map;
};

// Computes the rows [begin, end) with the best instruction set of this CPU.
void norm_cpu(const NormParams& params, int64_t begin, int64_t end);

// Enqueues all rows on a CUDA or HIP stream of the current device; returns the runtime's error code.
int norm_gpu(const NormParams& params, void* stream);

}  // namespace diffkern
