// rope, rope_3d, qk_norm_rope and joint_qk_norm_rope as torch ops: checks, the output tensors, and the way to the kernels.
#include <algorithm>
#include <array>
#include <tuple>

#include "../common/torch_binding.h"
#include "rope.h"

namespace diffkern {
namespace {

// Elements that are worth a thread of their own on the CPU.
constexpr int64_t kGrain = 16384;
// The longest head that one wave of a GPU normalises, where pairs are neighbours.
constexpr int64_t kLongHeadBytes = 512;

using Dims = std::array<int64_t, kMaxRank + 1>;
using Tables = std::vector<Tensor>;

// The options that q and k share.
struct Rotation {
  const std::optional<Tensor>& coords;
  const std::vector<int64_t>& grid;
  bool half;
  int64_t rotary_dim;
  int64_t seq_dim;
  int64_t start;
  int64_t length;

  bool axes() const { return coords.has_value() || !grid.empty(); }
};

// A tensor as rows of a head each, whose heads may not be split yet.
struct Heads {
  int64_t rank;
  Dims sizes;
  Dims strides;

  Heads(const Tensor& x, int64_t head_dim) : rank(x.dim()) {
    for (int64_t dim = 0; dim < rank; ++dim) {
      sizes[dim] = x.size(dim);
      strides[dim] = x.stride(dim);
    }
    if (head_dim != 0 && sizes[rank - 1] >= 0) {
      sizes[rank] = head_dim;
      strides[rank] = strides[rank - 1];
      sizes[rank - 1] = head_dim > 0 ? sizes[rank - 1] / head_dim : 0;
      strides[rank - 1] *= head_dim;
      ++rank;
    }
  }

  int64_t leading() const { return rank - 1; }
};

Dtype rope_dtype_of(ScalarType type, const char* op, const char* name) {
  return type == ScalarType::Double ? Dtype::kFloat64 : dtype_of(type, op, name);
}

void check_beside(const Tensor& tensor, const Tensor& x, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.is_cuda() == x.is_cuda() && tensor.is_cpu() == x.is_cpu() &&
                      tensor.get_device_index() == x.get_device_index(),
                  op, ": ", name, " and the input are on different devices");
}

// The GPU kernels that are fast read float32 tables.
Tensor readable(const Tensor& table) {
#if defined(DIFFKERN_GPU)
  const ScalarType type = table.scalar_type();
  if (type == ScalarType::Half || type == ScalarType::BFloat16) return torch::stable::to(table, ScalarType::Float);
#endif
  return table;
}

Tensor readable_rows(const Tensor& table) {
  const Tensor plain = readable(table);
  return plain.is_contiguous() ? plain : torch::stable::contiguous(plain);
}

Dtype add_parameter(const std::optional<Tensor>& parameter, const Tensor& x, const char* op, const char* name,
                    const void** data, Tables* keep) {
  const auto plain = checked_parameter(parameter, x, x.size(x.dim() - 1), op, name);
  if (!plain.has_value()) return Dtype::kNone;
  *data = plain->const_data_ptr();
  keep->push_back(*plain);  // it may be a copy
  return dtype_of(plain->scalar_type(), op, name);
}

// One full table: its strides along the leading dimensions of what is rotated.
void add_full(const Tensor& table, const Tensor& x, const Heads& rows, const Dims& span, const RopeParams& params,
              const char* op, const char* name, int64_t* strides, int64_t* step, bool* compact) {
  check_beside(table, x, op, name);
  const int64_t rank = table.dim();
  const int64_t last = rank > 0 ? table.size(rank - 1) : 0;
  STD_TORCH_CHECK(rank > 0 && (last == params.rotary || last == params.rotary / 2), op, ": ", name, " has ", last,
                  " columns, and ", params.rotary, " elements are rotated");
  STD_TORCH_CHECK(broadcast_strides(static_cast<int>(rank - 1), table.sizes().data(), table.strides().data(),
                                    static_cast<int>(rows.leading()), span.data(), strides),
                  op, ": ", name, " does not broadcast to the rows that are rotated");
  *step = last > 1 ? table.stride(rank - 1) : 1;
  *compact = last != params.rotary;
}

// The tables of the axes: widths and sizes in params, pointers in the operand, strides of coordinates and heads.
void add_axes(const Tables& cos, const Tables& sin, const Rotation& rotation, const Tensor& x, const Heads& rows,
              const char* op, RopeParams* params, RopeOperand* o, int64_t* coords_strides, int64_t* head_strides,
              Tables* keep) {
  const int64_t axes = static_cast<int64_t>(cos.size());
  STD_TORCH_CHECK(axes <= kMaxAxes && cos.size() == sin.size(), op, ": there are tables of 1 to ", kMaxAxes,
                  " axes, as many cosines as sines");
  int64_t pairs = params->front_pad;
  for (int64_t axis = 0; axis < axes; ++axis) {
    check_beside(cos[axis], x, op, "a table");
    check_beside(sin[axis], x, op, "a table");
    STD_TORCH_CHECK(cos[axis].dim() == 2 && sin[axis].dim() == 2 && cos[axis].size(0) == sin[axis].size(0) &&
                        cos[axis].size(1) == sin[axis].size(1),
                    op, ": the tables of an axis must both be [positions, pairs]");
    STD_TORCH_CHECK(cos[axis].scalar_type() == cos[0].scalar_type() && sin[axis].scalar_type() == cos[0].scalar_type(),
                    op, ": the tables of all axes must have one dtype");
    STD_TORCH_CHECK(cos[axis].numel() <= INT32_MAX, op, ": the table of an axis has more than 2^31 elements");
    params->widths[axis] = static_cast<int>(cos[axis].size(1));
    params->sizes[axis] = cos[axis].size(0);
    STD_TORCH_CHECK(!params->alternating || params->widths[axis] == params->widths[0], op,
                    ": axes can alternate only if their tables have as many columns");
    pairs += params->widths[axis];
    keep->push_back(readable_rows(cos[axis]));
    o->cos[axis] = keep->back().const_data_ptr();
    keep->push_back(readable_rows(sin[axis]));
    o->sin[axis] = keep->back().const_data_ptr();
    o->cos_dtype = o->sin_dtype = rope_dtype_of(keep->back().scalar_type(), op, "a table");
  }
  params->axes = static_cast<int>(axes);
  o->compact_cos = o->compact_sin = true;

  const int64_t own = params->rotary / 2;
  const int64_t heads_dim = 3 - rotation.seq_dim;
  if (pairs != own) {
    STD_TORCH_CHECK(rows.rank == 4 && (heads_dim == 1 || heads_dim == 2) && pairs == own * rows.sizes[heads_dim] &&
                        params->rotary == params->head_dim, op,
                    ": the axes have ", pairs, " pairs, and ", own, " are rotated in each head");
    head_strides[heads_dim] = own;
  }

  const int64_t seq_dim = rotation.seq_dim;
  const int64_t tokens = params->partial ? params->length : rows.sizes[seq_dim];
  if (!rotation.coords.has_value()) {
    STD_TORCH_CHECK(static_cast<int64_t>(rotation.grid.size()) == axes, op, ": the grid must have ", axes, " axes");
    int64_t product = 1;
    for (int64_t axis = 0; axis < axes; ++axis) {
      STD_TORCH_CHECK(rotation.grid[axis] >= 0 && rotation.grid[axis] <= params->sizes[axis] && tokens <= INT32_MAX, op,
                      ": the grid is larger than a table");
      params->grid[axis] = make_divisor(static_cast<uint32_t>(std::max<int64_t>(1, rotation.grid[axis])));
      product *= rotation.grid[axis];
    }
    STD_TORCH_CHECK(product == tokens, op, ": the grid has ", product, " positions for ", tokens, " tokens");
    return;
  }
  const Tensor& coords = *rotation.coords;
  check_beside(coords, x, op, "coords");
  const int64_t rank = coords.dim();
  STD_TORCH_CHECK((rank == 2 || rank == 3) && coords.size(rank - 1) == axes && coords.size(rank - 2) == tokens &&
                      (rank == 2 || (seq_dim > 0 && (coords.size(0) == 1 || coords.size(0) == rows.sizes[0]))),
                  op, ": coords must be [tokens, axes] or [batch, tokens, axes]");
  o->wide_coords = coords.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(o->wide_coords || coords.scalar_type() == ScalarType::Int, op, ": coords must be int32 or int64");
  o->coords = coords.const_data_ptr();
  o->first_step = coords.stride(rank - 1);
  o->first_shift = rotation.start * coords.stride(rank - 2);
  coords_strides[seq_dim] = coords.stride(rank - 2);
  if (rank == 3 && coords.size(0) > 1) coords_strides[0] = coords.stride(0);
}

// Chooses the innermost loop and merges the others; false if too many are left. `split`: the last dimension is that of
// the heads of a token.
bool arrange(const RopeParams& params, bool split, const Heads& x, const Heads& out, const int64_t* first,
             const int64_t* second, const int64_t* token, RopeOperand* o) {
  const int leading = static_cast<int>(x.leading());
  const std::array<const int64_t*, kRopeStrides> strides{x.strides.data(), out.strides.data(), first, second, token};
  int inner = -1;
  if (params.across) {
    inner = split ? leading - 1 : -1;
  } else {
    const auto shared = [&](int dim) { return first[dim] == 0 && second[dim] == 0 && token[dim] == 0; };
    for (int dim = 0; dim < leading; ++dim) {
      if (x.sizes[dim] == 1) continue;
      const bool better = inner < 0 || (shared(dim) != shared(inner) ? shared(dim) : x.strides[dim] < x.strides[inner]);
      if (better) inner = dim;
    }
  }
  o->inner = inner < 0 ? 1 : x.sizes[inner];
  Dims sizes;
  std::array<Dims, kRopeStrides> others;
  int count = 0;
  for (int dim = 0; dim < leading; ++dim) {
    if (dim == inner) continue;
    sizes[count] = x.sizes[dim];
    for (int i = 0; i < kRopeStrides; ++i) others[i][count] = strides[i][dim];
    ++count;
  }
  for (int i = 0; i < kRopeStrides; ++i) o->inner_strides[i] = inner < 0 ? 0 : strides[i][inner];
  o->inverse_size = 1.0f / (static_cast<float>(params.across ? o->inner : 1) * static_cast<float>(params.head_dim));
  if (!make_leading_map<kRopeStrides>(
          count, sizes.data(),
          {others[0].data(), others[1].data(), others[2].data(), others[3].data(), others[4].data()}, &o->outer)) {
    return false;
  }
  for (int dim = 0; dim < o->outer.dims; ++dim) {
    o->outer_sizes[dim] = make_divisor(static_cast<uint32_t>(std::clamp<int64_t>(o->outer.sizes[dim], 1, INT32_MAX)));
  }
  return true;
}

// Fills in one of q and k; false if its rows lie in more loops than a kernel can step through.
bool add_operand(const Tensor& x, const Tensor& out, const std::optional<Tensor>& weight,
                 const std::optional<Tensor>& bias, const Tables& cos, const Tables& sin, const Rotation& rotation,
                 bool split, const char* op, RopeParams* params, Tables* keep) {
  RopeOperand& o = params->operands[params->count];
  o = RopeOperand{};
  const Heads rows(x, split ? params->head_dim : 0);
  const Heads out_rows(out, split ? params->head_dim : 0);
  o.x = x.const_data_ptr();
  o.out = out.mutable_data_ptr();
  o.x_step = params->head_dim > 1 ? rows.strides[rows.leading()] : 1;
  o.out_step = params->head_dim > 1 ? out_rows.strides[rows.leading()] : 1;
  o.weight_dtype = add_parameter(weight, x, op, "weight", &o.weight, keep);
  o.bias_dtype = add_parameter(bias, x, op, "bias", &o.bias, keep);

  Dims first{}, second{}, token{};
  if (params->tables != RopeTables::kNone) {
    STD_TORCH_CHECK(!cos.empty() && !sin.empty(), op, ": q and k both need tables");
    const bool counted = params->partial || params->tables == RopeTables::kAxes;
    if (counted) {
      STD_TORCH_CHECK(rotation.seq_dim >= 0 && rotation.seq_dim < rows.leading(), op, ": seq_dim is out of range");
      token[rotation.seq_dim] = 1;
    }
    if (params->partial) {
      STD_TORCH_CHECK(rotation.start >= 0 && rotation.start + rotation.length <= rows.sizes[rotation.seq_dim], op,
                      ": the tokens to rotate are not all among those of the input");
    }
    if (params->tables == RopeTables::kAxes) {
      add_axes(cos, sin, rotation, x, rows, op, params, &o, first.data(), second.data(), keep);
    } else {
      Dims span = rows.sizes;
      if (params->partial) span[rotation.seq_dim] = rotation.length;
      const Tensor plain_cos = readable(cos[0]);
      const Tensor plain_sin = readable(sin[0]);
      add_full(plain_cos, x, rows, span, *params, op, "cos", first.data(), &o.first_step, &o.compact_cos);
      add_full(plain_sin, x, rows, span, *params, op, "sin", second.data(), &o.second_step, &o.compact_sin);
      o.cos_dtype = rope_dtype_of(plain_cos.scalar_type(), op, "cos");
      o.sin_dtype = rope_dtype_of(plain_sin.scalar_type(), op, "sin");
      o.cos[0] = plain_cos.const_data_ptr();
      o.sin[0] = plain_sin.const_data_ptr();
      keep->push_back(plain_cos);
      keep->push_back(plain_sin);
      if (params->partial) {
        o.first_shift = rotation.start * first[rotation.seq_dim];
        o.second_shift = rotation.start * second[rotation.seq_dim];
      }
    }
  }
  if (!arrange(*params, split, rows, out_rows, first.data(), second.data(), token.data(), &o)) return false;
  if (x.numel() > 0) ++params->count;
  return true;
}

void launch(const RopeParams& params, [[maybe_unused]] const Tensor& x, [[maybe_unused]] const char* op) {
  if (params.count == 0) return;
#if defined(DIFFKERN_GPU)
  launch_on_device_of(x, op, [&params](void* stream) { return rope_gpu(params, stream); });
#else
  for (int i = 0; i < params.count; ++i) {
    const RopeOperand& operand = params.operands[i];
    const int64_t work = params.work(operand);
    const int64_t elements = operand.rows() / work * params.head_dim;
    torch::stable::parallel_for(0, work, std::max<int64_t>(1, kGrain / elements), [&params, i](int64_t begin, int64_t end) {
      rope_cpu(params, i, begin, end);
    });
  }
#endif
}

RopeParams rope_params(const Tensor& x, int64_t head_dim, const Tables& cos, const Rotation& rotation,
                       int64_t arithmetic, const char* op) {
  RopeParams params{};
  params.dtype = rope_dtype_of(x.scalar_type(), op, "the input");
  STD_TORCH_CHECK(head_dim <= INT32_MAX, op, ": rows of ", head_dim, " elements are too long");
  params.head_dim = static_cast<int>(head_dim);
  params.rotary = rotation.rotary_dim > 0 ? static_cast<int>(rotation.rotary_dim) : params.head_dim;
  STD_TORCH_CHECK(params.rotary <= params.head_dim && params.rotary % 2 == 0, op, ": ", params.rotary,
                  " elements cannot be rotated in pairs in a row of ", params.head_dim);
  params.half = rotation.half;
  params.arithmetic = static_cast<RopeArithmetic>(arithmetic);
  STD_TORCH_CHECK(!rotation.coords.has_value() || rotation.grid.empty(), op, ": there are a grid and coordinates");
  params.tables = cos.empty() ? RopeTables::kNone : rotation.axes() ? RopeTables::kAxes : RopeTables::kFull;
  params.partial = params.tables != RopeTables::kNone && rotation.length >= 0;
  params.start = rotation.start;
  params.length = rotation.length;
  return params;
}

// Computes one tensor into another of its sizes; `build` adds its operand.
template <typename Build>
void run_into(const Tensor& x, const Tensor& out, const RopeParams& params, const char* op, Build&& build) {
  RopeParams filled = params;
  if (build(x, out, &filled)) {
    launch(filled, x, op);
    return;
  }
  const Tensor dense = torch::stable::contiguous(x);
  const Tensor result = empty_output(dense, x.scalar_type(), false);
  filled = params;
  STD_TORCH_CHECK(build(dense, result, &filled), op, ": the input has more dimensions that the tables tell apart than "
                  "the compiled kernels step through: make the tables as large as the input, and contiguous");
  launch(filled, dense, op);
  Tensor target = out;
  torch::stable::copy_(target, result);
}

Tensor rope(Tensor x, Tensor cos, Tensor sin, bool half, int64_t arithmetic, int64_t rotary_dim, int64_t seq_dim,
            int64_t start, int64_t length) {
  STD_TORCH_CHECK(x.dim() >= 1, "rope: the input must have at least one dimension");
  const std::vector<int64_t> no_grid;
  const std::optional<Tensor> no_coords;
  const Rotation rotation{no_coords, no_grid, half, rotary_dim, seq_dim, start, length};
  const Tables cos_tables{cos}, sin_tables{sin};
  const RopeParams params = rope_params(x, x.size(x.dim() - 1), cos_tables, rotation, arithmetic, "rope");
  Tables keep;
  const Tensor out = empty_output(x, x.scalar_type(), true);
  run_into(x, out, params, "rope", [&](const Tensor& from, const Tensor& to, RopeParams* filled) {
    return add_operand(from, to, std::nullopt, std::nullopt, cos_tables, sin_tables, rotation, false, "rope", filled, &keep);
  });
  return out;
}

Tensor rope_3d(Tensor x, Tables cos, Tables sin, std::optional<Tensor> coords, std::vector<int64_t> grid,
               bool alternating, int64_t front_pad, bool half, int64_t arithmetic, int64_t rotary_dim, int64_t seq_dim,
               int64_t start, int64_t length) {
  STD_TORCH_CHECK(x.dim() >= 2, "rope_3d: the input must have at least two dimensions");
  STD_TORCH_CHECK(!cos.empty(), "rope_3d: there are no tables");
  const Rotation rotation{coords, grid, half, rotary_dim, seq_dim, start, length};
  RopeParams params = rope_params(x, x.size(x.dim() - 1), cos, rotation, arithmetic, "rope_3d");
  STD_TORCH_CHECK(rotation.axes(), "rope_3d: there is neither a grid nor are there coordinates");
  params.alternating = alternating;
  params.front_pad = static_cast<int>(front_pad);
  Tables keep;
  const Tensor out = empty_output(x, x.scalar_type(), true);
  run_into(x, out, params, "rope_3d", [&](const Tensor& from, const Tensor& to, RopeParams* filled) {
    return add_operand(from, to, std::nullopt, std::nullopt, cos, sin, rotation, false, "rope_3d", filled, &keep);
  });
  return out;
}

// Queries and keys of one stream of tokens.
struct Stream {
  const Tensor& q;
  const Tensor& k;
  const std::optional<Tensor>& q_weight;
  const std::optional<Tensor>& k_weight;
  const std::optional<Tensor>& q_bias;
  const std::optional<Tensor>& k_bias;
  const Tables& cos;
  const Tables& sin;
  const Tables& cos_k;
  const Tables& sin_k;
};

RopeParams norm_params(const Stream& s, const Rotation& rotation, int64_t norm, double eps, int64_t heads,
                       bool round_norm, int64_t arithmetic, const char* op) {
  STD_TORCH_CHECK(s.q.dim() >= 1 && s.k.dim() >= 1, op, ": q and k must have at least one dimension");
  STD_TORCH_CHECK(s.q.scalar_type() == s.k.scalar_type(), op, ": q and k must have one dtype");
  check_beside(s.k, s.q, op, "k");
  const int64_t size = s.q.size(s.q.dim() - 1);
  const int64_t head_dim = heads > 0 ? size / heads : size;
  const int64_t k_size = s.k.size(s.k.dim() - 1);
  STD_TORCH_CHECK(heads > 0 ? size % heads == 0 && (head_dim > 0 ? k_size % head_dim == 0 : k_size == 0) : k_size == size,
                  op, ": the heads of q and k differ in size");
  for (const Tables* tables : {&s.cos, &s.sin, &s.cos_k, &s.sin_k}) {
    for (const Tensor& table : *tables) {
      STD_TORCH_CHECK(table.scalar_type() != ScalarType::Double, op, ": a table is float64, which only rope reads");
    }
  }
  RopeParams params = rope_params(s.q, head_dim, s.cos, rotation, arithmetic, op);
  STD_TORCH_CHECK(params.dtype != Dtype::kFloat64 || norm == 0, op, ": the compiled norms compute no float64");
  params.norm = static_cast<RopeNorm>(norm);
  // A long head is a token of one head: several waves normalise it together.
  const bool long_head = head_dim * bytes_of(params.dtype) > (rotation.half ? 2 : 1) * kLongHeadBytes;
  params.across = norm != 0 && (heads > 0 || long_head);
  params.eps = static_cast<float>(eps);
  params.round_norm = round_norm || params.arithmetic == RopeArithmetic::kInput;
  return params;
}

// Computes queries and keys into tensors of their sizes, which may be parts of larger ones: in one launch if it can.
void run_both(const Stream& s, const Tensor& q_out, const Tensor& k_out, const Rotation& rotation,
              const RopeParams& params, bool split, const char* op) {
  Tables keep;
  const auto build = [&](const Tensor& from, const Tensor& to, bool is_q, RopeParams* filled) {
    return add_operand(from, to, is_q ? s.q_weight : s.k_weight, is_q ? s.q_bias : s.k_bias, is_q ? s.cos : s.cos_k,
                       is_q ? s.sin : s.sin_k, rotation, split, op, filled, &keep);
  };
  RopeParams both = params;
  if (build(s.q, q_out, true, &both) && build(s.k, k_out, false, &both)) {
    launch(both, s.q, op);
    return;
  }
  const auto alone = [&](const Tensor& x, const Tensor& out, bool is_q) {
    run_into(x, out, params, op, [&](const Tensor& from, const Tensor& to, RopeParams* filled) {
      return build(from, to, is_q, filled);
    });
  };
  alone(s.q, q_out, true);
  alone(s.k, k_out, false);
}

std::tuple<Tensor, Tensor> qk_norm_rope(
    Tensor q, Tensor k, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight, std::optional<Tensor> q_bias,
    std::optional<Tensor> k_bias, Tables cos, Tables sin, Tables cos_k, Tables sin_k, std::optional<Tensor> coords,
    std::vector<int64_t> grid, bool alternating, int64_t front_pad, int64_t norm, double eps, int64_t heads,
    double weight_offset, std::optional<ScalarType> round_dtype, bool round_norm, bool half, int64_t arithmetic,
    int64_t rotary_dim, int64_t seq_dim, int64_t start, int64_t length) {
  const char* op = "qk_norm_rope";
  const Stream stream{q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, cos_k, sin_k};
  const Rotation rotation{coords, grid, half, rotary_dim, seq_dim, start, length};
  RopeParams params = norm_params(stream, rotation, norm, eps, heads, round_norm, arithmetic, op);
  params.alternating = alternating;
  params.front_pad = static_cast<int>(front_pad);
  params.weight_offset = static_cast<float>(weight_offset);
  if (round_dtype.has_value() && *round_dtype != ScalarType::Double) {
    params.round_dtype = dtype_of(*round_dtype, op, "round_dtype");
  }
  Tensor q_out = empty_output(q, q.scalar_type(), true);
  Tensor k_out = empty_output(k, k.scalar_type(), true);
  run_both(stream, q_out, k_out, rotation, params, heads > 0, op);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> joint_qk_norm_rope(
    Tensor q, Tensor k, Tensor q_2, Tensor k_2, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
    std::optional<Tensor> q_weight_2, std::optional<Tensor> k_weight_2, std::optional<Tensor> q_bias,
    std::optional<Tensor> k_bias, std::optional<Tensor> q_bias_2, std::optional<Tensor> k_bias_2, Tables cos,
    Tables sin, Tables cos_2, Tables sin_2, int64_t dim, int64_t norm, double eps, bool round_norm, bool half,
    int64_t arithmetic) {
  const char* op = "joint_qk_norm_rope";
  STD_TORCH_CHECK(q.scalar_type() == q_2.scalar_type(), op, ": the streams must have one dtype");
  check_beside(q_2, q, op, "q_2");
  const std::vector<int64_t> no_grid;
  const std::optional<Tensor> no_coords;
  const Rotation rotation{no_coords, no_grid, half, 0, 1, 0, -1};
  const Stream streams[]{{q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, cos, sin},
                         {q_2, k_2, q_weight_2, k_weight_2, q_bias_2, k_bias_2, cos_2, sin_2, cos_2, sin_2}};
  Tensor q_joint = empty_joint(q, q_2, dim, op);
  Tensor k_joint = empty_joint(k, k_2, dim, op);
  int64_t q_start = 0, k_start = 0;
  for (const Stream& s : streams) {
    const RopeParams params = norm_params(s, rotation, norm, eps, 0, round_norm, arithmetic, op);
    const Tensor q_part = torch::stable::narrow(q_joint, dim, q_start, s.q.size(dim));
    const Tensor k_part = torch::stable::narrow(k_joint, dim, k_start, s.k.size(dim));
    run_both(s, q_part, k_part, rotation, params, false, op);
    q_start += s.q.size(dim);
    k_start += s.k.size(dim);
  }
  return {q_joint, k_joint};
}

}  // namespace

DIFFKERN_LIBRARY(DIFFKERN_OPS, m) {
  m.def(
      "rope(Tensor x, Tensor cos, Tensor sin, bool half=False, int arithmetic=0, int rotary_dim=0, int seq_dim=0, "
      "SymInt start=0, SymInt length=-1) -> Tensor");
  m.def(
      "rope_3d(Tensor x, Tensor[] cos, Tensor[] sin, Tensor? coords, SymInt[] grid, bool alternating=False, "
      "int front_pad=0, bool half=False, int arithmetic=0, int rotary_dim=0, int seq_dim=1, SymInt start=0, "
      "SymInt length=-1) -> Tensor");
  m.def(
      "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, "
      "Tensor[] cos, Tensor[] sin, Tensor[] cos_k, Tensor[] sin_k, Tensor? coords, SymInt[] grid, "
      "bool alternating=False, int front_pad=0, int norm=1, float eps=1e-6, int heads=0, float weight_offset=0.0, "
      "ScalarType? round_dtype=None, bool round_norm=False, bool half=False, int arithmetic=0, int rotary_dim=0, "
      "int seq_dim=1, SymInt start=0, SymInt length=-1) -> (Tensor, Tensor)");
  m.def(
      "joint_qk_norm_rope(Tensor q, Tensor k, Tensor q_2, Tensor k_2, Tensor? q_weight, Tensor? k_weight, "
      "Tensor? q_weight_2, Tensor? k_weight_2, Tensor? q_bias, Tensor? k_bias, Tensor? q_bias_2, Tensor? k_bias_2, "
      "Tensor[] cos, Tensor[] sin, Tensor[] cos_2, Tensor[] sin_2, int dim=1, int norm=1, float eps=1e-6, "
      "bool round_norm=False, bool half=False, int arithmetic=0) -> (Tensor, Tensor)");
}

DIFFKERN_LIBRARY_IMPL(DIFFKERN_OPS, DIFFKERN_DISPATCH_KEY, m) {
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_3d", TORCH_BOX(&rope_3d));
  m.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope));
  m.impl("joint_qk_norm_rope", TORCH_BOX(&joint_qk_norm_rope));
}

}  // namespace diffkern
