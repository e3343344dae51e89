// norm_modulate, gate_residual and both in one as torch ops: checks, broadcasting, the outputs, and the way to
// the kernels.
#include <algorithm>
#include <array>
#include <tuple>

#include "../common/torch_binding.h"
#include "modulate.h"

namespace diffkern {
namespace {

// Elements that are worth a thread of their own on the CPU.
constexpr int64_t kGrain = 16384;

using OptionalTensor = std::optional<Tensor>;

// The shape that the operands of an op broadcast to.
struct Shape {
  int64_t rank;
  std::array<int64_t, kMaxRank> sizes;

  int64_t last() const { return sizes[rank - 1]; }

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t dim = 0; dim < rank; ++dim) count *= sizes[dim];
    return count;
  }
};

Shape broadcast(const char* op, std::initializer_list<const Tensor*> tensors) {
  Shape shape{1, {}};
  for (const Tensor* tensor : tensors) {
    if (tensor != nullptr) shape.rank = std::max(shape.rank, tensor->dim());
  }
  STD_TORCH_CHECK(shape.rank <= kMaxRank, op, ": more than ", kMaxRank, " dimensions");
  std::fill_n(shape.sizes.begin(), shape.rank, 1);
  for (const Tensor* tensor : tensors) {
    if (tensor == nullptr) continue;
    const auto sizes = tensor->sizes();
    const int64_t added = shape.rank - static_cast<int64_t>(sizes.size());
    for (int64_t dim = added; dim < shape.rank; ++dim) {
      const int64_t size = sizes[dim - added];
      if (size == 1) continue;
      STD_TORCH_CHECK(shape.sizes[dim] == 1 || shape.sizes[dim] == size, op, ": the size of tensor a (",
                      shape.sizes[dim], ") must match the size of tensor b (", size, ") at non-singleton dimension ",
                      dim);
      shape.sizes[dim] = size;
    }
  }
  return shape;
}

const Tensor* pointer_to(const OptionalTensor& tensor) { return tensor.has_value() ? &*tensor : nullptr; }

// The dtype of a chain of torch ops that begins at `type` and takes in the operand; a scalar does not widen it.
ScalarType promote(ScalarType type, const Tensor* operand) {
  if (operand == nullptr || operand->dim() == 0) return type;
  return operand->scalar_type() == type ? type : ScalarType::Float;
}

// A call on its way from tensors to ModulateParams. It keeps the copies alive that had to be made.
class Call {
 public:
  Call(const char* op, const Shape& shape, const Tensor& on) : op_(op), shape_(shape), on_(on) {
    params.size = shape.last();
    params.inverse_size = static_cast<float>(1.0 / static_cast<double>(shape.last()));
  }

  ModulateParams params{};

  void set(MappedOperand index, const Tensor* tensor, const char* name) {
    if (tensor == nullptr) return;
    check_device(*tensor, name);
    tensors_[index] = tensor;
    operand(index) = Operand{nullptr, dtype_of(tensor->scalar_type(), op_, name), 0, false};
  }

  void set_parameter(Operand* parameter, const OptionalTensor& tensor, const char* name) {
    if (!tensor.has_value()) return;
    check_device(*tensor, name);
    STD_TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == shape_.last(), op_, ": ", name, " must have shape [",
                    shape_.last(), "], the size of the last dimension of x");
    *parameter = Operand{tensor->const_data_ptr(), dtype_of(tensor->scalar_type(), op_, name),
                         shape_.last() > 1 ? tensor->stride(0) : 1, false};
  }

#if defined(DIFFKERN_ROWS8)
  Rows8 rows8() {
    STD_TORCH_CHECK(shape_.last() > 0, op_, ": a row needs elements to find its scale from");
    Rows8 rows(on_, shape_.rank, shape_.sizes.data());
    params.rows8 = rows.data();
    params.row_scales = rows.scale_data();
    return rows;
  }
#endif

  Tensor output(ScalarType type) const { return empty_contiguous(on_, shape_.rank, shape_.sizes.data(), type); }

  void run() {
    if (shape_.numel() == 0) return;
#if defined(DIFFKERN_GPU)
    // A row across memory is read once to be laid out, rather than in single elements by the kernel.
    for (const MappedOperand index : {kX, kResidual}) {
      const Tensor* tensor = tensors_[index];
      if (tensor != nullptr && params.size > 1 && tensor->stride(tensor->dim() - 1) > 1) {
        copies_[index] = torch::stable::contiguous(*tensor);
        tensors_[index] = &*copies_[index];
      }
    }
#endif
    if (!make_map()) {
      // More loops over rows than a kernel has: by way of operands that are laid out like the output.
      for (int index = kX; index < kMappedOperands; ++index) {
        if (tensors_[index] == nullptr) continue;
        Tensor copy = output(tensors_[index]->scalar_type());
        torch::stable::copy_(copy, *tensors_[index]);
        copies_[index] = copy;
        tensors_[index] = &*copies_[index];
      }
      STD_TORCH_CHECK(make_map(), op_, ": contiguous operands need one loop");
    }
#if defined(DIFFKERN_GPU)
    launch_on_device_of(on_, op_, [this](void* stream) { return modulate_gpu(params, stream); });
#else
    torch::stable::parallel_for(0, params.map.rows, std::max<int64_t>(1, kGrain / params.size),
                                [this](int64_t begin, int64_t end) { modulate_cpu(params, begin, end); });
#endif
  }

 private:
  Operand& operand(int index) {
    switch (index) {
      case kX: return params.x;
      case kResidual: return params.residual;
      case kGate: return params.gate;
      case kScale: return params.scale;
      default: return params.shift;
    }
  }

  void check_device(const Tensor& tensor, const char* name) const {
    STD_TORCH_CHECK(tensor.is_cpu() == on_.is_cpu() && tensor.get_device_index() == on_.get_device_index(), op_, ": ",
                    name, " and the input are on different devices");
  }

  // Fills in what depends on layouts; false if the operands need more loops than the map has.
  bool make_map() {
    std::array<std::array<int64_t, kMaxRank>, kMappedOperands> strides;
    const int64_t* pointers[kMappedOperands];
    int64_t contiguous = 1;
    for (int64_t dim = shape_.rank - 1; dim >= 0; --dim) {
      strides[kOut][dim] = contiguous;
      contiguous *= shape_.sizes[dim];
    }
    pointers[kOut] = strides[kOut].data();
    for (int index = kX; index < kMappedOperands; ++index) {
      pointers[index] = strides[index].data();
      const Tensor* tensor = tensors_[index];
      if (tensor == nullptr) {
        std::fill_n(strides[index].begin(), shape_.rank, 0);
        continue;
      }
      broadcast_strides(static_cast<int>(tensor->dim()), tensor->sizes().data(), tensor->strides().data(),
                        static_cast<int>(shape_.rank), shape_.sizes.data(), strides[index].data());
      operand(index).data = tensor->const_data_ptr();
      operand(index).stride = params.size > 1 ? strides[index][shape_.rank - 1] : 1;
    }
    return make_leading_map(
        static_cast<int>(shape_.rank) - 1, shape_.sizes.data(),
        {pointers[kOut], pointers[kX], pointers[kResidual], pointers[kGate], pointers[kScale], pointers[kShift]},
        &params.map);
  }

  const char* op_;
  const Shape& shape_;
  const Tensor& on_;
  std::array<const Tensor*, kMappedOperands> tensors_{};
  std::array<OptionalTensor, kMappedOperands> copies_;
};

template <typename Kind>
Kind kind_of(int64_t code, int64_t count, const char* op, const char* name) {
  STD_TORCH_CHECK(code >= 0 && code < count, op, ": ", name, " is ", code, ", and must be below ", count);
  return static_cast<Kind>(code);
}

// What comes before the norm. Returns the dtype of residual + act(gate) * x.
ScalarType set_gating(Call& call, const char* op, const Tensor& residual, const Tensor& x, const OptionalTensor& gate,
                      int64_t activation, bool round_each) {
  ModulateParams& p = call.params;
  p.activation = kind_of<GateActivation>(activation, 3, op, "gate_activation");
  call.set(kResidual, &residual, "residual");
  call.set(kX, &x, "x");
  call.set(kGate, pointer_to(gate), "gate");
  // A tensor without dimensions does not widen one that has some.
  const bool scalar_x = x.dim() == 0;
  const bool scalar_gate = !gate.has_value() || gate->dim() == 0;
  const ScalarType gated =
      scalar_x && !scalar_gate ? gate->scalar_type() : promote(x.scalar_type(), pointer_to(gate));
  const bool as_residual = gated == residual.scalar_type() || (scalar_x && scalar_gate);
  const ScalarType sum = as_residual ? residual.scalar_type() : ScalarType::Float;
  if (round_each) {
    p.round_each = true;
    p.gate_round = p.gate.dtype;
    p.gated_round = dtype_of(gated, op, "gate * x");
    p.sum_round = dtype_of(sum, op, "residual + gate * x");
  }
  return sum;
}

// The norm of a value of `type` and what comes after. Returns the dtype of norm * (1 + scale) + shift.
ScalarType set_modulation(Call& call, const char* op, ScalarType type, const OptionalTensor& scale,
                          const OptionalTensor& shift, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps, int64_t norm, double scale_offset, bool round_each) {
  ModulateParams& p = call.params;
  p.norm = kind_of<NormKind>(norm, 3, op, "norm");
  p.eps = static_cast<float>(eps);
  p.scale_offset = static_cast<float>(scale_offset);
  call.set(kScale, pointer_to(scale), "scale");
  call.set(kShift, pointer_to(shift), "shift");
  call.set_parameter(&p.weight, weight, "weight");
  call.set_parameter(&p.bias, bias, "bias");
  const ScalarType product = promote(type, pointer_to(scale));
  const ScalarType modulated = promote(product, pointer_to(shift));
  if (round_each) {
    p.round_each = true;
    p.norm_round = dtype_of(type, op, "x");
    p.scale_round = p.scale.dtype;
    p.product_round = dtype_of(product, op, "x * scale");
    p.modulated_round = dtype_of(modulated, op, "x * scale + shift");
  }
  return modulated;
}

void check_norm_shape(const char* op, const Tensor& x, const Shape& shape, int64_t norm) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  STD_TORCH_CHECK(norm == 0 || x.size(x.dim() - 1) == shape.last(), op, ": the norm is over a last dimension of size ",
                  x.size(x.dim() - 1), ", and the modulation has size ", shape.last(), " there");
}

// `before` is called with what is about to run.
template <typename Before>
Tensor norm_modulate_with(const char* kOp, const Tensor& x, const OptionalTensor& scale, const OptionalTensor& shift,
                          const OptionalTensor& weight, const OptionalTensor& bias, double eps, int64_t norm,
                          double scale_offset, bool round_each, std::optional<ScalarType> out_dtype, Before&& before) {
  const Shape shape = broadcast(kOp, {&x, pointer_to(scale), pointer_to(shift)});
  check_norm_shape(kOp, x, shape, norm);
  Call call(kOp, shape, x);
  call.set(kX, &x, "x");
  const ScalarType type =
      set_modulation(call, kOp, x.scalar_type(), scale, shift, weight, bias, eps, norm, scale_offset, round_each);
  call.params.out_dtype = dtype_of(out_dtype.value_or(type), kOp, "out_dtype");
  Tensor out = call.output(out_dtype.value_or(type));
  call.params.out = out.mutable_data_ptr();
  before(call);
  call.run();
  return out;
}

Tensor norm_modulate(Tensor x, OptionalTensor scale, OptionalTensor shift, OptionalTensor weight, OptionalTensor bias,
                     double eps = 1e-6, int64_t norm = 1, double scale_offset = 1, bool round_each = false,
                     std::optional<ScalarType> out_dtype = std::nullopt) {
  return norm_modulate_with("norm_modulate", x, scale, shift, weight, bias, eps, norm, scale_offset, round_each,
                            out_dtype, [](Call&) {});
}

Tensor gate_residual(Tensor residual, Tensor x, OptionalTensor gate, int64_t gate_activation = 0,
                     bool round_each = false, std::optional<ScalarType> out_dtype = std::nullopt) {
  constexpr const char* kOp = "gate_residual";
  STD_TORCH_CHECK(residual.dim() >= 1, kOp, ": the residual must have at least one dimension");
  const Shape shape = broadcast(kOp, {&residual, &x, pointer_to(gate)});
  Call call(kOp, shape, residual);
  const ScalarType type = set_gating(call, kOp, residual, x, gate, gate_activation, round_each);
  call.params.new_dtype = dtype_of(out_dtype.value_or(type), kOp, "out_dtype");
  Tensor out = call.output(out_dtype.value_or(type));
  call.params.new_residual = out.mutable_data_ptr();
  call.run();
  return out;
}

void check_modulation(const char* op, const OptionalTensor& scale, const OptionalTensor& shift, const Shape& shape) {
  for (const Tensor* operand : {pointer_to(scale), pointer_to(shift)}) {
    if (operand == nullptr) continue;
    std::array<int64_t, kMaxRank> strides;
    STD_TORCH_CHECK(broadcast_strides(static_cast<int>(operand->dim()), operand->sizes().data(),
                                      operand->strides().data(), static_cast<int>(shape.rank), shape.sizes.data(),
                                      strides.data()),
                    op, ": a modulation does not broadcast to the shape of the new residual; ",
                    "if it is larger, call gate_residual and norm_modulate one after the other");
  }
}

template <typename Before>
std::tuple<Tensor, Tensor> gate_residual_norm_modulate_with(
    const char* kOp, const Tensor& residual, const Tensor& x, const OptionalTensor& gate, const OptionalTensor& scale,
    const OptionalTensor& shift, const OptionalTensor& weight, const OptionalTensor& bias, double eps, int64_t norm,
    int64_t gate_activation, double scale_offset, bool round_each, std::optional<ScalarType> residual_dtype,
    std::optional<ScalarType> out_dtype, Before&& before) {
  STD_TORCH_CHECK(residual.dim() >= 1, kOp, ": the residual must have at least one dimension");
  const Shape shape = broadcast(kOp, {&residual, &x, pointer_to(gate)});
  check_modulation(kOp, scale, shift, shape);
  Call call(kOp, shape, residual);
  const ScalarType sum = set_gating(call, kOp, residual, x, gate, gate_activation, round_each);
  const ScalarType new_type = residual_dtype.value_or(sum);
  const ScalarType type =
      set_modulation(call, kOp, new_type, scale, shift, weight, bias, eps, norm, scale_offset, round_each);
  call.params.new_dtype = dtype_of(new_type, kOp, "residual_dtype");
  call.params.out_dtype = dtype_of(out_dtype.value_or(type), kOp, "out_dtype");
  Tensor new_residual = call.output(new_type);
  Tensor out = call.output(out_dtype.value_or(type));
  call.params.new_residual = new_residual.mutable_data_ptr();
  call.params.out = out.mutable_data_ptr();
  before(call);
  call.run();
  return {new_residual, out};
}

std::tuple<Tensor, Tensor> gate_residual_norm_modulate(
    Tensor residual, Tensor x, OptionalTensor gate, OptionalTensor scale, OptionalTensor shift, OptionalTensor weight,
    OptionalTensor bias, double eps = 1e-6, int64_t norm = 1, int64_t gate_activation = 0, double scale_offset = 1,
    bool round_each = false, std::optional<ScalarType> residual_dtype = std::nullopt,
    std::optional<ScalarType> out_dtype = std::nullopt) {
  return gate_residual_norm_modulate_with("gate_residual_norm_modulate", residual, x, gate, scale, shift, weight, bias,
                                          eps, norm, gate_activation, scale_offset, round_each, residual_dtype,
                                          out_dtype, [](Call&) {});
}

#if defined(DIFFKERN_ROWS8)
std::tuple<Tensor, Tensor> norm_modulate_fp8(Tensor x, OptionalTensor scale, OptionalTensor shift,
                                             OptionalTensor weight, OptionalTensor bias, double eps = 1e-6,
                                             int64_t norm = 1) {
  constexpr const char* kOp = "norm_modulate_fp8";
  const Shape shape = broadcast(kOp, {&x, pointer_to(scale), pointer_to(shift)});
  check_norm_shape(kOp, x, shape, norm);
  Call call(kOp, shape, x);
  call.set(kX, &x, "x");
  set_modulation(call, kOp, x.scalar_type(), scale, shift, weight, bias, eps, norm, 1.0, false);
  Rows8 rows = call.rows8();
  call.run();
  return {rows.values, rows.scales};
}

std::tuple<Tensor, Tensor, Tensor> gate_residual_norm_modulate_fp8(Tensor residual, Tensor x, OptionalTensor gate,
                                                                   OptionalTensor scale, OptionalTensor shift,
                                                                   OptionalTensor weight, OptionalTensor bias,
                                                                   double eps = 1e-6, int64_t norm = 1) {
  constexpr const char* kOp = "gate_residual_norm_modulate_fp8";
  STD_TORCH_CHECK(residual.dim() >= 1, kOp, ": the residual must have at least one dimension");
  const Shape shape = broadcast(kOp, {&residual, &x, pointer_to(gate)});
  check_modulation(kOp, scale, shift, shape);
  Call call(kOp, shape, residual);
  const ScalarType sum = set_gating(call, kOp, residual, x, gate, 0, false);
  set_modulation(call, kOp, sum, scale, shift, weight, bias, eps, norm, 1.0, false);
  call.params.new_dtype = dtype_of(sum, kOp, "residual + gate * x");
  Tensor new_residual = call.output(sum);
  call.params.new_residual = new_residual.mutable_data_ptr();
  Rows8 rows = call.rows8();
  call.run();
  return {new_residual, rows.values, rows.scales};
}

std::tuple<Tensor, Tensor, Tensor> norm_modulate_and_fp8(Tensor x, OptionalTensor scale, OptionalTensor shift,
                                                         OptionalTensor weight, OptionalTensor bias, double eps,
                                                         int64_t norm, double scale_offset, bool round_each,
                                                         std::optional<ScalarType> out_dtype) {
  std::optional<Rows8> rows;
  Tensor out = norm_modulate_with("norm_modulate_and_fp8", x, scale, shift, weight, bias, eps, norm, scale_offset,
                                  round_each, out_dtype, [&](Call& call) { rows = call.rows8(); });
  return {out, rows->values, rows->scales};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gate_residual_norm_modulate_and_fp8(
    Tensor residual, Tensor x, OptionalTensor gate, OptionalTensor scale, OptionalTensor shift, OptionalTensor weight,
    OptionalTensor bias, double eps, int64_t norm, int64_t gate_activation, double scale_offset, bool round_each,
    std::optional<ScalarType> residual_dtype, std::optional<ScalarType> out_dtype) {
  std::optional<Rows8> rows;
  auto [new_residual, out] = gate_residual_norm_modulate_with(
      "gate_residual_norm_modulate_and_fp8", residual, x, gate, scale, shift, weight, bias, eps, norm, gate_activation,
      scale_offset, round_each, residual_dtype, out_dtype, [&](Call& call) { rows = call.rows8(); });
  return {new_residual, out, rows->values, rows->scales};
}

std::tuple<Tensor, Tensor> norm_modulate_fp8_plain(Tensor x, OptionalTensor scale, OptionalTensor shift) {
  return norm_modulate_fp8(x, scale, shift, std::nullopt, std::nullopt);
}

std::tuple<Tensor, Tensor, Tensor> gate_residual_norm_modulate_fp8_plain(Tensor residual, Tensor x, OptionalTensor gate,
                                                                         OptionalTensor scale, OptionalTensor shift) {
  return gate_residual_norm_modulate_fp8(residual, x, gate, scale, shift, std::nullopt, std::nullopt);
}
#endif

// Every option as it is by default, no parameters: a call from Python pays for each argument of a schema.
Tensor norm_modulate_plain(Tensor x, OptionalTensor scale, OptionalTensor shift) {
  return norm_modulate(x, scale, shift, std::nullopt, std::nullopt);
}

Tensor gate_residual_plain(Tensor residual, Tensor x, OptionalTensor gate) { return gate_residual(residual, x, gate); }

std::tuple<Tensor, Tensor> gate_residual_norm_modulate_plain(Tensor residual, Tensor x, OptionalTensor gate,
                                                             OptionalTensor scale, OptionalTensor shift) {
  return gate_residual_norm_modulate(residual, x, gate, scale, shift, std::nullopt, std::nullopt);
}

}  // namespace

DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def("norm_modulate_plain(Tensor x, Tensor? scale=None, Tensor? shift=None) -> Tensor");
  m.def("gate_residual_plain(Tensor residual, Tensor x, Tensor? gate=None) -> Tensor");
  m.def(
      "gate_residual_norm_modulate_plain(Tensor residual, Tensor x, Tensor? gate=None, Tensor? scale=None, "
      "Tensor? shift=None) -> (Tensor, Tensor)");
  m.def(
      "norm_modulate(Tensor x, Tensor? scale=None, Tensor? shift=None, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-6, int norm=1, float scale_offset=1.0, bool round_each=False, ScalarType? out_dtype=None) "
      "-> Tensor");
  m.def(
      "gate_residual(Tensor residual, Tensor x, Tensor? gate=None, int gate_activation=0, bool round_each=False, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "gate_residual_norm_modulate(Tensor residual, Tensor x, Tensor? gate=None, Tensor? scale=None, "
      "Tensor? shift=None, Tensor? weight=None, Tensor? bias=None, float eps=1e-6, int norm=1, int gate_activation=0, "
      "float scale_offset=1.0, bool round_each=False, ScalarType? residual_dtype=None, ScalarType? out_dtype=None) "
      "-> (Tensor, Tensor)");
}

#if defined(DIFFKERN_ROWS8)
DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def("norm_modulate_fp8_plain(Tensor x, Tensor? scale=None, Tensor? shift=None) -> (Tensor, Tensor)");
  m.def(
      "gate_residual_norm_modulate_fp8_plain(Tensor residual, Tensor x, Tensor? gate=None, Tensor? scale=None, "
      "Tensor? shift=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "norm_modulate_fp8(Tensor x, Tensor? scale=None, Tensor? shift=None, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-6, int norm=1) -> (Tensor, Tensor)");
  m.def(
      "gate_residual_norm_modulate_fp8(Tensor residual, Tensor x, Tensor? gate=None, Tensor? scale=None, "
      "Tensor? shift=None, Tensor? weight=None, Tensor? bias=None, float eps=1e-6, int norm=1) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "norm_modulate_and_fp8(Tensor x, Tensor? scale=None, Tensor? shift=None, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-6, int norm=1, float scale_offset=1.0, bool round_each=False, "
      "ScalarType? out_dtype=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "gate_residual_norm_modulate_and_fp8(Tensor residual, Tensor x, Tensor? gate=None, Tensor? scale=None, "
      "Tensor? shift=None, Tensor? weight=None, Tensor? bias=None, float eps=1e-6, int norm=1, int gate_activation=0, "
      "float scale_offset=1.0, bool round_each=False, ScalarType? residual_dtype=None, ScalarType? out_dtype=None) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("norm_modulate_and_fp8", TORCH_BOX(&norm_modulate_and_fp8));
  m.impl("gate_residual_norm_modulate_and_fp8", TORCH_BOX(&gate_residual_norm_modulate_and_fp8));
  m.impl("norm_modulate_fp8_plain", TORCH_BOX(&norm_modulate_fp8_plain));
  m.impl("gate_residual_norm_modulate_fp8_plain", TORCH_BOX(&gate_residual_norm_modulate_fp8_plain));
  m.impl("norm_modulate_fp8", TORCH_BOX(&norm_modulate_fp8));
  m.impl("gate_residual_norm_modulate_fp8", TORCH_BOX(&gate_residual_norm_modulate_fp8));
}
#endif

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("norm_modulate_plain", TORCH_BOX(&norm_modulate_plain));
  m.impl("gate_residual_plain", TORCH_BOX(&gate_residual_plain));
  m.impl("gate_residual_norm_modulate_plain", TORCH_BOX(&gate_residual_norm_modulate_plain));
  m.impl("norm_modulate", TORCH_BOX(&norm_modulate));
  m.impl("gate_residual", TORCH_BOX(&gate_residual));
  m.impl("gate_residual_norm_modulate", TORCH_BOX(&gate_residual_norm_modulate));
}

}  // namespace diffkern
