// Activations of runs of floats on the CPU: polynomials, and comparisons of bits rather than of floats, which might
// trap, so that the loops vectorise. Included by sources that are compiled once per instruction set, hence the
// internal linkage.
#pragma once

#include "activation.h"
#include "dtypes.h"

namespace diffkern {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kOneBits = 0x3f800000;

inline int32_t magnitude_bits(float x) { return static_cast<int32_t>(bits_of(x) & 0x7fffffffu); }

inline float with_sign_of(float magnitude, float x) { return float_of(bits_of(magnitude) | (bits_of(x) & 0x80000000u)); }

// a or b, both of which are computed whatever the condition.
inline float select(bool condition, float a, float b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return float_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}

// a * b + c, rounded once where the instruction set has that. For polynomials: the ops themselves promise to round
// each product and each sum.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The polynomial with these coefficients, the highest power first.
template <typename... Rest>
inline float polynomial(float x, float first, Rest... rest) {
  float value = first;
  ((value = multiply_add(value, x, rest)), ...);
  return value;
}

// e^x to 1 unit in the last place or so; infinity from 88.73 on, NaN of NaN.
inline float exp_of(float value) {
  constexpr int32_t kMost = 0x42d00000;  // 104: e^104 is infinite, e^-104 is zero
  const int32_t magnitude = magnitude_bits(value);
  const float x = with_sign_of(float_of(static_cast<uint32_t>(magnitude > kMost ? kMost : magnitude)), value);
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the last bits.
  constexpr float kMagic = 12582912.0f;
  const float shifted = multiply_add(x, 1.44269504f, kMagic);
  const float n = shifted - kMagic;
  // ln 2 in two parts, n times the first is exact.
  const float r = multiply_add(n, -1.42860677e-6f, multiply_add(n, -0.693145752f, x));
  const float p = polynomial(r, 0.00139503344f, 0.00836881995f, 0.0416662097f, 0.166665196f, 0.5f, 1.0f, 1.0f);
  // Times 2^n in two steps: n itself may be beyond the exponents of a float.
  const int32_t exponent = static_cast<int32_t>(bits_of(shifted) - bits_of(kMagic));
  const int32_t half = exponent >> 1;
  const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float second = float_of(static_cast<uint32_t>(exponent - half + 127) << 23);
  return select(magnitude > kInfinityBits, value, p * first * second);
}

// The error function, to 1e-7.
inline float erf_of(float x) {
  const float near = x * polynomial(x * x, 7.88912293e-05f, -0.000802084222f, 0.00518953567f, -0.0268544443f,
                                    0.112836003f, -0.376126260f, 1.12837911f);
  constexpr int32_t kMost = 0x40800000;  // 4: from there on the error function is 1
  const int32_t magnitude = magnitude_bits(x);
  const float size = float_of(static_cast<uint32_t>(magnitude > kMost ? kMost : magnitude));
  // ln(1 - erf) from 1 to 4
  const float log_rest = polynomial(size, 0.000185574099f, -0.00293960818f, 0.0218053218f, -0.103037372f,
                                    -0.638225675f, -1.12704003f, -0.000353718409f);
  const float far = with_sign_of(1.0f - exp_of(log_rest), x);
  return select((magnitude > kOneBits) & (magnitude <= kInfinityBits), far, near);  // near is NaN of NaN
}

// x * sigmoid(y). The exponential may overflow: a division by infinity is the right zero.
inline float sigmoid_product(float x, float y) { return x / (1.0f + exp_of(-y)); }

inline void apply_silu(float* values, int n) {
  for (int i = 0; i < n; ++i) values[i] = sigmoid_product(values[i], values[i]);
}

inline void apply(Activation activation, float* values, int n) {
  switch (activation) {
    case Activation::kGelu:
      for (int i = 0; i < n; ++i) values[i] = 0.5f * values[i] * (1.0f + erf_of(values[i] * 0.707106781f));
      return;
    case Activation::kGeluTanh:
      // 1 + tanh(u) = 2 sigmoid(2u); the factor is 2 sqrt(2 / pi).
      for (int i = 0; i < n; ++i) {
        const float x = values[i];
        values[i] = sigmoid_product(x, 1.59576912f * (x + 0.044715f * (x * x * x)));
      }
      return;
    case Activation::kSilu: return apply_silu(values, n);
    case Activation::kQuickGelu:
      for (int i = 0; i < n; ++i) values[i] = sigmoid_product(values[i], kQuickGeluSlope * values[i]);
      return;
    case Activation::kNone: return;
  }
}

}  // namespace
}  // namespace diffkern
