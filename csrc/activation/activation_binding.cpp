// Activations and gated units as torch ops: checks, the output tensor, and the way to the kernels.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "../common/torch_binding.h"
#include "activation.h"

namespace diffkern {
namespace {

// Whether the dimensions of x lie in memory in the order of their indices, gaps allowed: then the dense tensor
// of the same order is the contiguous one.
bool in_plain_order(const Tensor& x) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  int64_t reach = 0;  // how far the inner dimensions extend
  for (int64_t dim = x.dim() - 1; dim >= 0; --dim) {
    if (sizes[dim] == 1) continue;
    if (strides[dim] <= reach) return false;
    reach = strides[dim] * (sizes[dim] - 1);
  }
  return true;
}

// Takes the fastest dimension out of the map: it is the run, the others say where runs begin.
void take_run(ActivationParams* p) {
  auto& map = p->runs;
  p->size = map.sizes[0];
  map.rows /= p->size;
  for (int operand = 0; operand < kActivationOperands; ++operand) {
    // A single element may carry any stride; 1 lets it pass for a vector.
    p->steps[operand] = p->size > 1 ? map.strides[operand][0] : 1;
    for (int dim = 1; dim < map.dims; ++dim) map.strides[operand][dim - 1] = map.strides[operand][dim];
    if (map.dims == 1) map.strides[operand][0] = 0;
  }
  for (int dim = 1; dim < map.dims; ++dim) map.sizes[dim - 1] = map.sizes[dim];
  if (map.dims == 1) {
    map.sizes[0] = 1;
  } else {
    --map.dims;
  }
}

bool launch_strided([[maybe_unused]] const char* op, ActivationParams params, const Tensor& gate, const Tensor* value, const Tensor& out) {
  const auto gate_strides = gate.strides();
  const auto value_strides = value != nullptr ? value->strides() : gate.strides();
  const auto out_strides = out.strides();
  if (!make_leading_map(static_cast<int>(gate.dim()), gate.sizes().data(),
                        {out_strides.data(), gate_strides.data(), value_strides.data()}, &params.runs)) {
    return false;
  }
  take_run(&params);
  params.gate = gate.const_data_ptr();
  params.value = value != nullptr ? value->const_data_ptr() : nullptr;
  params.out = out.mutable_data_ptr();
#if defined(DIFFKERN_GPU)
  launch_on_device_of(gate, op, [&params](void* stream) { return activation_gpu(params, stream); });
#else
  constexpr int64_t kGrain = 16384;  // elements that are worth a thread of their own
  torch::stable::parallel_for(0, pieces_of(params), std::max<int64_t>(1, kGrain / params.size),
                              [&params](int64_t begin, int64_t end) { activation_cpu(params, begin, end); });
#endif
  return true;
}

Tensor run(const char* op, ActivationParams params, const Tensor& gate, const Tensor* value, const std::string& function,
           ScalarType out_type) {
  params.activation = activation_named(function.c_str());
  STD_TORCH_CHECK(params.activation != Activation::kNone, op, ": unknown activation ", function);
  const Tensor& like = value != nullptr ? *value : gate;
  Tensor out = empty_output(like, out_type, !in_plain_order(like));
  if (out.numel() == 0 || launch_strided(op, params, gate, value, out)) return out;
  // More dimensions than a kernel can step through: by way of contiguous tensors.
  const Tensor dense_gate = torch::stable::contiguous(gate);
  const Tensor dense_value = value != nullptr ? torch::stable::contiguous(*value) : dense_gate;
  const Tensor result = empty_output(dense_gate, out_type, false);
  launch_strided(op, params, dense_gate, value != nullptr ? &dense_value : nullptr, result);
  torch::stable::copy_(out, result);
  return out;
}

Tensor activation(Tensor x, std::string function) {
  ActivationParams params{};
  params.gate_dtype = params.out_dtype = dtype_of(x.scalar_type(), "activation", "x");
  return run("activation", params, x, nullptr, function, x.scalar_type());
}

// What is known of a gated unit before anything is made for it.
ActivationParams params_of_glu(const char* op, const Tensor& value, const Tensor& gate, bool round_activation) {
  STD_TORCH_CHECK(value.dim() == gate.dim(), op, ": value and gate must have the same shape");
  for (int64_t dim = 0; dim < value.dim(); ++dim) {
    STD_TORCH_CHECK(value.size(dim) == gate.size(dim), op, ": value and gate must have the same shape");
  }
  STD_TORCH_CHECK(value.is_cuda() == gate.is_cuda() && value.is_cpu() == gate.is_cpu() &&
                      value.get_device_index() == gate.get_device_index(),
                  op, ": value and gate are on different devices");
  ActivationParams params{};
  params.value_dtype = dtype_of(value.scalar_type(), op, "value");
  params.gate_dtype = dtype_of(gate.scalar_type(), op, "gate");
  params.out_dtype = params.value_dtype == params.gate_dtype ? params.value_dtype : Dtype::kFloat32;
  params.round_activation = round_activation;
  return params;
}

ScalarType type_of_glu(const Tensor& value, const Tensor& gate) {
  return value.scalar_type() == gate.scalar_type() ? value.scalar_type() : ScalarType::Float;
}

Tensor glu(Tensor value, Tensor gate, std::string function, bool round_activation) {
  const ActivationParams params = params_of_glu("glu", value, gate, round_activation);
  return run("glu", params, gate, &value, function, type_of_glu(value, gate));
}

#if defined(DIFFKERN_ROWS8)
// Where the rows of both begin; false if they need more loops than a kernel has.
bool map_rows(ActivationRows8* p, const Tensor& x, const Tensor* front, const Tensor& out) {
  const int last = static_cast<int>(x.dim()) - 1;
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  const auto front_strides = front != nullptr ? front->strides() : strides;
  const auto out_strides = out.strides();
  p->x = x.const_data_ptr();
  p->x_step = sizes[last] > 1 ? strides[last] : 1;
  p->front = front != nullptr ? front->const_data_ptr() : nullptr;
  p->front_step = p->front_size > 1 ? front_strides[last] : 1;
  return make_leading_map(last, sizes.data(), {out_strides.data(), strides.data(), front_strides.data()}, &p->map);
}

std::tuple<Tensor, Tensor> activation_fp8(Tensor x, std::optional<Tensor> front, std::string function) {
  constexpr const char* kOp = "activation_fp8";
  ActivationRows8 params{};
  params.dtype = dtype_of(x.scalar_type(), kOp, "x");
  params.activation = activation_named(function.c_str());
  STD_TORCH_CHECK(params.activation != Activation::kNone || function == "identity", kOp, ": unknown activation ",
                  function);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, kOp, ": a row needs elements to find its scale from");
  const int64_t rank = x.dim();
  std::array<int64_t, 64> sizes;
  std::copy_n(x.sizes().data(), rank, sizes.begin());
  if (front.has_value()) {
    STD_TORCH_CHECK(front->dim() == rank && front->scalar_type() == x.scalar_type() && front->is_cuda() &&
                        front->get_device_index() == x.get_device_index(),
                    kOp, ": front and x differ in dtype, device or number of dimensions");
    for (int64_t dim = 0; dim + 1 < rank; ++dim) {
      STD_TORCH_CHECK(front->size(dim) == x.size(dim), kOp, ": front and x have other numbers of rows");
    }
    params.front_size = front->size(rank - 1);
    sizes[rank - 1] += params.front_size;
  }
  params.size = sizes[rank - 1];
  Rows8 rows(x, rank, sizes.data());
  params.out = rows.data();
  params.scales = rows.scale_data();
  if (x.numel() == 0) return {rows.values, rows.scales};
  Tensor from = x;
  if (!map_rows(&params, from, front.has_value() ? &*front : nullptr, rows.values)) {
    from = torch::stable::contiguous(x);
    if (front.has_value()) front = torch::stable::contiguous(*front);
    map_rows(&params, from, front.has_value() ? &*front : nullptr, rows.values);
  }
  STD_TORCH_CHECK(params.map.rows <= INT32_MAX, kOp, ": more than 2^31 rows");
  launch_on_device_of(x, kOp, [&params](void* stream) { return activation_rows8_gpu(params, stream); });
  return {rows.values, rows.scales};
}

// The last dimension as the run; false if the others need more loops than a kernel has.
bool take_rows(ActivationParams* p, const Tensor& value, const Tensor& gate, const Tensor& out) {
  const int last = static_cast<int>(value.dim()) - 1;
  const auto out_strides = out.strides();
  const auto gate_strides = gate.strides();
  const auto value_strides = value.strides();
  p->size = value.size(last);
  p->steps[kOut] = 1;
  p->steps[kGate] = p->size > 1 ? gate_strides[last] : 1;
  p->steps[kValue] = p->size > 1 ? value_strides[last] : 1;
  p->gate = gate.const_data_ptr();
  p->value = value.const_data_ptr();
  p->out = out.mutable_data_ptr();
  return make_leading_map(last, value.sizes().data(),
                          {out_strides.data(), gate_strides.data(), value_strides.data()}, &p->runs);
}

std::tuple<Tensor, Tensor, Tensor> glu_and_fp8(Tensor value, Tensor gate, std::string function, bool round_activation) {
  constexpr const char* kOp = "glu_and_fp8";
  GluRows8 params{params_of_glu(kOp, value, gate, round_activation)};
  params.glu.activation = activation_named(function.c_str());
  STD_TORCH_CHECK(params.glu.activation != Activation::kNone, kOp, ": unknown activation ", function);
  STD_TORCH_CHECK(value.dim() >= 1 && value.size(value.dim() - 1) > 0, kOp,
                  ": a row needs elements to find its scale from");
  const ScalarType out_type = type_of_glu(value, gate);
  if (value.numel() > 0 && params.glu.value_dtype == params.glu.gate_dtype && in_plain_order(value)) {
    Tensor out = empty_output(value, out_type, false);
    if (take_rows(&params.glu, value, gate, out) && params.glu.runs.rows <= INT32_MAX) {
      Rows8 rows(out, out.dim(), out.sizes().data());
      params.rows = rows.data();
      params.scales = rows.scale_data();
      launch_on_device_of(gate, kOp, [&params](void* stream) { return glu_rows8_gpu(params, stream); });
      return {out, rows.values, rows.scales};
    }
  }
  // Several dtypes, and orders of memory that rows of 8 bits do not have: in two passes.
  const Tensor out = run(kOp, params.glu, gate, &value, function, out_type);
  const auto [values, scales] = activation_fp8(out, std::nullopt, "identity");
  return {out, values, scales};
}
#endif

}  // namespace

#if defined(DIFFKERN_ROWS8)
DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def("activation_fp8(Tensor x, Tensor? front=None, str function=\"identity\") -> (Tensor, Tensor)");
  m.def(
      "glu_and_fp8(Tensor value, Tensor gate, str function, bool round_activation=False) -> (Tensor, Tensor, Tensor)");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("activation_fp8", TORCH_BOX(&activation_fp8));
  m.impl("glu_and_fp8", TORCH_BOX(&glu_and_fp8));
}
#endif

DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def("activation(Tensor x, str function) -> Tensor");
  m.def("glu(Tensor value, Tensor gate, str function, bool round_activation=False) -> Tensor");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("activation", TORCH_BOX(&activation));
  m.impl("glu", TORCH_BOX(&glu));
}

}  // namespace diffkern
