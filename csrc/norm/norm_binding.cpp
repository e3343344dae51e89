// rms_norm and layer_norm as torch ops: checks, the output tensor, and the way to the kernels.
#include <algorithm>

#include "../common/torch_binding.h"
#include "norm.h"

namespace diffkern {
namespace {

// Elements that are worth a thread of their own on the CPU.
constexpr int64_t kGrain = 32768;

void launch(const NormParams& params, [[maybe_unused]] const Tensor& x) {
#if defined(DIFFKERN_GPU)
  launch_on_device_of(x, params.layer_norm ? "layer_norm" : "rms_norm",
                      [&params](void* stream) { return norm_gpu(params, stream); });
#else
  torch::stable::parallel_for(0, params.map.rows, std::max<int64_t>(1, kGrain / params.size),
                              [&params](int64_t begin, int64_t end) { norm_cpu(params, begin, end); });
#endif
}

// Fills in what depends on the layout of x and out, and launches; false if the layout is beyond RowMap.
bool launch_strided(NormParams params, const Tensor& x, const Tensor& out) {
  const int leading = static_cast<int>(x.dim()) - 1;
  const auto x_strides = x.strides();
  const auto out_strides = out.strides();
  if (!make_row_map(leading, x.sizes().data(), x_strides.data(), out_strides.data(), &params.map)) return false;
  params.x = x.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.x_stride = params.size > 1 ? x_strides[leading] : 1;
  params.out_stride = params.size > 1 ? out_strides[leading] : 1;
  launch(params, x);
  return true;
}

Tensor norm(const char* op, NormParams params, const Tensor& x, const std::optional<Tensor>& weight,
            const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype, bool preserve_strides) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  params.size = x.size(x.dim() - 1);
  params.x_dtype = dtype_of(x.scalar_type(), op, "x");
  const ScalarType out_type = out_dtype.value_or(x.scalar_type());
  params.out_dtype = dtype_of(out_type, op, "out_dtype");
  const auto plain_weight = checked_parameter(weight, x, params.size, op, "weight");
  const auto plain_bias = checked_parameter(bias, x, params.size, op, "bias");
  if (plain_weight.has_value()) {
    params.weight_dtype = dtype_of(plain_weight->scalar_type(), op, "weight");
    params.weight = plain_weight->const_data_ptr();
  }
  if (plain_bias.has_value()) {
    params.bias_dtype = dtype_of(plain_bias->scalar_type(), op, "bias");
    params.bias = plain_bias->const_data_ptr();
  }
  Tensor out = empty_output(x, out_type, preserve_strides);
  if (out.numel() == 0 || launch_strided(params, x, out)) return out;
  // More leading dimensions than a kernel can step through: by way of contiguous tensors.
  const Tensor rows = torch::stable::contiguous(x);
  const Tensor result = empty_output(rows, out_type, false);
  launch_strided(params, rows, result);
  torch::stable::copy_(out, result);
  return out;
}

Tensor rms_norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps = 1e-6,
                double weight_offset = 0, std::optional<ScalarType> round_dtype = std::nullopt,
                std::optional<ScalarType> out_dtype = std::nullopt, bool clamp_eps = false,
                bool preserve_strides = false) {
  NormParams params{};
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);
  params.clamp_eps = clamp_eps;
  if (round_dtype.has_value()) params.round_dtype = dtype_of(*round_dtype, "rms_norm", "round_dtype");
  return norm("rms_norm", params, x, weight, bias, out_dtype, preserve_strides);
}

Tensor layer_norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps = 1e-5,
                  std::optional<ScalarType> out_dtype = std::nullopt, bool preserve_strides = false) {
  NormParams params{};
  params.layer_norm = true;
  params.eps = static_cast<float>(eps);
  return norm("layer_norm", params, x, weight, bias, out_dtype, preserve_strides);
}

// Every option as it is by default: a call from Python pays for each argument of a schema.
Tensor rms_norm_plain(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias) {
  return rms_norm(x, weight, bias);
}

Tensor layer_norm_plain(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias) {
  return layer_norm(x, weight, bias);
}

}  // namespace

DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def("rms_norm_plain(Tensor x, Tensor? weight=None, Tensor? bias=None) -> Tensor");
  m.def("layer_norm_plain(Tensor x, Tensor? weight=None, Tensor? bias=None) -> Tensor");
  m.def(
      "rms_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-6, float weight_offset=0.0, "
      "ScalarType? round_dtype=None, ScalarType? out_dtype=None, bool clamp_eps=False, bool preserve_strides=False) "
      "-> Tensor");
  m.def(
      "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, ScalarType? out_dtype=None, "
      "bool preserve_strides=False) -> Tensor");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("rms_norm_plain", TORCH_BOX(&rms_norm_plain));
  m.impl("layer_norm_plain", TORCH_BOX(&layer_norm_plain));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
}

}  // namespace diffkern
