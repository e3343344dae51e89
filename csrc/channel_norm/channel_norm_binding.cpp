// channel_rms_norm_silu as a torch op: checks, the output tensor, and the way to the kernels.
#include <algorithm>

#include "../common/torch_samples.h"
#include "channel_norm.h"

namespace diffkern {
namespace {

bool run_channel_norm(ChannelNormParams p, const Tensor& x, const Tensor& out) {
  if (!make_steps(x, out, false, &p.shape, &p.x_steps, &p.out_steps)) return false;
  p.x = x.const_data_ptr();
  p.out = out.mutable_data_ptr();
#if defined(DIFFKERN_GPU)
  launch_on_device_of(x, "channel_rms_norm_silu", [&p](void* stream) { return channel_norm_gpu(p, stream); });
#else
  constexpr int64_t kGrain = 16384;  // elements that are worth a thread of their own
  torch::stable::parallel_for(0, channel_norm_tasks(p),
                              std::max<int64_t>(1, kGrain / (kTilePositions * p.shape.channels)),
                              [&p](int64_t begin, int64_t end) { channel_norm_cpu(p, begin, end); });
#endif
  return true;
}

Tensor channel_rms_norm_silu(Tensor x, OptionalTensor weight, OptionalTensor bias, OptionalTensor scale,
                             OptionalTensor shift, double eps, bool clamp_eps, bool silu,
                             std::optional<ScalarType> round_dtype) {
  constexpr const char* kOp = "channel_rms_norm_silu";
  STD_TORCH_CHECK(x.dim() >= 2, kOp, ": x must have at least two dimensions");
  ChannelNormParams params{};
  const Parameter plain_weight = per_channel(weight, x, kOp, "weight");
  const Parameter plain_bias = per_channel(bias, x, kOp, "bias");
  const Parameter plain_scale = per_sample(scale, x, kOp, "scale", params.scale_steps);
  const Parameter plain_shift = per_sample(shift, x, kOp, "shift", params.shift_steps);
  params.x_dtype = dtype_of(x.scalar_type(), kOp, "x");
  params.weight = plain_weight.data;
  params.weight_dtype = plain_weight.dtype;
  params.bias = plain_bias.data;
  params.bias_dtype = plain_bias.dtype;
  params.scale = plain_scale.data;
  params.scale_dtype = plain_scale.dtype;
  params.shift = plain_shift.data;
  params.shift_dtype = plain_shift.dtype;
  if (round_dtype.has_value()) params.round_dtype = dtype_of(*round_dtype, kOp, "round_dtype");
  params.clamp_eps = clamp_eps;
  params.silu = silu;
  params.eps = static_cast<float>(eps);
  Tensor out = empty_output(x, x.scalar_type(), true);
  if (out.numel() == 0 || run_channel_norm(params, x, out)) return out;
  // Positions that are more than one loop apart: by way of contiguous tensors.
  const Tensor dense = torch::stable::contiguous(x);
  const Tensor result = empty_output(dense, x.scalar_type(), false);
  run_channel_norm(params, dense, result);
  torch::stable::copy_(out, result);
  return out;
}

}  // namespace

DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def(
      "channel_rms_norm_silu(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? scale=None, "
      "Tensor? shift=None, float eps=1e-6, bool clamp_eps=False, bool silu=True, ScalarType? round_dtype=None) "
      "-> Tensor");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("channel_rms_norm_silu", TORCH_BOX(&channel_rms_norm_silu));
}

}  // namespace diffkern
