// CUDA and HIP kernels for rope, rope_3d and qk_norm_rope.
//
//  head kernel:  rows of one head, aligned, normalised alone or not at all. A few lanes to a head; they load
//                several heads at once and keep the angles that these share in registers.
//  token kernel: all heads of a token normalised together, a block to a token, which stays in registers; q and
//                k side by side, so that the angles are read once for both.
//  plain kernel: any dtypes, alignment, strides and sizes, and float64; a wave to a row, which it reads again,
//                from the caches, after the sums.
//
// Inputs pass the first-level cache by; it is left to the tables. Products and sums of the rotation are not
// contracted to fused multiply-adds: they are promised to be those of a chain of torch ops.
#include <algorithm>
#include <type_traits>

#include "../common/gpu_vector.h"
#include "rope.h"
#include "rope_config.h"

namespace diffkern {
namespace {

using Offsets = LeadingOffsets<kRopeStrides>;

// --- arithmetic ----------------------------------------------------------------------------------------

__device__ __forceinline__ double exact_mul(double a, double b) {
#if DIFFKERN_HIP
  return a * b;
#else
  return __dmul_rn(a, b);
#endif
}

__device__ __forceinline__ double exact_add(double a, double b) {
#if DIFFKERN_HIP
  return a + b;
#else
  return __dadd_rn(a, b);
#endif
}

// One element of a pair: value * cos + other * sin, the sign of sin included, with a rounding to T after each op
// where the arithmetic is that of the input.
template <typename T>
__device__ __forceinline__ float turn(bool rounds, float value, float other, float cos, float sin) {
  float first = exact_mul(value, cos);
  float second = exact_mul(other, sin);
  if (!std::is_same<T, float>::value && rounds) {
    first = rounded<T>(first);
    second = rounded<T>(second);
  }
  return exact_add(first, second);
}

// What a row's sums say: the normalised value is (v - mean) * factor + rest. What rounding left out of the mean
// comes to light as the mean of v - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean = 0.0f;
  float factor = 1.0f;
  float rest = -0.0f;

  __device__ __forceinline__ float operator()(float value) const { return fmaf(value - mean, factor, rest); }
};

// The steps between the values of kRows rows and their Normalisers. `sum` adds values up over the threads of each
// row; `fold` calls its argument with the number of a row and every value of it that this thread holds.
template <int kRows, typename Sum, typename Fold>
__device__ __forceinline__ void normalise(const RopeParams& p, float size, Normaliser (&norms)[kRows], Sum&& sum,
                                          Fold&& fold) {
  if (p.norm == RopeNorm::kNone) return;
  float plain[kRows] = {};
  float squares[kRows] = {};
  if (p.norm == RopeNorm::kLayer) {
    fold([&](int row, float value) { plain[row] += value; });
    sum(plain);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      norms[row].mean = plain[row] / size;
      plain[row] = 0.0f;
    }
    fold([&](int row, float value) {
      const float centred = value - norms[row].mean;
      plain[row] += centred;
      squares[row] += centred * centred;
    });
    sum(plain);
    sum(squares);
  } else {
    fold([&](int row, float value) { squares[row] += value * value; });
    sum(squares);
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float rest = plain[row] / size;
    norms[row].factor = rsqrtf((squares[row] - rest * plain[row]) / size + p.eps);
    norms[row].rest = p.norm == RopeNorm::kLayer ? -rest * norms[row].factor : -0.0f;
  }
}

// Weight and bias of kCount elements, in the same registers for all rows that a thread holds.
template <int kCount>
struct Parameters {
  float weight[kCount];
  float bias[kCount];

  __device__ __forceinline__ void load(const RopeParams& p, const RopeOperand& o, int at) {
    if (o.weight != nullptr) {
      load_elements<kCount>(o.weight, o.weight_dtype, at, weight);
#pragma unroll
      for (int j = 0; j < kCount; ++j) weight[j] += p.weight_offset;
    }
    if (o.bias != nullptr) load_elements<kCount>(o.bias, o.bias_dtype, at, bias);
  }
};

template <typename T, int kCount>
__device__ __forceinline__ void apply(const RopeParams& p, const RopeOperand& o, const Normaliser& norm,
                                      const Parameters<kCount>& parameters, float* values) {
  if (p.norm == RopeNorm::kNone) return;
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = norm(values[j]);
  if (p.round_dtype != Dtype::kNone) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = rounded_to(p.round_dtype, values[j]);
  }
  if (o.weight != nullptr) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= parameters.weight[j];
  }
  const bool each = !std::is_same<T, float>::value && p.round_norm;
  if (o.bias != nullptr) {
    const bool product = each && p.round_dtype != Dtype::kNone;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      values[j] = exact_add(product ? rounded<T>(values[j]) : values[j], parameters.bias[j]);
    }
  }
  if (each) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = rounded<T>(values[j]);
  }
}

// --- packets -------------------------------------------------------------------------------------------

// kCount elements of T as they lie in memory: 16 or 8 bytes.
template <typename T, int kCount>
struct Packet {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static_assert(kBytes == 16 || kBytes == 8, "a packet is one access");
  using Word = std::conditional_t<kBytes == 16, uint4, uint2>;
  Word words;

  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kBytes == 16) {
      words = load_once(from);
    } else {
      words = *reinterpret_cast<const uint2*>(from);
    }
  }

  __device__ __forceinline__ void unpack_to(float* to) const {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    unpack<T>(words.x, to);
    unpack<T>(words.y, to + kPerWord);
    if constexpr (kBytes == 16) {
      unpack<T>(words.z, to + 2 * kPerWord);
      unpack<T>(words.w, to + 3 * kPerWord);
    }
  }

  // Has the packet unpacked anew from here on: values kept over the sums would take twice the registers.
  __device__ __forceinline__ void forget_unpacked() {
#if !DIFFKERN_HIP
    asm volatile("" : "+r"(words.x), "+r"(words.y));
    if constexpr (kBytes == 16) asm volatile("" : "+r"(words.z), "+r"(words.w));
#endif
  }
};

// --- angles --------------------------------------------------------------------------------------------

// The angles of a unit, for the elements of its packets a and b.
template <int kCount>
struct Angles {
  float cos_a[kCount];
  float cos_b[kCount];
  float sin_a[kCount];
  float sin_b[kCount];
};

// kCount neighbouring values of a table, in packets if `vector` says that they can be.
template <int kCount>
__device__ __forceinline__ void read_table(const void* base, Dtype dtype, int64_t offset, int64_t step, bool vector,
                                           float* to) {
  if (vector) {
    if (dtype == Dtype::kFloat32) return load_elements<float, kCount>(static_cast<const float*>(base) + offset, to);
    // Two halves are no access that load_elements knows.
    if constexpr (kCount > 2) return load_elements<kCount>(base, dtype, offset, to);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) load_elements<1>(base, dtype, offset + j * step, to + j);
}

// The values of a full table for a packet that begins at element `at` of the head.
template <int kCount>
__device__ __forceinline__ void read_full(const RopeParams& p, const void* base, Dtype dtype, int64_t row, int64_t step,
                                          bool compact, bool vector, int at, float* to) {
  if (!compact || p.half) return read_table<kCount>(base, dtype, row + at * step, step, vector, to);
  float each[kCount / 2];
  read_table<kCount / 2>(base, dtype, row + at / 2 * step, step, vector, each);
#pragma unroll
  for (int j = 0; j < kCount; ++j) to[j] = each[j / 2];
}

template <typename A>
__device__ __forceinline__ A read_value(const void* base, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kFloat64) return static_cast<A>(static_cast<const double*>(base)[at]);
  float value;
  load_elements<1>(base, dtype, at, &value);
  return value;
}

// The angle of one pair from the tables of the axes.
template <typename A>
__device__ __forceinline__ void read_axes(const RopeParams& p, const RopeOperand& o, const AxisRows& rows, int pair,
                                          A* cos, A* sin) {
  *cos = 1.0f;
  *sin = 0.0f;
  const int index = pair - p.front_pad;
  if (index < 0) return;
  const AxisColumn place = axis_column(p, index);
  // Chosen by comparisons: an array that is indexed at run time would go through local memory.
  const void* cos_base = o.cos[0];
  const void* sin_base = o.sin[0];
  int64_t at = rows.at[0];
#pragma unroll
  for (int axis = 1; axis < kMaxAxes; ++axis) {
    if (place.axis == axis) {
      cos_base = o.cos[axis];
      sin_base = o.sin[axis];
      at = rows.at[axis];
    }
  }
  if (at < 0) {
    *cos = *sin = float_of(0x7fc00000u);
    return;
  }
  *cos = read_value<A>(cos_base, o.cos_dtype, at + place.column);
  *sin = read_value<A>(sin_base, o.sin_dtype, at + place.column);
}

// Which accesses to the full tables can be packets.
struct TableVectors {
  bool cos;
  bool sin;
};

// The angles of a packet. at_cos and at_sin are its first element in the head, or, for the second elements of pairs
// that are half a row apart and have one angle, that of the first elements.
template <typename T, int kCount>
__device__ __forceinline__ void read_packet(const RopeParams& p, const RopeOperand& o, const TableVectors& vectors,
                                            const Offsets& row, const AxisRows& axes, int at_cos, int at_sin, float* cos,
                                            float* sin) {
  if (p.tables == RopeTables::kFull) {
    read_full<kCount>(p, o.cos[0], o.cos_dtype, row.of[kFirst] - o.first_shift, o.first_step, o.compact_cos, vectors.cos,
                      at_cos, cos);
    read_full<kCount>(p, o.sin[0], o.sin_dtype, row.of[kSecond] - o.second_shift, o.second_step, o.compact_sin,
                      vectors.sin, at_sin, sin);
  } else if (p.half) {
    const int first = static_cast<int>(row.of[kSecond]) + at_cos;
#pragma unroll
    for (int j = 0; j < kCount; ++j) read_axes(p, o, axes, first + j, cos + j, sin + j);
  } else {
    const int first = static_cast<int>(row.of[kSecond]) + at_cos / 2;
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      read_axes(p, o, axes, first + j / 2, cos + j, sin + j);
      cos[j + 1] = cos[j];
      sin[j + 1] = sin[j];
    }
  }
  if (!std::is_same<T, float>::value && p.arithmetic == RopeArithmetic::kInput) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      cos[j] = rounded<T>(cos[j]);
      sin[j] = rounded<T>(sin[j]);
    }
  }
}

// The angles of the packets a and b, which begin at elements at_a and at_b of their heads. `same` says that those of
// b are those of a.
template <typename T, int kCount>
__device__ __forceinline__ void read_angles(const RopeParams& p, const RopeOperand& o, const TableVectors& vectors,
                                            const Offsets& row_a, const Offsets& row_b, const AxisRows& axes, int at_a,
                                            int at_b, bool same, Angles<kCount>* angles) {
  read_packet<T, kCount>(p, o, vectors, row_a, axes, at_a, at_a, angles->cos_a, angles->sin_a);
  if (same || (p.half && o.compact_cos && o.compact_sin)) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      angles->cos_b[j] = angles->cos_a[j];
      angles->sin_b[j] = angles->sin_a[j];
    }
  } else {
    read_packet<T, kCount>(p, o, vectors, row_b, axes, p.half && o.compact_cos ? at_a : at_b,
                           p.half && o.compact_sin ? at_a : at_b, angles->cos_b, angles->sin_b);
  }
}

// Turns the packets a and b. Where neighbours are pairs, `turns_a` and `turns_b` say which packets are rotated.
template <typename T, int kCount>
__device__ __forceinline__ void rotate(const RopeParams& p, const Angles<kCount>& angles, bool turns_a, bool turns_b,
                                       float* a, float* b) {
  const bool rounds = p.arithmetic == RopeArithmetic::kInput;
  if (p.half) {
    if (!turns_a) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float first = a[j];
      const float second = b[j];
      a[j] = turn<T>(rounds, first, second, angles.cos_a[j], -angles.sin_a[j]);
      b[j] = turn<T>(rounds, second, first, angles.cos_b[j], angles.sin_b[j]);
    }
    return;
  }
  const auto neighbours = [&](const float* cos, const float* sin, float* values) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      const float first = values[j];
      const float second = values[j + 1];
      values[j] = turn<T>(rounds, first, second, cos[j], -sin[j]);
      values[j + 1] = turn<T>(rounds, second, first, cos[j + 1], sin[j + 1]);
    }
  };
  if (turns_a) neighbours(angles.cos_a, angles.sin_a, a);
  if (turns_b) neighbours(angles.cos_b, angles.sin_b, b);
}

__device__ __forceinline__ bool turns(const RopeParams& p, int64_t token) {
  return p.tables != RopeTables::kNone && (!p.partial || static_cast<uint64_t>(token - p.start) < static_cast<uint64_t>(p.length));
}

// --- head kernel ---------------------------------------------------------------------------------------

// How the work of an operand is divided among groups of lanes.
struct HeadGrid {
  int64_t groups;  // of lanes, all in all
  unsigned chunks; // of kHeadRows rows in the innermost loop
  unsigned columns;  // groups side by side in a row, for long rows without a norm
  TableVectors vectors;
};

struct HeadGrids {
  HeadGrid of[2];
};

// Quotient and remainder, in 32 bits where they suffice: a 64-bit division is slow on a GPU.
__device__ __forceinline__ int64_t divide(int64_t value, unsigned by, unsigned* rest) {
  if (by == 1) {
    *rest = 0;
    return value;
  }
  if (value <= UINT32_MAX) {
    const unsigned narrow = static_cast<unsigned>(value);
    *rest = narrow % by;
    return narrow / by;
  }
  *rest = static_cast<unsigned>(value % by);
  return value / by;
}

template <typename T, int kCount, int kLanes>
__global__ void __launch_bounds__(kHeadThreads) head_kernel(const RopeParams p, const HeadGrids grids) {
  using Raw = Packet<T, kCount>;
  const RopeOperand& o = p.operands[blockIdx.y];
  const HeadGrid& grid = grids.of[blockIdx.y];
  const int lane = threadIdx.x % kLanes;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * (kHeadThreads / kLanes) + threadIdx.x / kLanes;

  // Groups past the end take part in the shuffles, and touch no memory.
  unsigned column_block, chunk;
  int64_t outer = divide(group < grid.groups ? group : 0, grid.columns, &column_block);
  outer = divide(outer, grid.chunks, &chunk);
  const int64_t first_row = static_cast<int64_t>(chunk) * kHeadRows;
  Offsets offsets = locate(o.outer, outer);
#pragma unroll
  for (int i = 0; i < kRopeStrides; ++i) offsets.of[i] += first_row * o.inner_strides[i];

  // The packets of this lane: elements [a, a + kCount) and [b, b + kCount) of each head.
  const int unit = static_cast<int>(column_block) * kLanes + lane;
  const int units = p.head_dim / (2 * kCount);
  int a, b;
  bool in_a, in_b;
  if (p.half) {
    const int rotary_units = p.rotary / (2 * kCount);
    in_a = in_b = unit < rotary_units;
    a = in_a ? unit * kCount : p.rotary + (unit - rotary_units) * 2 * kCount;
    b = in_a ? a + p.rotary / 2 : a + kCount;
  } else {
    a = unit * kCount;
    b = a + p.head_dim / 2;
    in_a = a < p.rotary;
    in_b = b < p.rotary;
  }
  const int64_t left = o.inner - first_row;
  const int rows = group < grid.groups && unit < units ? static_cast<int>(left < kHeadRows ? left : kHeadRows) : 0;

  Raw held[kHeadRows][2];
  const T* x = static_cast<const T*>(o.x) + offsets.of[kX];
#pragma unroll
  for (int row = 0; row < kHeadRows; ++row) {
    if (row < rows) {
      held[row][0].load(x + row * o.inner_strides[kX] + a);
      held[row][1].load(x + row * o.inner_strides[kX] + b);
    }
  }

  // While those are on their way: the parameters, and the angles of all rows or of the first one.
  Parameters<kCount> parameters[2];
  if (p.norm != RopeNorm::kNone && rows > 0) {
    parameters[0].load(p, o, a);
    parameters[1].load(p, o, b);
  }
  Angles<kCount> angles;
  const auto read = [&](const Offsets& at) {
    AxisRows axes{};
    if (p.tables == RopeTables::kAxes) {
      axes = axis_rows(p, o, at.of[kFirst] - o.first_shift, at.of[kToken] - p.start);
    }
    // Packets of pairs that stay as they are have no angles: those of the other packet do no harm.
    read_angles<T, kCount>(p, o, grid.vectors, at, at, axes, a, b, !in_b, &angles);
  };
  const bool shared = o.shared();
  if (shared && rows > 0 && in_a && turns(p, offsets.of[kToken])) read(offsets);

  Normaliser norms[kHeadRows];
  normalise(
      p, static_cast<float>(p.head_dim), norms,
      [&](float(&values)[kHeadRows]) {
#pragma unroll
        for (int row = 0; row < kHeadRows; ++row) values[row] = group_sum<kLanes>(values[row]);
      },
      [&](auto&& add) {
#pragma unroll
        for (int row = 0; row < kHeadRows; ++row) {
          if (row < rows) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
              float values[kCount];
              held[row][side].unpack_to(values);
#pragma unroll
              for (int j = 0; j < kCount; ++j) add(row, values[j]);
            }
          }
        }
      });

  T* out = static_cast<T*>(o.out) + offsets.of[kOut];
#pragma unroll
  for (int row = 0; row < kHeadRows; ++row) {
    if (row < rows) {
      Offsets at = offsets;
#pragma unroll
      for (int i = kFirst; i < kRopeStrides; ++i) at.of[i] += row * o.inner_strides[i];
      const bool rotates = in_a && turns(p, at.of[kToken]);
      if (!shared && rotates) read(at);
      float values_a[kCount], values_b[kCount];
      held[row][0].forget_unpacked();
      held[row][1].forget_unpacked();
      held[row][0].unpack_to(values_a);
      held[row][1].unpack_to(values_b);
      apply<T, kCount>(p, o, norms[row], parameters[0], values_a);
      apply<T, kCount>(p, o, norms[row], parameters[1], values_b);
      rotate<T, kCount>(p, angles, rotates, rotates && in_b, values_a, values_b);
      store_elements<T, kCount>(values_a, out + row * o.inner_strides[kOut] + a);
      store_elements<T, kCount>(values_b, out + row * o.inner_strides[kOut] + b);
    }
  }
}

// --- token kernel --------------------------------------------------------------------------------------

struct TokenGrid {
  TableVectors vectors[2];
  bool same_halves;  // packet b of a unit has the angles of packet a
};

// kOperands 2: q and k of a token, which have the same angles. kOperands 1: blockIdx.y says which.
template <typename T, int kUnits, int kOperands>
__global__ void __launch_bounds__(kRowThreads[kUnits / 2]) token_kernel(const RopeParams p, const TokenGrid grid) {
  constexpr int kCount = kPacketSize<T>;
  using Raw = Packet<T, kCount>;
  __shared__ float2 partials[3][kMaxWaves];
  const int first = kOperands == 1 ? blockIdx.y : 0;
  const RopeOperand& angles_of = p.operands[first];
  const int size = static_cast<int>(angles_of.inner) * p.head_dim;
  const int units = size / (2 * kCount);
  const int head_units = p.head_dim / (2 * kCount);

  for (int64_t token = blockIdx.x; token < angles_of.outer.rows; token += gridDim.x) {
    Offsets offsets[kOperands];
    Raw held[kOperands][kUnits][2];
    int a[kUnits], b[kUnits];  // in the row of all heads
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = threadIdx.x + i * blockDim.x;
      if (p.half) {
        const int head = unit / head_units;
        a[i] = head * p.head_dim + (unit - head * head_units) * kCount;
        b[i] = a[i] + p.head_dim / 2;
      } else {
        a[i] = unit * kCount;
        b[i] = a[i] + size / 2;
      }
    }
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
      const RopeOperand& o = p.operands[first + which];
      offsets[which] = locate(o.outer, token);
      const T* x = static_cast<const T*>(o.x) + offsets[which].of[kX];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (static_cast<int>(threadIdx.x + i * blockDim.x) < units) {
          held[which][i][0].load(x + a[i]);
          held[which][i][1].load(x + b[i]);
        }
      }
    }

    const bool rotates = turns(p, offsets[0].of[kToken]);
    AxisRows axes{};
    if (rotates && p.tables == RopeTables::kAxes) {
      axes = axis_rows(p, angles_of, offsets[0].of[kFirst] - angles_of.first_shift, offsets[0].of[kToken] - p.start);
    }

    int sums = 0;
    Normaliser norms[kOperands];
    normalise(
        p, static_cast<float>(size), norms,
        [&](float(&values)[kOperands]) {
          const float2 total = block_sum(float2{values[0], values[kOperands - 1]}, partials[sums++]);
          values[0] = total.x;
          values[kOperands - 1] = total.y;
        },
        [&](auto&& add) {
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
            if (static_cast<int>(threadIdx.x + i * blockDim.x) < units) {
#pragma unroll
              for (int which = 0; which < kOperands; ++which) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                  float values[kCount];
                  held[which][i][side].unpack_to(values);
#pragma unroll
                  for (int j = 0; j < kCount; ++j) add(which, values[j]);
                }
              }
            }
          }
        });

#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (static_cast<int>(threadIdx.x + i * blockDim.x) < units) {
        // Head and element of the head for both packets.
        const int head_a = a[i] / p.head_dim, head_b = b[i] / p.head_dim;
        const int at_a = a[i] - head_a * p.head_dim, at_b = b[i] - head_b * p.head_dim;
        const bool turns_a = rotates && at_a < p.rotary;
        const bool turns_b = rotates && at_b < p.rotary;
        Angles<kCount> angles;
        if (turns_a || turns_b) {
          const auto row_of = [&](int head) {
            Offsets row = offsets[0];
            row.of[kFirst] += head * angles_of.inner_strides[kFirst];
            row.of[kSecond] += head * angles_of.inner_strides[kSecond];
            return row;
          };
          // A packet of pairs that stay as they are has no angles: those of the first one do no harm.
          read_angles<T, kCount>(p, angles_of, grid.vectors[first], row_of(head_a), row_of(head_b), axes,
                                 turns_a ? at_a : 0, turns_b ? at_b : 0, grid.same_halves, &angles);
        }
#pragma unroll
        for (int which = 0; which < kOperands; ++which) {
          const RopeOperand& o = p.operands[first + which];
          Parameters<kCount> parameters[2];
          parameters[0].load(p, o, a[i]);
          parameters[1].load(p, o, b[i]);
          float values_a[kCount], values_b[kCount];
          held[which][i][0].forget_unpacked();
          held[which][i][1].forget_unpacked();
          held[which][i][0].unpack_to(values_a);
          held[which][i][1].unpack_to(values_b);
          apply<T, kCount>(p, o, norms[which], parameters[0], values_a);
          apply<T, kCount>(p, o, norms[which], parameters[1], values_b);
          rotate<T, kCount>(p, angles, turns_a, turns_b, values_a, values_b);
          T* out = static_cast<T*>(o.out) + offsets[which].of[kOut];
          store_elements<T, kCount>(values_a, out + a[i]);
          store_elements<T, kCount>(values_b, out + b[i]);
        }
      }
    }
    __syncthreads();  // before the partial sums are used again
  }
}

// --- plain kernel --------------------------------------------------------------------------------------

constexpr int kPlainLanes = 32;
constexpr int kPlainRows = 4;  // waves of a block

// Rounds from float64 by way of float32, as torch does.
template <typename A>
__device__ __forceinline__ void write_value(A value, void* base, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kFloat64) {
    static_cast<double*>(base)[at] = value;
  } else {
    const float narrow = static_cast<float>(value);
    store_elements<1>(&narrow, base, dtype, at);
  }
}

template <typename A>
__device__ __forceinline__ A round_value(bool rounds, Dtype dtype, A value) {
  if (!rounds || dtype == Dtype::kFloat64) return value;
  return rounded_to(dtype, static_cast<float>(value));
}

// The work of an operand, a wave to each: a head, or all heads of a token. A is the arithmetic of the rotation.
template <typename A>
__global__ void __launch_bounds__(kPlainLanes* kPlainRows) plain_kernel(const RopeParams p) {
  const RopeOperand& o = p.operands[blockIdx.y];
  const int lane = threadIdx.x;
  const int pairs = p.rotary / 2;
  const bool each = p.arithmetic == RopeArithmetic::kInput;
  const int64_t work = p.work(o);
  const int heads = p.across ? static_cast<int>(o.inner) : 1;

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kPlainRows; first < work;
       first += static_cast<int64_t>(gridDim.x) * kPlainRows) {
    // Waves past the end take part in the shuffles, and touch no memory.
    const int64_t unit = first + threadIdx.y;
    const bool live = unit < work;
    const int64_t number = live ? unit : first;
    const int64_t outer = p.across ? number : number / o.inner;
    const int64_t inner = p.across ? 0 : number - outer * o.inner;
    Offsets begin = locate(o.outer, outer);
#pragma unroll
    for (int i = 0; i < kRopeStrides; ++i) begin.of[i] += inner * o.inner_strides[i];

    const int size = live ? heads * p.head_dim : 0;
    Normaliser norms[1];
    normalise(
        p, static_cast<float>(heads) * static_cast<float>(p.head_dim), norms,
        [](float(&values)[1]) { values[0] = group_sum<kPlainLanes>(values[0]); },
        [&](auto&& add) {
          for (int i = lane; i < size; i += kPlainLanes) {
            const int head = i / p.head_dim;
            const int at = i - head * p.head_dim;
            add(0, read_value<float>(o.x, p.dtype, begin.of[kX] + head * o.inner_strides[kX] + at * o.x_step));
          }
        });
    if (!live) continue;
    const auto normed = [&](A value, int parameter) {
      if (p.norm == RopeNorm::kNone) return value;
      float result = rounded_to(p.round_dtype, norms[0](static_cast<float>(value)));
      if (o.weight != nullptr) result *= read_value<float>(o.weight, o.weight_dtype, parameter) + p.weight_offset;
      if (o.bias != nullptr) {
        if (p.round_dtype != Dtype::kNone && p.round_norm) result = rounded_to(p.dtype, result);
        result = exact_add(result, read_value<float>(o.bias, o.bias_dtype, parameter));
      }
      return static_cast<A>(p.round_norm ? rounded_to(p.dtype, result) : result);
    };

    for (int head = 0; head < heads; ++head) {
      Offsets row = begin;
#pragma unroll
      for (int i = 0; i < kRopeStrides; ++i) row.of[i] += head * o.inner_strides[i];
      const int64_t position = row.of[kToken] - p.start;
      const bool rotates = turns(p, row.of[kToken]);
      AxisRows axes{};
      if (rotates && p.tables == RopeTables::kAxes) axes = axis_rows(p, o, row.of[kFirst] - o.first_shift, position);
      const int parameters = p.across ? head * p.head_dim : 0;
      for (int pair = lane; pair < pairs; pair += kPlainLanes) {
        const int at_a = p.half ? pair : 2 * pair;
        const int at_b = p.half ? pair + pairs : 2 * pair + 1;
        A a = normed(read_value<A>(o.x, p.dtype, row.of[kX] + at_a * o.x_step), parameters + at_a);
        A b = normed(read_value<A>(o.x, p.dtype, row.of[kX] + at_b * o.x_step), parameters + at_b);
        if (rotates) {
          A cos_a, cos_b, sin_a, sin_b;
          if (p.tables == RopeTables::kFull) {
            const int64_t cos_row = row.of[kFirst] - o.first_shift;
            const int64_t sin_row = row.of[kSecond] - o.second_shift;
            cos_a = read_value<A>(o.cos[0], o.cos_dtype, cos_row + (o.compact_cos ? pair : at_a) * o.first_step);
            cos_b = read_value<A>(o.cos[0], o.cos_dtype, cos_row + (o.compact_cos ? pair : at_b) * o.first_step);
            sin_a = read_value<A>(o.sin[0], o.sin_dtype, sin_row + (o.compact_sin ? pair : at_a) * o.second_step);
            sin_b = read_value<A>(o.sin[0], o.sin_dtype, sin_row + (o.compact_sin ? pair : at_b) * o.second_step);
          } else {
            read_axes<A>(p, o, axes, static_cast<int>(row.of[kSecond]) + pair, &cos_a, &sin_a);
            cos_b = cos_a;
            sin_b = sin_a;
          }
          cos_a = round_value(each, p.dtype, cos_a);
          cos_b = round_value(each, p.dtype, cos_b);
          sin_a = round_value(each, p.dtype, sin_a);
          sin_b = round_value(each, p.dtype, sin_b);
          const A turned_a = exact_add(round_value(each, p.dtype, exact_mul(a, cos_a)),
                                       -round_value(each, p.dtype, exact_mul(b, sin_a)));
          const A turned_b = exact_add(round_value(each, p.dtype, exact_mul(b, cos_b)),
                                       round_value(each, p.dtype, exact_mul(a, sin_b)));
          a = turned_a;
          b = turned_b;
        }
        write_value(a, o.out, p.dtype, row.of[kOut] + at_a * o.out_step);
        write_value(b, o.out, p.dtype, row.of[kOut] + at_b * o.out_step);
      }
      for (int at = p.rotary + lane; at < p.head_dim; at += kPlainLanes) {
        const A value = read_value<A>(o.x, p.dtype, row.of[kX] + at * o.x_step);
        write_value(normed(value, parameters + at), o.out, p.dtype, row.of[kOut] + at * o.out_step);
      }
    }
  }
}

// --- launches ------------------------------------------------------------------------------------------

constexpr int64_t kMaxBlocks = 0x7fffffff;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether all strides of x and the result along the rows are multiples of `count` elements.
bool rows_are_multiples(const RopeOperand& o, int64_t count) {
  for (const RopeStride operand : {kX, kOut}) {
    if (o.inner_strides[operand] % count != 0) return false;
    for (int dim = 0; dim < o.outer.dims; ++dim) {
      if (o.outer.strides[operand][dim] % count != 0) return false;
    }
  }
  return true;
}

// Whether an operand can be walked in packets of `count` elements.
bool fits_packets(const RopeParams& p, const RopeOperand& o, int64_t count) {
  const int64_t bytes = count * bytes_of(p.dtype);
  if (o.x_step != 1 || o.out_step != 1 || !aligned(o.x, bytes) || !aligned(o.out, bytes)) return false;
  if (!aligned(o.weight, kPacketBytes) || !aligned(o.bias, kPacketBytes)) return false;
  if (p.head_dim % (2 * count) != 0 || p.rotary % count != 0) return false;
  if (p.half && p.tables != RopeTables::kNone && (p.rotary % (2 * count) != 0)) return false;
  return rows_are_multiples(o, count);
}

// Whether a full table can be read in packets that belong to `count` elements of x.
bool table_in_packets(const RopeParams& p, const RopeOperand& o, RopeStride which, int count) {
  if (p.tables != RopeTables::kFull) return false;
  const bool cos = which == kFirst;
  const bool compact = cos ? o.compact_cos : o.compact_sin;
  const Dtype dtype = cos ? o.cos_dtype : o.sin_dtype;
  const int64_t values = compact && !p.half ? count / 2 : count;
  const int64_t bytes = values * bytes_of(dtype);
  const int64_t access = std::min<int64_t>(bytes, kPacketBytes);
  const int64_t multiple = access / bytes_of(dtype);
  if (bytes < 8 || (cos ? o.first_step : o.second_step) != 1 || !aligned(cos ? o.cos[0] : o.sin[0], access)) return false;
  if ((cos ? o.first_shift : o.second_shift) % multiple != 0 || o.inner_strides[which] % multiple != 0) return false;
  for (int dim = 0; dim < o.outer.dims; ++dim) {
    if (o.outer.strides[which][dim] % multiple != 0) return false;
  }
  return true;
}

TableVectors table_vectors(const RopeParams& p, const RopeOperand& o, int count) {
  return {table_in_packets(p, o, kFirst, count), table_in_packets(p, o, kSecond, count)};
}

template <typename T, int kCount, int kLanes>
void launch_head_kernel(const RopeParams& p, int units, GpuStream stream) {
  HeadGrids grids{};
  int64_t most = 0;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    const int64_t chunks = ceil_div(o.inner, kHeadRows);
    const int64_t columns = ceil_div(units, kLanes);
    grids.of[i] = {o.outer.rows * chunks * columns, static_cast<unsigned>(chunks), static_cast<unsigned>(columns),
                   table_vectors(p, o, kCount)};
    most = std::max(most, grids.of[i].groups);
  }
  const dim3 blocks(static_cast<unsigned>(ceil_div(most, kHeadThreads / kLanes)), p.count);
  head_kernel<T, kCount, kLanes><<<blocks, kHeadThreads, 0, stream>>>(p, grids);
}

template <typename T, int kCount>
void launch_head_kernel(const RopeParams& p, GpuStream stream) {
  const int units = p.head_dim / (2 * kCount);
  if (kCount == 8 && units <= 4) return launch_head_kernel<T, kCount, 4>(p, units, stream);
  if (units <= 8) return launch_head_kernel<T, kCount, 8>(p, units, stream);
  if (units <= 16) return launch_head_kernel<T, kCount, 16>(p, units, stream);
  launch_head_kernel<T, kCount, 32>(p, units, stream);
}

// Whether the head kernel has room for the work in its counters, and for a row in a group of lanes if need be.
bool head_kernel_fits(const RopeParams& p, int64_t count) {
  const int64_t units = p.head_dim / (2 * count);
  if (p.across || (p.norm != RopeNorm::kNone && units > 32)) return false;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    const int64_t chunks = ceil_div(o.inner, kHeadRows);
    const int64_t groups = o.outer.rows * chunks * ceil_div(units, 32);
    if (chunks > UINT32_MAX || groups / (kHeadThreads / 32) >= kMaxBlocks || !fits_packets(p, o, count)) return false;
  }
  return true;
}

// Whether q and k have their tokens in the same order and turn them by the same angles.
bool twins(const RopeParams& p) {
  if (p.count != 2) return false;
  const RopeOperand& q = p.operands[0];
  const RopeOperand& k = p.operands[1];
  if (q.inner != k.inner || q.outer.dims != k.outer.dims || q.coords != k.coords || q.first_step != k.first_step ||
      q.second_step != k.second_step || q.first_shift != k.first_shift || q.second_shift != k.second_shift ||
      q.compact_cos != k.compact_cos || q.compact_sin != k.compact_sin) {
    return false;
  }
  for (int axis = 0; axis < kMaxAxes; ++axis) {
    if (q.cos[axis] != k.cos[axis] || q.sin[axis] != k.sin[axis]) return false;
  }
  for (const RopeStride which : {kFirst, kSecond, kToken}) {
    if (q.inner_strides[which] != k.inner_strides[which]) return false;
    for (int dim = 0; dim < q.outer.dims; ++dim) {
      if (q.outer.sizes[dim] != k.outer.sizes[dim] || q.outer.strides[which][dim] != k.outer.strides[which][dim]) return false;
    }
  }
  return true;
}

template <typename T, int kUnits, int kOperands>
void launch_token_kernel(const RopeParams& p, int64_t units, GpuStream stream) {
  constexpr int kCount = kPacketSize<T>;
  const RopeOperand& q = p.operands[0];
  TokenGrid grid{};
  int64_t tokens = 0;
  for (int i = 0; i < p.count; ++i) {
    grid.vectors[i] = table_vectors(p, p.operands[i], kCount);
    tokens = std::max(tokens, p.operands[i].outer.rows);
  }
  // Halves of a row that begin at the same element of a head.
  const bool shared = q.inner_strides[kFirst] == 0 && q.inner_strides[kSecond] == 0;
  grid.same_halves = !p.half && shared && q.inner % 2 == 0;
  const unsigned threads = static_cast<unsigned>(ceil_div(ceil_div(units, kUnits), kWaveMultiple) * kWaveMultiple);
  const dim3 blocks(static_cast<unsigned>(std::min(kMaxBlocks, tokens)), kOperands == 1 ? p.count : 1);
  token_kernel<T, kUnits, kOperands><<<blocks, threads, 0, stream>>>(p, grid);
}

template <typename T, int kOperands>
void launch_token_kernel(const RopeParams& p, int64_t units, GpuStream stream) {
  if (units <= kRowThreads[0] * kRowUnits[0]) return launch_token_kernel<T, 1, kOperands>(p, units, stream);
  if (units <= kRowThreads[1] * kRowUnits[1]) return launch_token_kernel<T, 2, kOperands>(p, units, stream);
  launch_token_kernel<T, 4, kOperands>(p, units, stream);
}

// The largest row of an operand in units of the token kernel, or -1 if the kernel cannot serve it.
int64_t token_units(const RopeParams& p, int64_t count) {
  if (!p.across || (p.half && p.rotary != p.head_dim)) return -1;
  int64_t most = 0;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    const int64_t size = o.inner * p.head_dim;
    if (!fits_packets(p, o, count) || size % (2 * count) != 0) return -1;
    if (o.inner > 1 && (o.inner_strides[kX] != p.head_dim || o.inner_strides[kOut] != p.head_dim)) return -1;
    most = std::max(most, size / (2 * count));
  }
  return most <= static_cast<int64_t>(kRowThreads[2]) * kRowUnits[2] ? most : -1;
}

template <typename T>
bool launch_fast(const RopeParams& p, GpuStream stream) {
  constexpr int kCount = kPacketSize<T>;
  const int64_t units = token_units(p, kCount);
  if (units >= 0) {
    if (twins(p)) {
      launch_token_kernel<T, 2>(p, units, stream);
    } else {
      launch_token_kernel<T, 1>(p, units, stream);
    }
    return true;
  }
  if (head_kernel_fits(p, kCount)) {
    launch_head_kernel<T, kCount>(p, stream);
    return true;
  }
  if constexpr (kCount == 8) {
    if (head_kernel_fits(p, kCount / 2)) {
      launch_head_kernel<T, kCount / 2>(p, stream);
      return true;
    }
  }
  return false;
}

template <typename A>
void launch_plain(const RopeParams& p, GpuStream stream) {
  int64_t work = 0;
  for (int i = 0; i < p.count; ++i) work = std::max(work, p.work(p.operands[i]));
  const dim3 blocks(static_cast<unsigned>(std::min(kMaxBlocks, ceil_div(work, kPlainRows))), p.count);
  plain_kernel<A><<<blocks, dim3(kPlainLanes, kPlainRows), 0, stream>>>(p);
}

bool has_float64(const RopeParams& p) {
  for (int i = 0; i < p.count; ++i) {
    if (p.operands[i].cos_dtype == Dtype::kFloat64 || p.operands[i].sin_dtype == Dtype::kFloat64) return true;
  }
  return p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64;
}

}  // namespace

int rope_gpu(const RopeParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  bool done = false;
  if (!has_float64(p)) {
    switch (p.dtype) {
      case Dtype::kFloat16: done = launch_fast<Half>(p, stream); break;
      case Dtype::kBFloat16: done = launch_fast<BFloat16>(p, stream); break;
      default: done = launch_fast<float>(p, stream); break;
    }
  }
  if (!done) {
    if (p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64) {
      launch_plain<double>(p, stream);
    } else {
      launch_plain<float>(p, stream);
    }
  }
  return last_launch_error();
}

}  // namespace diffkern
