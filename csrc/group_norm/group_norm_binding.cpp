// group_norm_silu and channel_rms_norm_silu as torch ops: checks, the output tensor, and the way to the kernels.
#include <algorithm>

#include "../common/leading_map.h"
#include "../common/torch_binding.h"
#include "group_norm.h"

namespace diffkern {
namespace {

using OptionalTensor = std::optional<Tensor>;

struct Parameter {
  const void* data = nullptr;
  Dtype dtype = Dtype::kNone;
  OptionalTensor keeps;  // a copy, where one had to be made
};

Parameter per_channel(const OptionalTensor& tensor, const Tensor& x, const char* op, const char* name) {
  Parameter result;
  result.keeps = checked_parameter(tensor, x, x.size(1), op, name);
  if (!result.keeps.has_value()) return result;
  result.data = result.keeps->const_data_ptr();
  result.dtype = dtype_of(result.keeps->scalar_type(), op, name);
  return result;
}

// The steps through x and out, whose positions must merge into one loop; false if they do not.
bool make_steps(const Tensor& x, const Tensor& out, bool per_frame, SampleShape* shape, Steps* x_steps, Steps* out_steps) {
  const int first = per_frame ? 3 : 2;
  const auto sizes = x.sizes();
  const auto x_strides = x.strides();
  const auto out_strides = out.strides();
  const int spatial = static_cast<int>(x.dim()) - first;
  LeadingMap<2> map;
  if (!make_leading_map(spatial, sizes.data() + first, {out_strides.data() + first, x_strides.data() + first}, &map) ||
      map.dims > 1) {
    return false;
  }
  shape->frames = per_frame ? sizes[2] : 1;
  shape->samples = sizes[0] * shape->frames;
  shape->channels = sizes[1];
  shape->positions = map.rows;
  // A single element may carry any stride. 1 suits the channels of a single position, whose own stride is then
  // that of the next sample or anything else.
  const auto steps = [&](const auto& strides, int operand) {
    const int64_t channel = sizes[1] > 1 ? strides[1] : 1;
    const int64_t position = map.rows > 1 ? map.strides[operand][0] : channel == 1 ? sizes[1] : 1;
    return Steps{strides[0], per_frame ? strides[2] : 0, channel, position};
  };
  *out_steps = steps(out_strides, 0);
  *x_steps = steps(x_strides, 1);
  return true;
}

int64_t group_norm_parts(const GroupNormParams& p) {
  const int64_t of_group = p.shape.channels / p.groups;
  // With channels side by side a task of the CPU has all groups.
  return parts_for(p.shape.positions * (channels_last(p) ? std::max<int64_t>(of_group, kMaxParts) : of_group));
}

bool run_group_norm(GroupNormParams p, const Tensor& x, const Tensor& out, bool per_frame) {
  if (!make_steps(x, out, per_frame, &p.shape, &p.x_steps, &p.out_steps)) return false;
  p.x = x.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.parts = group_norm_parts(p);
  const int64_t partials = p.shape.samples * p.groups * p.parts * 3;
#if defined(DIFFKERN_GPU)
  if (!group_norm_gpu_fits(p)) return false;
  const Tensor buffer = torch::stable::new_empty(x, {partials}, ScalarType::Float);
  p.partials = buffer.mutable_data_ptr();
  launch_on_device_of(x, "group_norm_silu", [&p](void* stream) { return group_norm_gpu(p, stream); });
#else
  std::vector<double> buffer(partials);
  p.partials = buffer.data();
  const int64_t tasks = group_norm_tasks(p);
  torch::stable::parallel_for(0, tasks, 1,
                              [&p](int64_t begin, int64_t end) { group_norm_statistics_cpu(p, begin, end); });
  torch::stable::parallel_for(0, tasks, 1,
                              [&p](int64_t begin, int64_t end) { group_norm_normalise_cpu(p, begin, end); });
#endif
  return true;
}

Tensor group_norm_silu(Tensor x, int64_t num_groups, OptionalTensor weight, OptionalTensor bias, double eps, bool silu,
                       bool per_frame, bool preserve_strides) {
  constexpr const char* kOp = "group_norm_silu";
  STD_TORCH_CHECK(x.dim() >= 2, kOp, ": x must have at least two dimensions");
  STD_TORCH_CHECK(!per_frame || x.dim() == 5, kOp, ": frames of their own need an x of shape [B, C, T, H, W]");
  STD_TORCH_CHECK(num_groups > 0 && x.size(1) % num_groups == 0, kOp, ": ", x.size(1), " channels do not fall into ",
                  num_groups, " groups of one size");
  const Parameter plain_weight = per_channel(weight, x, kOp, "weight");
  const Parameter plain_bias = per_channel(bias, x, kOp, "bias");
  GroupNormParams params{};
  params.x_dtype = dtype_of(x.scalar_type(), kOp, "x");
  params.weight = plain_weight.data;
  params.weight_dtype = plain_weight.dtype;
  params.bias = plain_bias.data;
  params.bias_dtype = plain_bias.dtype;
  params.silu = silu;
  params.eps = static_cast<float>(eps);
  params.groups = num_groups;
  Tensor out = empty_output(x, x.scalar_type(), preserve_strides);
  if (out.numel() == 0 || run_group_norm(params, x, out, per_frame)) return out;
  // A layout that the kernels do not step through: by way of contiguous tensors.
  const Tensor dense = torch::stable::contiguous(x);
  const bool direct = out.is_contiguous();
  const Tensor result = direct ? out : empty_output(dense, x.scalar_type(), false);
  STD_TORCH_CHECK(run_group_norm(params, dense, result, per_frame), kOp, ": no kernel for a contiguous input");
  if (!direct) torch::stable::copy_(out, result);
  return out;
}

// A modulation of shape [samples, channels].
Parameter per_sample(const OptionalTensor& tensor, const Tensor& x, const char* op, const char* name, int64_t* steps) {
  Parameter result;
  if (!tensor.has_value()) return result;
  STD_TORCH_CHECK(tensor->dim() == 2 && tensor->size(0) == x.size(0) && tensor->size(1) == x.size(1), op, ": ", name,
                  " must have the shape of the first two dimensions of x");
  STD_TORCH_CHECK(tensor->is_cuda() == x.is_cuda() && tensor->is_cpu() == x.is_cpu() &&
                      tensor->get_device_index() == x.get_device_index(),
                  op, ": ", name, " and x are on different devices");
  result.data = tensor->const_data_ptr();
  result.dtype = dtype_of(tensor->scalar_type(), op, name);
  steps[0] = tensor->stride(0);
  steps[1] = tensor->stride(1);
  return result;
}

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
      "group_norm_silu(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, bool silu, bool per_frame, "
      "bool preserve_strides) -> Tensor");
  m.def(
      "channel_rms_norm_silu(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, float eps, "
      "bool clamp_eps, bool silu, ScalarType? round_dtype) -> Tensor");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("group_norm_silu", TORCH_BOX(&group_norm_silu));
  m.impl("channel_rms_norm_silu", TORCH_BOX(&channel_rms_norm_silu));
}

}  // namespace diffkern
