// Packets of neighbouring elements: 16-byte loads and stores, and their way to and from float32.
#pragma once

#include "gpu.h"

namespace diffkern {

constexpr int kPacketBytes = 16;

template <typename T>
constexpr int kPacketSize = kPacketBytes / static_cast<int>(sizeof(T));

// --- conversions ---------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(BFloat16 value) { return bfloat16_to_float(value.bits); }
__device__ __forceinline__ float to_float(Half value) {
  __half half;
  memcpy(&half, &value, sizeof(half));
  return __half2float(half);
}

template <typename T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) {
#if DIFFKERN_HIP
  return BFloat16{float_to_bfloat16(value)};
#else
  return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#endif
}

template <>
__device__ __forceinline__ Half from_float<Half>(float value) {
  const __half half = __float2half_rn(value);
  Half result;
  memcpy(&result, &half, sizeof(result));
  return result;
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

__device__ __forceinline__ float rounded_to(Dtype dtype, float value) {
  switch (dtype) {
    case Dtype::kFloat16: return rounded<Half>(value);
    case Dtype::kBFloat16: return rounded<BFloat16>(value);
    default: return value;
  }
}

// --- words of 4 bytes: one float or two halves ---------------------------------------------------------

template <typename T>
__device__ __forceinline__ void unpack(uint32_t word, float* to);

template <>
__device__ __forceinline__ void unpack<float>(uint32_t word, float* to) {
  to[0] = float_of(word);
}

template <>
__device__ __forceinline__ void unpack<BFloat16>(uint32_t word, float* to) {
  to[0] = float_of(word << 16);
  to[1] = float_of(word & 0xffff0000u);
}

template <>
__device__ __forceinline__ void unpack<Half>(uint32_t word, float* to) {
  to[0] = to_float(Half{static_cast<uint16_t>(word)});
  to[1] = to_float(Half{static_cast<uint16_t>(word >> 16)});
}

template <typename T>
__device__ __forceinline__ uint32_t pack(const float* from);

template <>
__device__ __forceinline__ uint32_t pack<float>(const float* from) {
  return bits_of(from[0]);
}

template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(const float* from) {
#if DIFFKERN_HIP
  return float_to_bfloat16(from[0]) | static_cast<uint32_t>(float_to_bfloat16(from[1])) << 16;
#else
  const __nv_bfloat162 pair = __floats2bfloat162_rn(from[0], from[1]);  // one instruction from sm_80 on
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
#endif
}

template <>
__device__ __forceinline__ uint32_t pack<Half>(const float* from) {
  const __half2 pair = __floats2half2_rn(from[0], from[1]);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// Rounds values to T, two of a half dtype by one instruction.
template <typename T, int kCount>
__device__ __forceinline__ void round_values(float* values) {
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  static_assert(kCount % kPerWord == 0, "values fill words");
#pragma unroll
  for (int j = 0; j < kCount; j += kPerWord) unpack<T>(pack<T>(values + j), values + j);
}

// --- packets -------------------------------------------------------------------------------------------

// Reads 16 bytes that will not be read again, past the first-level cache: it is left to the parameters.
__device__ __forceinline__ uint4 load_once(const void* from) {
#if DIFFKERN_HIP
  return *static_cast<const uint4*>(from);
#else
  uint4 packet;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
      : "l"(from));
  return packet;
#endif
}

template <typename T>
__device__ __forceinline__ void unpack(const uint4& packet, float* to) {
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  unpack<T>(packet.x, to);
  unpack<T>(packet.y, to + kPerWord);
  unpack<T>(packet.z, to + 2 * kPerWord);
  unpack<T>(packet.w, to + 3 * kPerWord);
}

template <typename T>
__device__ __forceinline__ uint4 pack_packet(const float* from) {
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  return uint4{pack<T>(from), pack<T>(from + kPerWord), pack<T>(from + 2 * kPerWord), pack<T>(from + 3 * kPerWord)};
}

// What goes with one packet of T in a tensor of M, as it lies in memory.
template <typename T, typename M>
struct Raw {
  static constexpr int kWords = kPacketSize<T> / kPacketSize<M>;
  uint4 words[kWords];

  __device__ __forceinline__ void load(const uint4* row, unsigned packet) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = row[packet * kWords + i];
  }

  __device__ __forceinline__ void unpack_to(float* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) unpack<M>(words[i], to + i * kPacketSize<M>);
  }
};

// A row of an operand in packets.
template <typename T>
__device__ __forceinline__ const uint4* packets_of(const void* data, int64_t offset) {
  return reinterpret_cast<const uint4*>(static_cast<const T*>(data) + offset);
}

// Has a packet unpacked anew from here on: unpacked values kept over the sums would take twice the registers.
__device__ __forceinline__ void optimization_barrier(uint4& packet) {
#if !DIFFKERN_HIP
  asm volatile("" : "+r"(packet.x), "+r"(packet.y), "+r"(packet.z), "+r"(packet.w));
#endif
}

// kCount neighbouring elements of type T, aligned to their total size or to 16 bytes. kCount times the size
// of T is 2 or 4 (a single element), 8, 16 or 32 bytes.
template <typename T, int kCount>
__device__ __forceinline__ void load_elements(const T* from, float* to) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if constexpr (kCount == 1) {
    to[0] = to_float(*from);
  } else if constexpr (kBytes == 8) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    unpack<T>(words.x, to);
    unpack<T>(words.y, to + kPerWord);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += kPacketSize<T>) unpack<T>(*reinterpret_cast<const uint4*>(from + i), to + i);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void store_elements(const float* from, T* to) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if constexpr (kCount == 1) {
    *to = from_float<T>(from[0]);
  } else if constexpr (kBytes == 8) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    *reinterpret_cast<uint2*>(to) = uint2{pack<T>(from), pack<T>(from + kPerWord)};
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += kPacketSize<T>) *reinterpret_cast<uint4*>(to + i) = pack_packet<T>(from + i);
  }
}

// The same for a dtype that is known only at run time; all threads take the same way.
template <int kCount>
__device__ __forceinline__ void load_elements(const void* base, Dtype dtype, int64_t offset, float* to) {
  switch (dtype) {
    case Dtype::kFloat16: return load_elements<Half, kCount>(static_cast<const Half*>(base) + offset, to);
    case Dtype::kBFloat16: return load_elements<BFloat16, kCount>(static_cast<const BFloat16*>(base) + offset, to);
    default: return load_elements<float, kCount>(static_cast<const float*>(base) + offset, to);
  }
}

template <int kCount>
__device__ __forceinline__ void store_elements(const float* from, void* base, Dtype dtype, int64_t offset) {
  switch (dtype) {
    case Dtype::kFloat16: return store_elements<Half, kCount>(from, static_cast<Half*>(base) + offset);
    case Dtype::kBFloat16: return store_elements<BFloat16, kCount>(from, static_cast<BFloat16*>(base) + offset);
    default: return store_elements<float, kCount>(from, static_cast<float*>(base) + offset);
  }
}

}  // namespace diffkern
