// What the torch bindings of the norms over channels and groups share.
#pragma once

#include "leading_map.h"
#include "samples.h"
#include "torch_binding.h"

namespace diffkern {
namespace {

using OptionalTensor = std::optional<Tensor>;

struct Parameter {
  const void* data = nullptr;
  Dtype dtype = Dtype::kNone;
  OptionalTensor keeps;  // a copy, where one had to be made
};

[[maybe_unused]] Parameter per_channel(const OptionalTensor& tensor, const Tensor& x, const char* op, const char* name) {
  Parameter result;
  result.keeps = checked_parameter(tensor, x, x.size(1), op, name);
  if (!result.keeps.has_value()) return result;
  result.data = result.keeps->const_data_ptr();
  result.dtype = dtype_of(result.keeps->scalar_type(), op, name);
  return result;
}

// A modulation of shape [samples, channels], in place.
[[maybe_unused]] Parameter per_sample(const OptionalTensor& tensor, const Tensor& x, const char* op, const char* name,
                                      int64_t* steps) {
  Parameter result;
  if (!tensor.has_value()) return result;
  STD_TORCH_CHECK(tensor->dim() == 2 && tensor->size(0) == x.size(0) && tensor->size(1) == x.size(1), op, ": ", name,
                  " must have the shape of the first two dimensions of x");
  check_next_to(*tensor, x, op, name);
  result.data = tensor->const_data_ptr();
  result.dtype = dtype_of(tensor->scalar_type(), op, name);
  steps[0] = tensor->stride(0);
  steps[1] = tensor->stride(1);
  return result;
}

// The steps through x and out, whose positions must merge into one loop; false if they do not.
[[maybe_unused]] bool make_steps(const Tensor& x, const Tensor& out, bool per_frame, SampleShape* shape, Steps* x_steps, Steps* out_steps) {
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
  const int64_t frames = per_frame ? sizes[2] : 1;
  *shape = {sizes[0] * frames, frames, sizes[1], map.rows};
  // A single element may carry any stride. 1 suits the channels of a single position, whose own stride is then
  // that of the next sample or anything else.
  const auto steps = [&](const auto& strides, int operand) {
    const int64_t channel = sizes[1] > 1 ? strides[1] : 1;
    const int64_t position = map.rows > 1 ? map.strides[operand][0] : channel == 1 ? sizes[1] : 1;
    return Steps{sizes[0] > 1 ? strides[0] : 0, per_frame && sizes[2] > 1 ? strides[2] : 0, channel, position};
  };
  *out_steps = steps(out_strides, 0);
  *x_steps = steps(x_strides, 1);
  return true;
}

}  // namespace
}  // namespace diffkern
