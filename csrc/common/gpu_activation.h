// Activations of single floats on the GPU, in the very formulas of PyTorch's own CUDA kernels, so that they round alike.
#pragma once

#include "activation.h"
#include "gpu.h"

namespace diffkern {

// x * sigmoid(y). The exponential may overflow: a division by infinity is the right zero.
__device__ __forceinline__ float sigmoid_product(float x, float y) { return x / (1.0f + expf(-y)); }

#if !DIFFKERN_HIP
// 2^x to about 2^-22, without the care for denormal numbers that takes half of the instructions: what it would save is
// below 1e-36.
__device__ __forceinline__ float quick_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x / (1 + 2^exponent), likewise.
__device__ __forceinline__ float quick_logistic(float x, float exponent) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + quick_exp2(exponent)));
  return x * reciprocal;
}
#endif

constexpr float kLog2E = 1.4426950408889634f;

// x * sigmoid(x) to about 2^-21, for results that are rounded to a half dtype and must not wait for divisions.
__device__ __forceinline__ float quick_silu(float x) {
#if DIFFKERN_HIP
  return sigmoid_product(x, x);
#else
  return quick_logistic(x, x * -kLog2E);
#endif
}

template <Activation kActivation>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kActivation == Activation::kGelu) {
    return x * 0.5f * (1.0f + erff(x * 0.70710678118654752440f));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const float inner = 0.79788456080286535588f * fmaf(0.044715f, x * x * x, x);
    return 0.5f * x * (1.0f + tanhf(inner));
  } else if constexpr (kActivation == Activation::kSilu) {
    return sigmoid_product(x, x);
  } else {
    static_assert(kActivation == Activation::kQuickGelu, "every activation has its formula");
    return sigmoid_product(x, kQuickGeluSlope * x);
  }
}

// The same in place for kCount values and an activation known only at run time; all threads take the same way.
template <int kCount>
__device__ __forceinline__ void apply(Activation activation, float* values) {
  switch (activation) {
    case Activation::kGelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = activated<Activation::kGelu>(values[i]);
      return;
    case Activation::kGeluTanh:
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = activated<Activation::kGeluTanh>(values[i]);
      return;
    case Activation::kSilu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = activated<Activation::kSilu>(values[i]);
      return;
    case Activation::kQuickGelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = activated<Activation::kQuickGelu>(values[i]);
      return;
    case Activation::kNone: return;
  }
}

}  // namespace diffkern
