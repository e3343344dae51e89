// What every op family's torch binding shares. Only *_binding.cpp files include this: torch's stable ABI
// stays out of the kernels, which are plain C++ behind a struct of pointers.
#pragma once

// The headers of torch 2.14 call dlsym, which glibc 2.34 gave a new version; every glibc has the first one.
#if defined(__linux__) && defined(__x86_64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__linux__) && defined(__aarch64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(CUDA_KERNEL) || defined(ROCM_KERNEL)  // how the Hub's builder says it
#define DIFFKERN_GPU
#endif

// Rows of 8 bits are for NVIDIA's GPUs alone.
#if defined(DIFFKERN_GPU) && !defined(ROCM_KERNEL)
#define DIFFKERN_ROWS8
#endif

#if defined(DIFFKERN_GPU)
#include <torch/csrc/stable/accelerator.h>
#endif

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "dtypes.h"

// Every build has an op namespace of its own, so that several builds can live in one process.
#if !defined(DIFFKERN_OPS)
#define DIFFKERN_OPS TORCH_EXTENSION_NAME
#endif
#define DIFFKERN_LIBRARY_(ns, m) STABLE_TORCH_LIBRARY_FRAGMENT(ns, m)
#define DIFFKERN_LIBRARY(ns, m) DIFFKERN_LIBRARY_(ns, m)
#define DIFFKERN_LIBRARY_IMPL_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define DIFFKERN_LIBRARY_IMPL(ns, key, m) DIFFKERN_LIBRARY_IMPL_(ns, key, m)

#if defined(DIFFKERN_GPU)
#define DIFFKERN_DISPATCH_KEY CUDA
#else
#define DIFFKERN_DISPATCH_KEY CPU
#endif

namespace diffkern {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype dtype_of(ScalarType type, const char* op, const char* name) {
  switch (type) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " is ", torch::headeronly::toString(type),
                      "; the compiled kernels compute float32, float16 and bfloat16");
      return Dtype::kNone;
  }
}

inline void check_next_to(const Tensor& tensor, const Tensor& x, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.is_cuda() == x.is_cuda() && tensor.is_cpu() == x.is_cpu() &&
                      tensor.get_device_index() == x.get_device_index(),
                  op, ": ", name, " and x are on different devices");
}

// A parameter of `size` elements next to x, laid out contiguously.
inline std::optional<Tensor> checked_parameter(const std::optional<Tensor>& parameter, const Tensor& x, int64_t size,
                                               const char* op, const char* name) {
  if (!parameter.has_value()) return std::nullopt;
  STD_TORCH_CHECK(parameter->dim() == 1 && parameter->size(0) == size, op, ": ", name, " must have shape [", size,
                  "], the size of the last dimension of x, but has ", parameter->dim(), " dimensions and ",
                  parameter->numel(), " elements");
  check_next_to(*parameter, x, op, name);
  return parameter->stride(0) == 1 || size < 2 ? *parameter : torch::stable::contiguous(*parameter);
}

// A new tensor on the device of x, without the dispatcher.
inline Tensor empty_strided(const Tensor& x, int64_t rank, const int64_t* sizes, const int64_t* strides,
                            ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      rank, sizes, strides, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
      x.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty_contiguous(const Tensor& x, int64_t rank, const int64_t* sizes, ScalarType dtype) {
  constexpr int64_t kMaxTensorRank = 64;
  STD_TORCH_CHECK(rank <= kMaxTensorRank, "a tensor of ", rank, " dimensions is beyond what torch computes with");
  std::array<int64_t, kMaxTensorRank> strides;
  int64_t stride = 1;
  for (int64_t dim = rank - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  return empty_strided(x, rank, sizes, strides.data(), dtype);
}

// A tensor with room for two along one dimension.
inline Tensor empty_joint(const Tensor& first, const Tensor& second, int64_t dim, const char* op) {
  const int64_t rank = first.dim();
  STD_TORCH_CHECK(second.dim() == rank && dim >= 0 && dim < rank - 1, op, ": the streams cannot be joined along ", dim);
  constexpr int64_t kMaxTensorRank = 64;
  std::array<int64_t, kMaxTensorRank> sizes;
  STD_TORCH_CHECK(rank <= kMaxTensorRank, op, ": ", rank, " dimensions are more than the compiled kernels step through");
  for (int64_t i = 0; i < rank; ++i) {
    sizes[i] = first.size(i) + (i == dim ? second.size(i) : 0);
    STD_TORCH_CHECK(i == dim || first.size(i) == second.size(i), op, ": the streams differ in dimension ", i);
  }
  return empty_contiguous(first, rank, sizes.data(), first.scalar_type());
}

#if defined(DIFFKERN_ROWS8)
// Rows in e4m3 of the shape that `sizes` gives, and the scale of each row in float32.
struct Rows8 {
  Tensor values;
  Tensor scales;

  Rows8(const Tensor& x, int64_t rank, const int64_t* sizes)
      : values(empty_contiguous(x, rank, sizes, ScalarType::Float8_e4m3fn)), scales(empty_scales(x, rank, sizes)) {}

  uint8_t* data() { return static_cast<uint8_t*>(values.mutable_data_ptr()); }
  float* scale_data() { return static_cast<float*>(scales.mutable_data_ptr()); }

 private:
  static Tensor empty_scales(const Tensor& x, int64_t rank, const int64_t* sizes) {
    std::array<int64_t, 64> shape;
    std::copy_n(sizes, rank - 1, shape.begin());
    shape[rank - 1] = 1;
    return empty_contiguous(x, rank, shape.data(), ScalarType::Float);
  }
};
#endif

// aten::empty_like(x, dtype, memory_format), without the dispatcher where the strides are plain to see.
inline Tensor empty_output(const Tensor& x, ScalarType dtype, bool preserve_strides) {
  if (!preserve_strides) return empty_contiguous(x, x.dim(), x.sizes().data(), dtype);
  if (x.numel() > 0 && x.is_contiguous()) {
    return empty_strided(x, x.dim(), x.sizes().data(), x.strides().data(), dtype);
  }
  std::array<StableIValue, 6> stack{
      torch::stable::detail::from(x),
      torch::stable::detail::from(std::optional(dtype)),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
  };
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

#if defined(DIFFKERN_GPU)
// Calls launch(stream) with the current stream of x's device, and turns the error code it returns, if any,
// into an exception.
template <typename Launch>
void launch_on_device_of(const Tensor& x, const char* op, Launch&& launch) {
  const int32_t device = x.get_device_index();
  // The device is nearly always the current one, and asking is cheaper than a guard.
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const int error = launch(stream);
  if (error != 0) {
    char* message = nullptr;
    torch_c10_cuda_check_msg(error, __FILE__, __func__, __LINE__, true, &message);
    const std::string text = message != nullptr ? message : "unknown error";
    if (message != nullptr) torch_c10_cuda_free_error_msg(message);
    STD_TORCH_CHECK(false, op, ": the kernel could not be launched: ", text);
  }
}
#endif

}  // namespace diffkern
