// A call of modulated norms and gated residuals on its way from tensors to the kernels: broadcasting, the outputs, and
// the map from rows to memory. For the torch binding alone.
#pragma once

#include <algorithm>
#include <array>

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

// Rows that the memory of an output has in front of those of each sample, and behind them. Nothing is written there.
struct Room {
  int64_t before = 0;
  int64_t behind = 0;
};

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

  // The memory of params.out, which is written between the rows of the room.
  Tensor output(ScalarType type, Room room) {
    Shape sizes = shape_;
    if (room.before != 0 || room.behind != 0) {
      STD_TORCH_CHECK(shape_.rank > 1 && room.before >= 0 && room.behind >= 0, op_, ": no room for ", room.before,
                      " rows in front and ", room.behind, " behind in ", shape_.rank, " dimensions");
      sizes.sizes[shape_.rank - 2] += around_ = room.before + room.behind;
    }
    Tensor memory = empty_contiguous(on_, sizes.rank, sizes.sizes.data(), type);
    const int64_t bytes = room.before * shape_.last() * bytes_of(params.out_dtype);
    params.out = shape_.numel() == 0 ? nullptr : static_cast<char*>(memory.mutable_data_ptr()) + bytes;
    return memory;
  }

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
    int64_t contiguous = 1, with_room = 1;
    for (int64_t dim = shape_.rank - 1; dim >= 0; --dim) {
      strides[kNew][dim] = contiguous;
      strides[kOut][dim] = with_room;
      contiguous *= shape_.sizes[dim];
      with_room *= shape_.sizes[dim] + (dim == shape_.rank - 2 ? around_ : 0);
    }
    pointers[kOut] = strides[kOut].data();
    pointers[kNew] = strides[kNew].data();
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
        {pointers[kOut], pointers[kNew], pointers[kX], pointers[kResidual], pointers[kGate], pointers[kScale], pointers[kShift]},
        &params.map);
  }

  const char* op_;
  const Shape& shape_;
  const Tensor& on_;
  std::array<const Tensor*, kMappedOperands> tensors_{};
  std::array<OptionalTensor, kMappedOperands> copies_;
  int64_t around_ = 0;
};

}  // namespace
}  // namespace diffkern
