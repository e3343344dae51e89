// group_norm_silu as a torch op: checks, the output tensor, and the way to the kernels.
#include <algorithm>

#include "../common/torch_samples.h"
#include "group_norm.h"

namespace diffkern {
namespace {

bool run_group_norm(GroupNormParams p, const Tensor& x, const Tensor& out, bool per_frame) {
  if (!make_steps(x, out, per_frame, &p.shape, &p.x_steps, &p.out_steps)) return false;
  p.x = x.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.parts = parts_for(p);
#if defined(DIFFKERN_GPU)
  const int64_t partials = group_norm_gpu_floats(p);
  if (partials == 0) return false;
  const Tensor buffer = torch::stable::new_empty(x, {partials}, ScalarType::Float);
  p.partials = buffer.mutable_data_ptr();
  launch_on_device_of(x, "group_norm_silu", [&p](void* stream) { return group_norm_gpu(p, stream); });
#else
  std::vector<double> buffer(p.shape.samples * p.groups * p.parts * 3);
  p.partials = buffer.data();
  constexpr int64_t kGrain = 16384;  // elements that are worth a thread of their own
  const int64_t tasks = group_norm_tasks(p);
  const int64_t grain = std::max<int64_t>(1, kGrain * tasks / x.numel());
  torch::stable::parallel_for(0, tasks, grain,
                              [&p](int64_t begin, int64_t end) { group_norm_statistics_cpu(p, begin, end); });
  group_norm_merge_cpu(p);
  torch::stable::parallel_for(0, tasks, grain,
                              [&p](int64_t begin, int64_t end) { group_norm_normalise_cpu(p, begin, end); });
#endif
  return true;
}

Tensor group_norm_silu(Tensor x, int64_t num_groups, OptionalTensor weight, OptionalTensor bias, OptionalTensor add,
                       double eps, bool silu, bool per_frame, bool preserve_strides) {
  constexpr const char* kOp = "group_norm_silu";
  STD_TORCH_CHECK(x.dim() >= 2, kOp, ": x must have at least two dimensions");
  STD_TORCH_CHECK(!per_frame || x.dim() == 5, kOp, ": frames of their own need an x of shape [B, C, T, H, W]");
  STD_TORCH_CHECK(num_groups > 0 && x.size(1) % num_groups == 0, kOp, ": ", x.size(1), " channels do not fall into ",
                  num_groups, " groups of one size");
  STD_TORCH_CHECK(x.numel() != num_groups, kOp, ": a group of one element has no variance");
  const Parameter plain_weight = per_channel(weight, x, kOp, "weight");
  const Parameter plain_bias = per_channel(bias, x, kOp, "bias");
  GroupNormParams params{};
  const Parameter plain_add = per_sample(add, x, kOp, "add", params.add_steps);
  params.x_dtype = dtype_of(x.scalar_type(), kOp, "x");
  params.weight = plain_weight.data;
  params.weight_dtype = plain_weight.dtype;
  params.bias = plain_bias.data;
  params.bias_dtype = plain_bias.dtype;
  params.add = plain_add.data;
  params.add_dtype = plain_add.dtype;
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

}  // namespace

DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def(
      "group_norm_silu(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, Tensor? add=None, "
      "float eps=1e-5, bool silu=True, bool per_frame=False, bool preserve_strides=False) -> Tensor");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("group_norm_silu", TORCH_BOX(&group_norm_silu));
}

}  // namespace diffkern
