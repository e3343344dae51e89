// add_norm_silu_pad as a torch op: checks, the output tensor, and the way to the kernels.
#include <algorithm>

#include "../common/torch_samples.h"
#include "add_norm_silu_pad.h"

namespace diffkern {
namespace {

constexpr const char* kOp = "add_norm_silu_pad";

// A new tensor of so many frames, in the one order of the memory or the other.
Tensor empty_video(const Tensor& x, int64_t frames, bool channels_last) {
  const int64_t sizes[] = {x.size(0), x.size(1), frames, x.size(3), x.size(4)};
  if (!channels_last) return empty_contiguous(x, 5, sizes, x.scalar_type());
  const int64_t row = sizes[4] * sizes[1];
  const int64_t frame = sizes[3] * row;
  const int64_t strides[] = {frames * frame, 1, frame, row, sizes[1]};
  return empty_strided(x, 5, sizes, strides, x.scalar_type());
}

// The steps through the three tensors, whose rows of positions must merge into one loop; false if they do not.
bool make_steps(AddNormSiluPadParams* p, const Tensor& x, const Tensor& residual, const Tensor& out) {
  const Tensor* tensors[] = {&out, &x, &residual};
  LeadingMap<3> map;
  if (!make_leading_map(2, x.sizes().data() + 3,
                        {out.strides().data() + 3, x.strides().data() + 3, residual.strides().data() + 3}, &map) ||
      map.dims > 1) {
    return false;
  }
  p->shape = {x.size(0) * x.size(2), x.size(2), x.size(1), map.rows};
  Steps* steps[] = {&p->out_steps, &p->x_steps, &p->residual_steps};
  for (int i = 0; i < 3; ++i) {
    const Tensor& tensor = *tensors[i];
    // A single element may carry any stride.
    const auto step = [&tensor](int64_t dim, int64_t single) { return tensor.size(dim) > 1 ? tensor.stride(dim) : single; };
    const int64_t channel = step(1, 1);
    const int64_t position = map.rows > 1 ? map.strides[i][0] : channel == 1 ? x.size(1) : 1;
    *steps[i] = {step(0, 0), step(2, 0), channel, position};
  }
  return true;
}

void launch(const AddNormSiluPadParams& params, [[maybe_unused]] const Tensor& x) {
#if defined(DIFFKERN_GPU)
  launch_on_device_of(x, kOp, [&params](void* stream) { return add_norm_silu_pad_gpu(params, stream); });
#else
  constexpr int64_t kGrain = 16384;  // elements that are worth a thread of their own
  torch::stable::parallel_for(0, add_norm_silu_pad_tasks(params),
                              std::max<int64_t>(1, kGrain / (kPadTilePositions * params.shape.channels)),
                              [&params](int64_t begin, int64_t end) { add_norm_silu_pad_cpu(params, begin, end); });
#endif
}

bool run(AddNormSiluPadParams params, const Tensor& x, const OptionalTensor& residual, const Tensor& out) {
  if (!make_steps(&params, x, residual.has_value() ? *residual : x, out)) return false;
  params.x = x.const_data_ptr();
  params.residual = residual.has_value() ? residual->const_data_ptr() : nullptr;
  params.out = out.mutable_data_ptr();
  launch(params, x);
  return true;
}

Tensor add_norm_silu_pad(Tensor x, OptionalTensor bias, OptionalTensor residual, OptionalTensor scale,
                         OptionalTensor shift, double eps, bool norm, bool silu, int64_t front, int64_t back,
                         bool channels_last) {
  STD_TORCH_CHECK(x.dim() == 5, kOp, ": x must have the five dimensions of a video");
  STD_TORCH_CHECK(front >= 0 && back >= 0 && (front + back == 0 || x.size(2) > 0), kOp, ": ", x.size(2),
                  " frames cannot be padded by ", front, " and ", back);
  AddNormSiluPadParams params{};
  const Parameter plain_bias = per_channel(bias, x, kOp, "bias");
  const Parameter plain_scale = per_sample(scale, x, kOp, "scale", params.scale_steps);
  const Parameter plain_shift = per_sample(shift, x, kOp, "shift", params.shift_steps);
  params.x_dtype = dtype_of(x.scalar_type(), kOp, "x");
  params.bias = plain_bias.data;
  params.bias_dtype = plain_bias.dtype;
  params.scale = plain_scale.data;
  params.scale_dtype = plain_scale.dtype;
  params.shift = plain_shift.data;
  params.shift_dtype = plain_shift.dtype;
  params.norm = norm;
  params.silu = silu;
  params.eps = static_cast<float>(eps);
  params.front = front;
  params.back = back;
  if (residual.has_value()) {
    check_next_to(*residual, x, kOp, "residual");
    STD_TORCH_CHECK(residual->dim() == 5 && std::equal(x.sizes().begin(), x.sizes().end(), residual->sizes().begin()),
                    kOp, ": the residual must have the shape of x");
    params.residual_dtype = dtype_of(residual->scalar_type(), kOp, "residual");
  }
  const Tensor out = empty_video(x, front + x.size(2) + back, channels_last);
  if (out.numel() == 0 || run(params, x, residual, out)) return out;
  // Rows of pixels that do not follow each other: by way of contiguous tensors.
  if (residual.has_value()) residual = torch::stable::contiguous(*residual);
  run(params, torch::stable::contiguous(x), residual, out);
  return out;
}

}  // namespace

DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def(
      "add_norm_silu_pad(Tensor x, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift, float eps, bool norm, "
      "bool silu, int front, int back, bool channels_last) -> Tensor");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("add_norm_silu_pad", TORCH_BOX(&add_norm_silu_pad));
}

}  // namespace diffkern
