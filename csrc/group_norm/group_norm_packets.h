// What a thread of the group_norm_silu kernels reads and writes at once, and how it keeps several on their way.
#pragma once

#include "../common/gpu_vector.h"

namespace diffkern {
namespace {

// kCount neighbours as they are in memory; a single element is held as a float.
template <typename T, int kCount>
struct Held {
  uint4 packet;
  __device__ __forceinline__ void load(const T* from) { packet = load_once(from); }
  __device__ __forceinline__ void unpack_to(float* to) const { unpack<T>(packet, to); }
};

template <typename T>
struct Held<T, 1> {
  float value;
  __device__ __forceinline__ void load(const T* from) { value = to_float(*from); }
  __device__ __forceinline__ void unpack_to(float* to) const { to[0] = value; }
};

template <typename T, int kCount>
__device__ __forceinline__ void store(const float* from, T* to) {
  if constexpr (kCount == 1) {
    *to = from_float<T>(from[0]);
  } else {
    *reinterpret_cast<uint4*>(to) = pack_packet<T>(from);
  }
}

// A walk over `left` items, `stride` elements from each other. kDepth of them are on their way at any time: as soon as
// one has been used, its registers take the one kDepth further on.
template <typename T, int kCount, int kDepth>
class Stream {
 public:
  __device__ __forceinline__ Stream(const T* from, int64_t stride, int left)
      : from_(from), stride_(stride), left_(left) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i, from_ += stride_) {
      if (i < left_) held_[i].load(from_);
    }
  }

  // Only if there are any.
  __device__ __forceinline__ void first(float* to) const { held_[0].unpack_to(to); }

  // Calls use(values) for each, in order.
  template <typename Use>
  __device__ __forceinline__ void each(Use&& use) {
    float values[kCount];
    for (; left_ >= kDepth; left_ -= kDepth) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i, from_ += stride_) {
        held_[i].unpack_to(values);
        use(values);
        if (i + kDepth < left_) held_[i].load(from_);
      }
    }
#pragma unroll
    for (int i = 0; i < kDepth - 1; ++i) {
      if (i < left_) {
        held_[i].unpack_to(values);
        use(values);
      }
    }
  }

 private:
  Held<T, kCount> held_[kDepth];
  const T* from_;  // of the next to be loaded
  int64_t stride_;
  int left_;
};

}  // namespace
}  // namespace diffkern
