// Runs of elements on the CPU, widened to float32 and back. Included by sources that are compiled once per
// instruction set, hence the internal linkage.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "dtypes.h"

namespace diffkern {
namespace {

constexpr int kChunk = 256;  // the longest run

// A step for each of n elements. Where pointers are equal, an element is read before it is written, which compilers
// cannot know: without the pragma they would take one element at a time.
template <typename Step>
inline void each(int n, Step&& step) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) step(i);
}

void widen(const BFloat16* from, int n, float* to) {
  for (int i = 0; i < n; ++i) to[i] = bfloat16_to_float(from[i].bits);
}

void narrow(const float* from, int n, BFloat16* to) {
  for (int i = 0; i < n; ++i) to[i].bits = float_to_bfloat16(from[i]);
}

void widen(const Half* from, int n, float* to) {
  int i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(packed));
  }
#endif
  for (; i < n; ++i) to[i] = half_to_float(from[i].bits);
}

void narrow(const float* from, int n, Half* to) {
  int i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), packed);
  }
#endif
  for (; i < n; ++i) to[i].bits = float_to_half(from[i]);
}

void widen(const float* from, int n, float* to) { std::memcpy(to, from, n * sizeof(float)); }

void narrow(const float* from, int n, float* to) { std::memcpy(to, from, n * sizeof(float)); }

// Elements `stride` apart, from base[offset] on.
template <typename T>
void load_as(const void* base, int64_t offset, int64_t stride, int n, float* to) {
  const T* from = static_cast<const T*>(base) + offset;
  if (stride == 1) return widen(from, n, to);
  T gathered[kChunk];
  for (int i = 0; i < n; ++i) gathered[i] = from[i * stride];
  widen(gathered, n, to);
}

template <typename T>
void store_as(const float* from, int n, void* base, int64_t offset, int64_t stride) {
  T* to = static_cast<T*>(base) + offset;
  if (stride == 1) return narrow(from, n, to);
  T scattered[kChunk];
  narrow(from, n, scattered);
  for (int i = 0; i < n; ++i) to[i * stride] = scattered[i];
}

void load(const void* base, Dtype dtype, int64_t offset, int64_t stride, int n, float* to) {
  switch (dtype) {
    case Dtype::kFloat16: return load_as<Half>(base, offset, stride, n, to);
    case Dtype::kBFloat16: return load_as<BFloat16>(base, offset, stride, n, to);
    default: return load_as<float>(base, offset, stride, n, to);
  }
}

// Nothing happens to floats that were computed in their place.
void store(const float* from, int n, void* base, Dtype dtype, int64_t offset, int64_t stride) {
  if (from == static_cast<float*>(base) + offset && dtype == Dtype::kFloat32) return;
  switch (dtype) {
    case Dtype::kFloat16: return store_as<Half>(from, n, base, offset, stride);
    case Dtype::kBFloat16: return store_as<BFloat16>(from, n, base, offset, stride);
    default: return store_as<float>(from, n, base, offset, stride);
  }
}

// The same as floats to read: where they are, if floats lie there in a row, and widened in the buffer otherwise.
inline const float* floats(const void* base, Dtype dtype, int64_t offset, int64_t stride, int n, float* buffer) {
  if (dtype == Dtype::kFloat32 && stride == 1) return static_cast<const float*>(base) + offset;
  load(base, dtype, offset, stride, n, buffer);
  return buffer;
}

// Where to compute results that are stored then: in their place, if floats lie there in a row, or in the buffer.
inline float* room(void* base, Dtype dtype, int64_t offset, int64_t stride, float* buffer) {
  return dtype == Dtype::kFloat32 && stride == 1 ? static_cast<float*>(base) + offset : buffer;
}

// One element, or what stands for it where there is none.
inline float parameter(const void* base, Dtype dtype, int64_t at, float absent) {
  if (base == nullptr) return absent;
  float value;
  load(base, dtype, at, 1, 1, &value);
  return value;
}

inline void round_to(Dtype dtype, float* values, int n) {
  if (dtype == Dtype::kFloat16) {
    Half rounded[kChunk];
    narrow(values, n, rounded);
    widen(rounded, n, values);
  } else if (dtype == Dtype::kBFloat16) {
    BFloat16 rounded[kChunk];
    narrow(values, n, rounded);
    widen(rounded, n, values);
  }
}

}  // namespace
}  // namespace diffkern
