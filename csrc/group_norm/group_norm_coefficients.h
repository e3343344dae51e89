// What all GPU kernels of group_norm_silu share: statistics, and what they make of each channel.
#pragma once

#include "../common/gpu_samples.h"
#include "group_norm.h"

namespace diffkern {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Statistics {
  float count;
  float mean;
  float squares;  // sum of squares around the mean

  __device__ __forceinline__ void merge(const Statistics& other) {
    const float total = count + other.count;
    const float share = total > 0.0f ? other.count / total : 0.0f;
    const float delta = other.mean - mean;
    mean += delta * share;
    squares += other.squares + delta * delta * (count * share);
    count = total;
  }
};

struct Normaliser {
  float mean;
  float rest;  // what the mean lacks as a single float
  float rate;

  Normaliser() = default;

  // From a group's statistics, with its mean relative to `pivot`.
  __device__ __forceinline__ Normaliser(const GroupNormParams& p, float pivot, float relative_mean, float variance)
      : mean(pivot + relative_mean), rate(rsqrtf(variance + p.eps)) {
    const float added = mean - pivot;
    rest = (pivot - (mean - added)) + (relative_mean - added);
  }
};

// What is done to the values of one channel of one sample before the activation. Half values are no finer than that
// one multiplication and one addition would do.
template <typename T>
struct Coefficients {
  float factor;
  float offset;

  Coefficients() = default;
  __device__ __forceinline__ Coefficients(const GroupNormParams& p, const Normaliser& norm, int64_t channel)
      : factor(norm.rate * parameter(p.weight, p.weight_dtype, channel, 1.0f)),
        offset(fmaf(-norm.mean, factor, parameter(p.bias, p.bias_dtype, channel, 0.0f))) {}

  __device__ __forceinline__ float operator()(float value) const { return fmaf(value, factor, offset); }
};

template <>
struct Coefficients<float> {
  float mean;
  float rest;
  float factor;
  float offset;

  Coefficients() = default;
  __device__ __forceinline__ Coefficients(const GroupNormParams& p, const Normaliser& norm, int64_t channel)
      : mean(norm.mean),
        rest(norm.rest),
        factor(norm.rate * parameter(p.weight, p.weight_dtype, channel, 1.0f)),
        offset(parameter(p.bias, p.bias_dtype, channel, 0.0f)) {}

  __device__ __forceinline__ float operator()(float value) const {
    return fmaf((value - mean) - rest, factor, offset);
  }
};

constexpr int kCoefficientFloats = 4;  // of a channel, at most

// kCount neighbours, aligned to their total size of no more than 16 bytes.
template <typename T, int kCount>
__device__ __forceinline__ void load_chunk(const T* from, float* to) {
  if constexpr (kCount * sizeof(T) == 4 && kCount > 1) {
    unpack<T>(*reinterpret_cast<const uint32_t*>(from), to);
  } else {
    load_elements<T, kCount>(from, to);
  }
}

}  // namespace
}  // namespace diffkern
