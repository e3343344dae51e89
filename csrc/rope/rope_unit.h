// The elements that a thread turns together, in registers, and the arithmetic on them.
//
// Products and sums of the rotation are not contracted to fused multiply-adds: they are promised to be those of a
// chain of torch ops.
#pragma once

#include <type_traits>

#include "../common/gpu_vector.h"
#include "rope.h"

namespace diffkern {
namespace {

// kCount elements of T as they lie in memory: 16 or 8 bytes, read and written in one access.
template <typename T, int kCount>
struct Packet {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kPerWord = kCount / kWords;
  static_assert(kWords == 4 || kWords == 2, "a packet is one access");
  uint32_t words[kWords];

  // Of what is read once: it passes the first-level cache by, which is left to the tables and the weights.
  __device__ __forceinline__ void load_streamed(const T* from) {
    if constexpr (kWords == 4) {
      set(load_once(from));
    } else {
      load(from);
    }
  }

  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kWords == 4) {
      set(*reinterpret_cast<const uint4*>(from));
    } else {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      words[0] = both.x;
      words[1] = both.y;
    }
  }

  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
    } else {
      *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
    }
  }

  __device__ __forceinline__ void unpack_to(float* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) unpack<T>(words[i], to + i * kPerWord);
  }

  __device__ __forceinline__ float first() const {
    float values[kPerWord];
    unpack<T>(words[0], values);
    return values[0];
  }

  __device__ __forceinline__ void pack_from(const float* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pack<T>(from + i * kPerWord);
  }

  // Has the packet unpacked anew from here on: values kept over the sums would take twice the registers.
  __device__ __forceinline__ void optimization_barrier() {
#if !DIFFKERN_HIP
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
#endif
  }

 private:
  __device__ __forceinline__ void set(const uint4& all) {
    words[0] = all.x;
    words[1] = all.y;
    words[kWords - 2] = all.z;
    words[kWords - 1] = all.w;
  }
};

// Whole pairs: those of one packet where they are neighbours, and where they are half a row apart a packet of first
// elements and one of second elements.
template <typename T, int kCount, bool kHalf>
struct Unit {
  static constexpr int kPackets = kHalf ? 2 : 1;
  static constexpr int kPairs = kHalf ? kCount : kCount / 2;
  using Values = float[2][kPairs];  // first and second elements
  Packet<T, kCount> packets[kPackets];

  // `at` says where its packets begin.
  __device__ __forceinline__ void load_streamed(const T* row, const int (&at)[2]) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) packets[i].load_streamed(row + at[i]);
  }

  __device__ __forceinline__ void load(const T* row, const int (&at)[2]) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) packets[i].load(row + at[i]);
  }

  __device__ __forceinline__ void store(T* row, const int (&at)[2]) const {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) packets[i].store(row + at[i]);
  }

  __device__ __forceinline__ void fill(float value) {
    Values values;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) values[i / kPairs][i % kPairs] = value;
    pack_from(values);
  }

  // Elements in the order of memory, packet after packet, as first and second ones.
  static __device__ __forceinline__ void split(const float (&flat)[2 * kPairs], Values& to) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) (kHalf ? to[i / kPairs][i % kPairs] : to[i % 2][i / 2]) = flat[i];
  }

  __device__ __forceinline__ void unpack_to(Values& to) const {
    float flat[2 * kPairs];
#pragma unroll
    for (int i = 0; i < kPackets; ++i) packets[i].unpack_to(flat + i * kCount);
    split(flat, to);
  }

  __device__ __forceinline__ void pack_from(const Values& from) {
    float flat[2 * kPairs];
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) flat[i] = kHalf ? from[i / kPairs][i % kPairs] : from[i % 2][i / 2];
#pragma unroll
    for (int i = 0; i < kPackets; ++i) packets[i].pack_from(flat + i * kCount);
  }

  __device__ __forceinline__ void optimization_barrier() {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) packets[i].optimization_barrier();
  }
};

// --- norm ----------------------------------------------------------------------------------------------

// What a row's sums say: the normalised value is (v - centre) * factor + rest, where an RMS norm has neither centre nor
// rest. The centre is near the mean, and the mean of v - centre gives the rest: without it the whole row would be shifted.
struct Normaliser {
  float centre;
  float factor;
  float rest;

  __device__ __forceinline__ float operator()(const RopeParams& p, float value) const {
    return p.norm == RopeNorm::kRms ? value * factor : fmaf(value - centre, factor, rest);
  }
};

// What a kernel knows of the norm: anything is possible, or it is plain and an RMS norm (or none), or a layer norm.
enum class KnownNorm { kAny, kRms, kLayer };

// The steps between the values of kRows rows and their Normalisers. `sum` adds values up over the threads of each
// row; `fold` calls its argument with the number of a row and every value of it that this thread holds.
// inverse_size(row) is 1 / the number of its values, first(row) is one of them, the same in all threads of the row.
//
// A layer norm that sums once has any value of the row for a centre, which spares a pass: in a row of n, none is further
// from the mean than sqrt(n - 1) standard deviations, so that the variance loses no more than the digits of n. Of a head
// in a half dtype that is far below what its rounding takes.
template <KnownNorm kNorm, bool kSumsOnce, int kRows, typename InverseSize, typename First, typename Sum, typename Fold>
__device__ __forceinline__ void normalise(const RopeParams& p, Normaliser (&norms)[kRows], InverseSize&& inverse_size,
                                          First&& first, Sum&& sum, Fold&& fold) {
  if (p.norm == RopeNorm::kNone) return;
  float squares[kRows] = {};
  if (kNorm == KnownNorm::kRms || (kNorm == KnownNorm::kAny && p.norm == RopeNorm::kRms)) {
    fold([&](int row, float value) { squares[row] += value * value; });
    sum(squares);
#pragma unroll
    for (int row = 0; row < kRows; ++row) norms[row].factor = rsqrtf(squares[row] * inverse_size(row) + p.eps);
  } else if constexpr (kNorm != KnownNorm::kRms) {
    float plain[kRows] = {};
    if constexpr (kNorm == KnownNorm::kLayer && kSumsOnce) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) norms[row].centre = first(row);
    } else {
      fold([&](int row, float value) { plain[row] += value; });
      sum(plain);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        norms[row].centre = plain[row] * inverse_size(row);
        plain[row] = 0.0f;
      }
    }
    fold([&](int row, float value) {
      const float centred = value - norms[row].centre;
      plain[row] += centred;
      squares[row] += centred * centred;
    });
    sum(plain, squares);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float rest = plain[row] * inverse_size(row);
      norms[row].factor = rsqrtf((squares[row] - rest * plain[row]) * inverse_size(row) + p.eps);
      norms[row].rest = -rest * norms[row].factor;
    }
  }
}

// Options of a call that are off in nearly all: no rounding in between, no bias of an RMS norm, no offset, parameters of
// the dtype of the input. Kernels that know this spare the tests, and most of their code.
bool is_plain(const RopeParams& p) {
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    if (o.bias != nullptr && (p.norm != RopeNorm::kLayer || o.bias_dtype != p.dtype)) return false;
    if (o.weight != nullptr && o.weight_dtype != p.dtype) return false;
  }
  return p.arithmetic == RopeArithmetic::kFloat32 && !p.round_norm && p.round_dtype == Dtype::kNone && p.weight_offset == 0.0f;
}

// The norm of a unit in a plain call. The parameters are loaded ahead and kept as they lie in memory, or as numbers where
// one set of them serves several units and there are registers for that; without weights they are ones.
template <typename T, int kCount, bool kHalf, bool kLayer, bool kUnpacksOnce>
struct PlainNorm {
  using Elements = Unit<T, kCount, kHalf>;
  using Values = typename Elements::Values;
  Elements weight;
  Elements bias;  // of a layer norm; unused, it takes no register

  __device__ __forceinline__ void load_ahead(const RopeOperand& o, const int (&at)[2]) {
    load_or_fill(o.weight, 1.0f, at, weight);
    if constexpr (kLayer) load_or_fill(o.bias, 0.0f, at, bias);
  }

  __device__ __forceinline__ void load(const RopeParams&, const RopeOperand&, const int (&)[2]) {
    if constexpr (kUnpacksOnce) unpack_parameters();
  }

  __device__ __forceinline__ void apply(const RopeParams& p, const RopeOperand&, const Normaliser& norm, Values& values) {
    if (p.norm == RopeNorm::kNone) return;
    if constexpr (!kUnpacksOnce) unpack_parameters();
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int j = 0; j < Elements::kPairs; ++j) {
        float& value = values[side][j];
        if constexpr (kLayer) {
          value = exact_add(fmaf(value - norm.centre, norm.factor, norm.rest) * weights[side][j], biases[side][j]);
        } else {
          value = value * norm.factor * weights[side][j];
        }
      }
    }
  }

 private:
  Values weights, biases;

  __device__ __forceinline__ void unpack_parameters() {
    weight.optimization_barrier();
    weight.unpack_to(weights);
    if constexpr (kLayer) {
      bias.optimization_barrier();
      bias.unpack_to(biases);
    }
  }

  static __device__ __forceinline__ void load_or_fill(const void* from, float otherwise, const int (&at)[2], Elements& to) {
    if (from != nullptr) {
      to.load(static_cast<const T*>(from), at);
    } else {
      to.fill(otherwise);
    }
  }
};

// The norm of a unit with all options. The parameters are loaded where they are used.
template <typename T, int kCount, bool kHalf>
struct AnyNorm {
  using Elements = Unit<T, kCount, kHalf>;
  using Values = typename Elements::Values;
  Values weight;
  Values bias;

  __device__ __forceinline__ void load_ahead(const RopeOperand&, const int (&)[2]) {}

  __device__ __forceinline__ void load(const RopeParams& p, const RopeOperand& o, const int (&at)[2]) {
    if (o.weight != nullptr) load_one(o.weight, o.weight_dtype, at, p.weight_offset, weight);
    if (o.bias != nullptr) load_one(o.bias, o.bias_dtype, at, 0.0f, bias);
  }

  __device__ __forceinline__ void apply(const RopeParams& p, const RopeOperand& o, const Normaliser& norm, Values& values) const {
    if (p.norm == RopeNorm::kNone) return;
    const bool rounds_product = p.round_norm && p.round_dtype != Dtype::kNone;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int j = 0; j < Elements::kPairs; ++j) {
        float value = norm(p, values[side][j]);
        if (p.round_dtype != Dtype::kNone) value = rounded_to(p.round_dtype, value);
        if (o.weight != nullptr) value *= weight[side][j];
        if (o.bias != nullptr) value = exact_add(rounds_product ? rounded<T>(value) : value, bias[side][j]);
        values[side][j] = p.round_norm ? rounded<T>(value) : value;
      }
    }
  }

 private:
  // Of float32 or of T.
  static __device__ __forceinline__ void load_one(const void* base, Dtype dtype, const int (&at)[2], float offset, Values& to) {
    float flat[2 * Elements::kPairs];
#pragma unroll
    for (int i = 0; i < Elements::kPackets; ++i) {
      if (dtype == Dtype::kFloat32) {
        load_elements<float, kCount>(static_cast<const float*>(base) + at[i], flat + i * kCount);
      } else {
        load_elements<T, kCount>(static_cast<const T*>(base) + at[i], flat + i * kCount);
      }
    }
    if (offset != 0.0f) {
#pragma unroll
      for (int i = 0; i < 2 * Elements::kPairs; ++i) flat[i] += offset;
    }
    Elements::split(flat, to);
  }
};

template <typename T, int kCount, bool kHalf, KnownNorm kNorm, bool kUnpacksOnce = false>
using UnitNorm = std::conditional_t<kNorm == KnownNorm::kAny, AnyNorm<T, kCount, kHalf>,
                                    PlainNorm<T, kCount, kHalf, kNorm == KnownNorm::kLayer, kUnpacksOnce>>;

// --- rotation ------------------------------------------------------------------------------------------

// The angles of the pairs of a unit; kEach: a pair may have one for each of its elements.
template <int kPairs, bool kEach>
struct Angles {
  static constexpr int kSides = kEach ? 2 : 1;
  float cos[kSides][kPairs];
  float sin[kSides][kPairs];
};

// One element of a pair: value * cos + other * sin, the sign of sin included, with a rounding to T after each op
// where the arithmetic is that of the input.
template <typename T, bool kPlain>
__device__ __forceinline__ float turn(bool rounds, float value, float other, float cos, float sin) {
  float first = exact_mul(value, cos);
  float second = exact_mul(other, sin);
  if (!kPlain && rounds) {
    first = rounded<T>(first);
    second = rounded<T>(second);
  }
  return exact_add(first, second);
}

template <typename T, bool kPlain, int kPairs, bool kEach>
__device__ __forceinline__ void rotate(const RopeParams& p, const Angles<kPairs, kEach>& angles, float (&values)[2][kPairs]) {
  const bool rounds = p.arithmetic == RopeArithmetic::kInput;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const float first = values[0][j];
    const float second = values[1][j];
    values[0][j] = turn<T, kPlain>(rounds, first, second, angles.cos[0][j], -angles.sin[0][j]);
    values[1][j] = turn<T, kPlain>(rounds, second, first, angles.cos[kEach][j], angles.sin[kEach][j]);
  }
}

__device__ __forceinline__ bool turns(const RopeParams& p, int64_t token) {
  return p.tables != RopeTables::kNone && (!p.partial || static_cast<uint64_t>(token - p.start) < static_cast<uint64_t>(p.length));
}

}  // namespace
}  // namespace diffkern
