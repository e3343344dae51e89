// The floating dtypes the kernels read and write, and their conversions to and from float32.
//
// The conversions here work on bits alone, so that they compile anywhere; the CPU and GPU sources use
// hardware instructions where there are some.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define DIFFKERN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DIFFKERN_HOST_DEVICE inline
#endif

namespace diffkern {

// kFloat64 is served by rope alone.
enum class Dtype : int32_t { kNone, kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2; }

// Storage types. Distinct from each other and from any compiler's own half types.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

namespace {  // internal linkage: the same header is compiled for several instruction sets

DIFFKERN_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

DIFFKERN_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

DIFFKERN_HOST_DEVICE float bfloat16_to_float(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

DIFFKERN_HOST_DEVICE uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

DIFFKERN_HOST_DEVICE float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  // 2^112 is the difference of the exponent biases; the product is exact for subnormals too.
  uint32_t bits = bits_of(float_of(magnitude) * 0x1p112f);
  if (magnitude >= 0x0f800000u) bits |= 0x7f800000u;  // infinity and NaN
  return float_of(bits | sign);
}

DIFFKERN_HOST_DEVICE uint16_t float_to_half(float value) {
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
  const uint32_t bits = bits_of(value) & 0x7fffffffu;
  // Adding 0.5 aligns the last bit of a float with that of a subnormal half, and so rounds in hardware.
  const uint32_t subnormal = bits_of(float_of(bits) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = bits < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>((bits >= 0x47800000u ? special : finite) | sign);
}

}  // namespace
}  // namespace diffkern
