// norm_modulate, gate_residual and both in one as torch ops: checks, and what each asks of the kernels.
#include <array>
#include <tuple>

#include "modulate_call.h"

namespace diffkern {
namespace {

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
                          double scale_offset, bool round_each, std::optional<ScalarType> out_dtype, Before&& before,
                          Room room = {}) {
  const Shape shape = broadcast(kOp, {&x, pointer_to(scale), pointer_to(shift)});
  check_norm_shape(kOp, x, shape, norm);
  Call call(kOp, shape, x);
  call.set(kX, &x, "x");
  const ScalarType type =
      set_modulation(call, kOp, x.scalar_type(), scale, shift, weight, bias, eps, norm, scale_offset, round_each);
  call.params.out_dtype = dtype_of(out_dtype.value_or(type), kOp, "out_dtype");
  Tensor out = call.output(out_dtype.value_or(type), room);
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
    std::optional<ScalarType> out_dtype, Before&& before, Room room = {}) {
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
  Tensor out = call.output(out_dtype.value_or(type), room);
  call.params.new_residual = new_residual.mutable_data_ptr();
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

// The same with room around the rows of each sample: the memory, whose other rows hold nothing.
Tensor norm_modulate_room(Tensor x, OptionalTensor scale, OptionalTensor shift, OptionalTensor weight,
                          OptionalTensor bias, double eps, int64_t norm, double scale_offset, bool round_each,
                          std::optional<ScalarType> out_dtype, int64_t before, int64_t behind) {
  return norm_modulate_with("norm_modulate_room", x, scale, shift, weight, bias, eps, norm, scale_offset, round_each,
                            out_dtype, [](Call&) {}, {before, behind});
}

std::tuple<Tensor, Tensor> gate_residual_norm_modulate_room(
    Tensor residual, Tensor x, OptionalTensor gate, OptionalTensor scale, OptionalTensor shift, OptionalTensor weight,
    OptionalTensor bias, double eps, int64_t norm, int64_t gate_activation, double scale_offset, bool round_each,
    std::optional<ScalarType> residual_dtype, std::optional<ScalarType> out_dtype, int64_t before, int64_t behind) {
  return gate_residual_norm_modulate_with("gate_residual_norm_modulate_room", residual, x, gate, scale, shift, weight,
                                          bias, eps, norm, gate_activation, scale_offset, round_each, residual_dtype,
                                          out_dtype, [](Call&) {}, {before, behind});
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
  m.def(
      "norm_modulate_room(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, int norm, "
      "float scale_offset, bool round_each, ScalarType? out_dtype, int before, int behind) -> Tensor");
  m.def(
      "gate_residual_norm_modulate_room(Tensor residual, Tensor x, Tensor? gate, Tensor? scale, Tensor? shift, "
      "Tensor? weight, Tensor? bias, float eps, int norm, int gate_activation, float scale_offset, bool round_each, "
      "ScalarType? residual_dtype, ScalarType? out_dtype, int before, int behind) -> (Tensor, Tensor)");
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
  m.impl("norm_modulate_room", TORCH_BOX(&norm_modulate_room));
  m.impl("gate_residual_norm_modulate_room", TORCH_BOX(&gate_residual_norm_modulate_room));
  m.impl("gate_residual", TORCH_BOX(&gate_residual));
  m.impl("gate_residual_norm_modulate", TORCH_BOX(&gate_residual_norm_modulate));
}

}  // namespace diffkern
