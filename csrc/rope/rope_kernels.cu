// CUDA and HIP kernels for rope, rope_3d and qk_norm_rope.
//
//  head kernel:  rows of one head, aligned, normalised alone or not at all. A few lanes to a head; they load
//                several heads at once that share their angles, and read those once.
//  token kernel: all heads of a token normalised together, a block to a token, which stays in registers; q and
//                k side by side, so that the angles are read once for both.
//  general kernel: any dtypes, alignment, strides and sizes, and float64; a wave to a row, which it reads again,
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

// What a row's sums say: the normalised value is (v - mean) * factor + rest, where an RMS norm has neither mean nor
// rest. What rounding left out of the mean comes to light as the mean of v - mean; without it the whole row would be
// shifted.
struct Normaliser {
  float mean;
  float factor;
  float rest;
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
    norms[row].rest = -rest * norms[row].factor;
  }
}

// A thread computes kSegment neighbouring elements at a time, for all the rows that it holds: what belongs to the
// columns is read once, and few values are in registers at once.
constexpr int kSegment = 4;

// Options of a call that are off in nearly all: no rounding in between, no bias, no offset, parameters of the dtype of
// the input. Kernels that know this spare the tests.
bool is_plain(const RopeParams& p) {
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    if (o.bias != nullptr || (o.weight != nullptr && o.weight_dtype != p.dtype)) return false;
  }
  return p.arithmetic == RopeArithmetic::kFloat32 && !p.round_norm && p.round_dtype == Dtype::kNone && p.weight_offset == 0.0f;
}

template <typename T, bool kPlain>
struct Parameters {
  float weight[kSegment];
  float bias[kSegment];

  __device__ __forceinline__ void load(const RopeParams& p, const RopeOperand& o, int at) {
    if (o.weight != nullptr) {
      load_one(o.weight, o.weight_dtype, at, weight);
      if (!kPlain) {
#pragma unroll
        for (int j = 0; j < kSegment; ++j) weight[j] += p.weight_offset;
      }
    }
    if (!kPlain && o.bias != nullptr) load_one(o.bias, o.bias_dtype, at, bias);
  }

  // Of float32 or of T.
  static __device__ __forceinline__ void load_one(const void* base, Dtype dtype, int at, float* to) {
    if (!kPlain && dtype == Dtype::kFloat32) return load_elements<float, kSegment>(static_cast<const float*>(base) + at, to);
    load_elements<T, kSegment>(static_cast<const T*>(base) + at, to);
  }
};

template <typename T, bool kPlain>
__device__ __forceinline__ void apply(const RopeParams& p, const RopeOperand& o, const Normaliser& norm,
                                      const Parameters<T, kPlain>& parameters, float* values) {
  if (p.norm == RopeNorm::kNone) return;
#pragma unroll
  for (int j = 0; j < kSegment; ++j) {
    values[j] = p.norm == RopeNorm::kRms ? values[j] * norm.factor : fmaf(values[j] - norm.mean, norm.factor, norm.rest);
  }
  if (!kPlain && p.round_dtype != Dtype::kNone) {
#pragma unroll
    for (int j = 0; j < kSegment; ++j) values[j] = rounded_to(p.round_dtype, values[j]);
  }
  if (o.weight != nullptr) {
#pragma unroll
    for (int j = 0; j < kSegment; ++j) values[j] *= parameters.weight[j];
  }
  if (kPlain) return;
  if (o.bias != nullptr) {
    const bool product = p.round_norm && p.round_dtype != Dtype::kNone;
#pragma unroll
    for (int j = 0; j < kSegment; ++j) {
      values[j] = exact_add(product ? rounded<T>(values[j]) : values[j], parameters.bias[j]);
    }
  }
  if (p.round_norm) {
#pragma unroll
    for (int j = 0; j < kSegment; ++j) values[j] = rounded<T>(values[j]);
  }
}

// --- packets -------------------------------------------------------------------------------------------

// kCount elements of T as they lie in memory: 16 or 8 bytes, read and written in one access.
template <typename T, int kCount>
struct Packet {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kSegmentWords = kSegment * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords == 4 || kWords == 2, "a packet is one access");
  uint32_t words[kWords];

  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kWords == 4) {
      const uint4 all = load_once(from);
      words[0] = all.x;
      words[1] = all.y;
      words[2] = all.z;
      words[3] = all.w;
    } else {
      const uint2 all = *reinterpret_cast<const uint2*>(from);
      words[0] = all.x;
      words[1] = all.y;
    }
  }

  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
    } else {
      *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
    }
  }

  __device__ __forceinline__ void unpack_segment(int segment, float* to) const {
    constexpr int kPerWord = kSegment / kSegmentWords;
#pragma unroll
    for (int i = 0; i < kSegmentWords; ++i) unpack<T>(words[segment * kSegmentWords + i], to + i * kPerWord);
  }

  __device__ __forceinline__ void pack_segment(int segment, const float* from) {
    constexpr int kPerWord = kSegment / kSegmentWords;
#pragma unroll
    for (int i = 0; i < kSegmentWords; ++i) words[segment * kSegmentWords + i] = pack<T>(from + i * kPerWord);
  }

  // Has the packet unpacked anew from here on: values kept over the sums would take twice the registers.
  __device__ __forceinline__ void forget_unpacked() {
#if !DIFFKERN_HIP
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
#endif
  }
};

// --- angles --------------------------------------------------------------------------------------------

struct Angles {
  float cos[kSegment];
  float sin[kSegment];
};

// kCount neighbouring values of a table, in one access if `vector` says that they can be.
template <int kCount>
__device__ __forceinline__ void read_table(const float* table, int64_t offset, int64_t step, bool vector, float* to) {
  if (vector) return load_elements<float, kCount>(table + offset, to);
#pragma unroll
  for (int j = 0; j < kCount; ++j) to[j] = table[offset + j * step];
}

// The values of a full table for a segment that begins at element `at` of the head.
template <bool kHalf>
__device__ __forceinline__ void read_full(const void* base, int64_t row, int64_t step, bool compact, bool vector, int at,
                                          float* to) {
  const float* table = static_cast<const float*>(base);
  if (!compact || kHalf) return read_table<kSegment>(table, row + at * step, step, vector, to);
  float each[kSegment / 2];
  read_table<kSegment / 2>(table, row + at / 2 * step, step, vector, each);
#pragma unroll
  for (int j = 0; j < kSegment; ++j) to[j] = each[j / 2];
}

template <typename A>
__device__ __forceinline__ A read_value(const void* base, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kFloat64) return static_cast<A>(static_cast<const double*>(base)[at]);
  float value;
  load_elements<1>(base, dtype, at, &value);
  return value;
}

// The pairs of a row in the tables of the axes, one after the other from `pair` on.
struct AxisWalk {
  int index;  // behind the padding
  AxisColumn place;

  __device__ __forceinline__ AxisWalk(const RopeParams& p, int pair) : index(pair - p.front_pad) {
    place = axis_column(p, index < 0 ? 0 : index);
  }

  __device__ __forceinline__ void step(const RopeParams& p) {
    if (++index <= 0) return;
    if (p.alternating) {
      if (++place.axis == p.axes) place = {0, place.column + 1};
    } else {
      int width = p.widths[0];
#pragma unroll
      for (int axis = 1; axis < kMaxAxes; ++axis) width = place.axis == axis ? p.widths[axis] : width;
      if (++place.column == width) place = {place.axis + 1, 0};
    }
  }

  // The angle here. kAnyDtype false: from float32 tables.
  template <typename A, bool kAnyDtype>
  __device__ __forceinline__ void read(const RopeOperand& o, const AxisRows& rows, A* cos, A* sin) const {
    *cos = 1.0f;
    *sin = 0.0f;
    if (index < 0) return;
    // Chosen by comparisons: an array that is indexed at run time would go through local memory.
    const void* cos_base = o.cos[0];
    const void* sin_base = o.sin[0];
    int at = rows.at[0];
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
    at += place.column;
    if constexpr (kAnyDtype) {
      *cos = read_value<A>(cos_base, o.cos_dtype, at);
      *sin = read_value<A>(sin_base, o.sin_dtype, at);
    } else {
      *cos = static_cast<const float*>(cos_base)[at];
      *sin = static_cast<const float*>(sin_base)[at];
    }
  }
};

// Which accesses to the full tables can be packets.
struct TableVectors {
  bool cos;
  bool sin;
};

// Where the angles of a token, or of a head, are.
struct AngleRow {
  int64_t first;   // in the cosines
  int64_t second;  // in the sines, or the number of the first pair
  AxisRows axes;
};

__device__ __forceinline__ AngleRow angle_row(const RopeParams& p, const RopeOperand& o, const Offsets& offsets) {
  AngleRow row{offsets.of[kFirst] - o.first_shift, offsets.of[kSecond] - o.second_shift, {}};
  if (p.tables == RopeTables::kAxes) row.axes = axis_rows(p, o, row.first, offsets.of[kToken] - p.start);
  return row;
}

// The angles of a segment. at_cos and at_sin are its first element in the head, or, for the second elements of pairs
// that are half a row apart and have one angle, that of the first elements.
template <typename T, bool kPlain, bool kHalf>
__device__ __forceinline__ void read_angles(const RopeParams& p, const RopeOperand& o, const TableVectors& vectors,
                                            const AngleRow& row, int at_cos, int at_sin, Angles* angles) {
  if (p.tables == RopeTables::kFull) {
    read_full<kHalf>(o.cos[0], row.first, o.first_step, o.compact_cos, vectors.cos, at_cos, angles->cos);
    read_full<kHalf>(o.sin[0], row.second, o.second_step, o.compact_sin, vectors.sin, at_sin, angles->sin);
  } else {
    constexpr int kElements = kHalf ? 1 : 2;  // of the segment with one angle
    AxisWalk walk(p, static_cast<int>(row.second) + at_cos / kElements);
#pragma unroll
    for (int j = 0; j < kSegment; j += kElements) {
      if (j > 0) walk.step(p);
      walk.template read<float, false>(o, row.axes, angles->cos + j, angles->sin + j);
      angles->cos[j + kElements - 1] = angles->cos[j];
      angles->sin[j + kElements - 1] = angles->sin[j];
    }
  }
  if (!kPlain && p.arithmetic == RopeArithmetic::kInput) {
#pragma unroll
    for (int j = 0; j < kSegment; ++j) {
      angles->cos[j] = rounded<T>(angles->cos[j]);
      angles->sin[j] = rounded<T>(angles->sin[j]);
    }
  }
}

// The angles of the second elements of pairs that are half a row apart.
template <typename T, bool kPlain>
__device__ __forceinline__ void read_second_angles(const RopeParams& p, const RopeOperand& o, const TableVectors& vectors,
                                                   const AngleRow& row, int at_a, int at_b, const Angles& first,
                                                   Angles* angles) {
  if (o.compact_cos && o.compact_sin) {
    *angles = first;
  } else {
    read_angles<T, kPlain, true>(p, o, vectors, row, o.compact_cos ? at_a : at_b, o.compact_sin ? at_a : at_b, angles);
  }
}

// Turns neighbouring pairs.
template <typename T, bool kPlain>
__device__ __forceinline__ void rotate(const RopeParams& p, const Angles& angles, float* values) {
  const bool rounds = p.arithmetic == RopeArithmetic::kInput;
#pragma unroll
  for (int j = 0; j < kSegment; j += 2) {
    const float first = values[j];
    const float second = values[j + 1];
    values[j] = turn<T, kPlain>(rounds, first, second, angles.cos[j], -angles.sin[j]);
    values[j + 1] = turn<T, kPlain>(rounds, second, first, angles.cos[j + 1], angles.sin[j + 1]);
  }
}

// Turns pairs with one element in a and one in b.
template <typename T, bool kPlain>
__device__ __forceinline__ void rotate(const RopeParams& p, const Angles& angles_a, const Angles& angles_b, float* a,
                                       float* b) {
  const bool rounds = p.arithmetic == RopeArithmetic::kInput;
#pragma unroll
  for (int j = 0; j < kSegment; ++j) {
    const float first = a[j];
    const float second = b[j];
    a[j] = turn<T, kPlain>(rounds, first, second, angles_a.cos[j], -angles_a.sin[j]);
    b[j] = turn<T, kPlain>(rounds, second, first, angles_b.cos[j], angles_b.sin[j]);
  }
}

__device__ __forceinline__ bool turns(const RopeParams& p, int64_t token) {
  return p.tables != RopeTables::kNone && (!p.partial || static_cast<uint64_t>(token - p.start) < static_cast<uint64_t>(p.length));
}

// --- head kernel ---------------------------------------------------------------------------------------

// How the work of an operand is divided among groups of lanes.
struct HeadGrid {
  int64_t groups;    // of lanes, all in all
  unsigned chunks;   // of the innermost loop
  unsigned columns;  // groups side by side in a row, for long rows without a norm
  int rows;          // of a chunk: up to kHeadRows that have the same angles
  TableVectors vectors;
};

struct HeadGrids {
  HeadGrid of[2];
  int lanes;  // of a group, a power of two
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

template <typename T, int kCount, bool kPlain, bool kHalf>
__global__ void __launch_bounds__(kHeadThreads, kHeadBlocks) head_kernel(const RopeParams p, const HeadGrids grids) {
  const RopeOperand& o = p.operands[blockIdx.y];
  const HeadGrid grid = blockIdx.y == 0 ? grids.of[0] : grids.of[1];  // an index would go through local memory
  const int lanes = grids.lanes;  // a power of two
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t group = static_cast<int64_t>(blockIdx.x) * (kHeadThreads / lanes) + threadIdx.x / lanes;

  // Groups past the end take part in the shuffles, and touch no memory.
  unsigned column_block, chunk;
  int64_t outer = divide(group < grid.groups ? group : 0, grid.columns, &column_block);
  outer = divide(outer, grid.chunks, &chunk);
  const int64_t first_row = static_cast<int64_t>(chunk) * grid.rows;
  Offsets offsets = locate(o.outer, outer);
#pragma unroll
  for (int i = 0; i < kRopeStrides; ++i) offsets.of[i] += first_row * o.inner_strides[i];

  // The packets of this lane: elements [at[0], at[0] + kCount) and [at[1], at[1] + kCount) of each head.
  const int unit = static_cast<int>(column_block) * lanes + lane;
  const int units = p.head_dim / (2 * kCount);
  int at[2];
  if (kHalf) {
    const int rotary_units = p.rotary / (2 * kCount);
    const bool paired = unit < rotary_units;
    at[0] = paired ? unit * kCount : p.rotary + (unit - rotary_units) * 2 * kCount;
    at[1] = paired ? at[0] + p.rotary / 2 : at[0] + kCount;
  } else {
    at[0] = unit * kCount;
    at[1] = at[0] + p.head_dim / 2;
  }
  const int64_t left = o.inner - first_row;
  const int rows = group < grid.groups && unit < units ? static_cast<int>(left < grid.rows ? left : grid.rows) : 0;

  Packet<T, kCount> held[kHeadRows][2];
  const T* x = static_cast<const T*>(o.x) + offsets.of[kX];
#pragma unroll
  for (int row = 0; row < kHeadRows; ++row) {
    if (row < rows) {
      held[row][0].load(x + row * o.inner_strides[kX] + at[0]);
      held[row][1].load(x + row * o.inner_strides[kX] + at[1]);
    }
  }

  Normaliser norms[kHeadRows];
  normalise(
      p, static_cast<float>(p.head_dim), norms,
      [&](float(&values)[kHeadRows]) {
        for (int mask = lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
          for (int row = 0; row < kHeadRows; ++row) values[row] += shuffle_xor(values[row], mask);
        }
      },
      [&](auto&& add) {
#pragma unroll
        for (int row = 0; row < kHeadRows; ++row) {
          if (row < rows) {
#pragma unroll
            for (int i = 0; i < 2 * kCount; i += kSegment) {
              float values[kSegment];
              held[row][i / kCount].unpack_segment(i % kCount / kSegment, values);
#pragma unroll
              for (int j = 0; j < kSegment; ++j) add(row, values[j]);
            }
          }
        }
      });

#pragma unroll
  for (int row = 0; row < kHeadRows; ++row) {
    held[row][0].forget_unpacked();
    held[row][1].forget_unpacked();
  }
  const bool rotates = rows > 0 && turns(p, offsets.of[kToken]);
  AngleRow angles_at{};
  if (rotates) angles_at = angle_row(p, o, offsets);

#pragma unroll
  for (int segment = 0; segment < kCount / kSegment; ++segment) {
    const int at_a = at[0] + segment * kSegment;
    const int at_b = at[1] + segment * kSegment;
    if constexpr (kHalf) {
      Parameters<T, kPlain> parameters[2];
      Angles angles[2];
      const bool turned = rotates && at_a < p.rotary;
      if (rows > 0) {
        parameters[0].load(p, o, at_a);
        parameters[1].load(p, o, at_b);
      }
      if (turned) {
        read_angles<T, kPlain, true>(p, o, grid.vectors, angles_at, at_a, at_a, &angles[0]);
        read_second_angles<T, kPlain>(p, o, grid.vectors, angles_at, at_a, at_b, angles[0], &angles[1]);
      }
#pragma unroll
      for (int row = 0; row < kHeadRows; ++row) {
        if (row < rows) {
          float a[kSegment], b[kSegment];
          held[row][0].unpack_segment(segment, a);
          held[row][1].unpack_segment(segment, b);
          apply<T, kPlain>(p, o, norms[row], parameters[0], a);
          apply<T, kPlain>(p, o, norms[row], parameters[1], b);
          if (turned) rotate<T, kPlain>(p, angles[0], angles[1], a, b);
          held[row][0].pack_segment(segment, a);
          held[row][1].pack_segment(segment, b);
        }
      }
    } else {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int here = side == 0 ? at_a : at_b;
        Parameters<T, kPlain> parameters;
        Angles angles;
        const bool turned = rotates && here < p.rotary;
        if (rows > 0) parameters.load(p, o, here);
        if (turned) read_angles<T, kPlain, false>(p, o, grid.vectors, angles_at, here, here, &angles);
#pragma unroll
        for (int row = 0; row < kHeadRows; ++row) {
          if (row < rows) {
            float values[kSegment];
            held[row][side].unpack_segment(segment, values);
            apply<T, kPlain>(p, o, norms[row], parameters, values);
            if (turned) rotate<T, kPlain>(p, angles, values);
            held[row][side].pack_segment(segment, values);
          }
        }
      }
    }
  }

  T* out = static_cast<T*>(o.out) + offsets.of[kOut];
#pragma unroll
  for (int row = 0; row < kHeadRows; ++row) {
    if (row < rows) {
      held[row][0].store(out + row * o.inner_strides[kOut] + at[0]);
      held[row][1].store(out + row * o.inner_strides[kOut] + at[1]);
    }
  }
}

// --- token kernel --------------------------------------------------------------------------------------

struct TokenGrid {
  TableVectors vectors[2];
  Divisor head_dim;
  Divisor head_units;
  bool same_halves;  // the second packet of a unit has the angles of the first one
};

// kOperands 2: q and k of a token, which have the same angles. kOperands 1: blockIdx.y says which.
template <typename T, int kOperands, bool kPlain, bool kHalf>
__global__ void __launch_bounds__(kTokenThreads, (kTokenBlocks<sizeof(T), kHalf>)) token_kernel(const RopeParams p, const TokenGrid grid) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kUnits = kTokenUnits<sizeof(T)>;
  __shared__ float2 partials[3][kMaxWaves];
  const int first = kOperands == 1 ? blockIdx.y : 0;
  const RopeOperand& angles_of = p.operands[first];
  const TableVectors vectors = first == 0 ? grid.vectors[0] : grid.vectors[1];  // an index would go through local memory
  const int size = static_cast<int>(angles_of.inner) * p.head_dim;
  const int units = size / (2 * kCount);
  const auto live = [&](int i) { return static_cast<int>(threadIdx.x + i * blockDim.x) < units; };

  int at[kUnits][2];  // the packets of this thread, in the row of all heads
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = threadIdx.x + i * blockDim.x;
    if (kHalf) {
      const int head = static_cast<int>(grid.head_units.divide(unit));
      at[i][0] = head * p.head_dim + (unit - head * static_cast<int>(grid.head_units.value)) * kCount;
      at[i][1] = at[i][0] + p.head_dim / 2;
    } else {
      at[i][0] = unit * kCount;
      at[i][1] = at[i][0] + size / 2;
    }
  }

  for (int64_t token = blockIdx.x; token < angles_of.outer.rows; token += gridDim.x) {
    Offsets offsets[kOperands];
    Packet<T, kCount> held[kOperands][kUnits][2];
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
      const RopeOperand& o = p.operands[first + which];
      offsets[which] = locate(o.outer, token);
      const T* x = static_cast<const T*>(o.x) + offsets[which].of[kX];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (live(i)) {
          held[which][i][0].load(x + at[i][0]);
          held[which][i][1].load(x + at[i][1]);
        }
      }
    }
    const bool rotates = turns(p, offsets[0].of[kToken]);
    AngleRow row{};
    if (rotates) row = angle_row(p, angles_of, offsets[0]);

    int sums = 0;
    Normaliser norms[kOperands];
    normalise(
        p, static_cast<float>(size), norms,
        [&](float(&values)[kOperands]) {
          if constexpr (kOperands == 1) {
            values[0] = block_sum(values[0], &partials[sums++][0].x);
          } else {
            const float2 total = block_sum(float2{values[0], values[1]}, partials[sums++]);
            values[0] = total.x;
            values[1] = total.y;
          }
        },
        [&](auto&& add) {
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
            if (live(i)) {
#pragma unroll
              for (int which = 0; which < kOperands; ++which) {
#pragma unroll
                for (int k = 0; k < 2 * kCount; k += kSegment) {
                  float values[kSegment];
                  held[which][i][k / kCount].unpack_segment(k % kCount / kSegment, values);
#pragma unroll
                  for (int j = 0; j < kSegment; ++j) add(which, values[j]);
                }
              }
            }
          }
        });

#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!live(i)) continue;
#pragma unroll
      for (int which = 0; which < kOperands; ++which) {
        held[which][i][0].forget_unpacked();
        held[which][i][1].forget_unpacked();
      }
      // The heads of both packets, and where they begin in those.
      const int heads[2] = {static_cast<int>(grid.head_dim.divide(at[i][0])), static_cast<int>(grid.head_dim.divide(at[i][1]))};
      const int columns[2] = {at[i][0] - heads[0] * p.head_dim, at[i][1] - heads[1] * p.head_dim};
      const auto head_row = [&](int head) {
        AngleRow moved = row;
        moved.first += head * angles_of.inner_strides[kFirst];
        moved.second += head * angles_of.inner_strides[kSecond];
        return moved;
      };
      const auto load = [&](int which, int side, int segment, float* values) {
        const RopeOperand& o = p.operands[first + which];
        Parameters<T, kPlain> parameters;
        parameters.load(p, o, at[i][side] + segment * kSegment);
        held[which][i][side].unpack_segment(segment, values);
        apply<T, kPlain>(p, o, norms[which], parameters, values);
      };
#pragma unroll
      for (int segment = 0; segment < kCount / kSegment; ++segment) {
        if constexpr (kHalf) {
          Angles angles[2];
          if (rotates) {
            const AngleRow head = head_row(heads[0]);
            const int column = columns[0] + segment * kSegment;
            read_angles<T, kPlain, true>(p, angles_of, vectors, head, column, column, &angles[0]);
            read_second_angles<T, kPlain>(p, angles_of, vectors, head, column, column + p.head_dim / 2, angles[0], &angles[1]);
          }
#pragma unroll
          for (int which = 0; which < kOperands; ++which) {
            float a[kSegment], b[kSegment];
            load(which, 0, segment, a);
            load(which, 1, segment, b);
            if (rotates) rotate<T, kPlain>(p, angles[0], angles[1], a, b);
            held[which][i][0].pack_segment(segment, a);
            held[which][i][1].pack_segment(segment, b);
          }
        } else {
          Angles angles;
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int column = columns[side] + segment * kSegment;
            const bool turned = rotates && column < p.rotary;
            if (turned && (side == 0 || !grid.same_halves)) {
              read_angles<T, kPlain, false>(p, angles_of, vectors, head_row(heads[side]), column, column, &angles);
            }
#pragma unroll
            for (int which = 0; which < kOperands; ++which) {
              float values[kSegment];
              load(which, side, segment, values);
              if (turned) rotate<T, kPlain>(p, angles, values);
              held[which][i][side].pack_segment(segment, values);
            }
          }
        }
      }
#pragma unroll
      for (int which = 0; which < kOperands; ++which) {
        T* out = static_cast<T*>(p.operands[first + which].out) + offsets[which].of[kOut];
        held[which][i][0].store(out + at[i][0]);
        held[which][i][1].store(out + at[i][1]);
      }
    }
    __syncthreads();  // before the partial sums are used again
  }
}

// --- general kernel ------------------------------------------------------------------------------------

constexpr int kGeneralLanes = 32;
constexpr int kGeneralRows = 4;  // waves of a block

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
__global__ void __launch_bounds__(kGeneralLanes* kGeneralRows) general_kernel(const RopeParams p) {
  const RopeOperand& o = p.operands[blockIdx.y];
  const int lane = threadIdx.x;
  const int pairs = p.rotary / 2;
  const bool each = p.arithmetic == RopeArithmetic::kInput;
  const int64_t work = p.work(o);
  const int heads = p.across ? static_cast<int>(o.inner) : 1;

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGeneralRows; first < work;
       first += static_cast<int64_t>(gridDim.x) * kGeneralRows) {
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
        [](float(&values)[1]) { values[0] = group_sum<kGeneralLanes>(values[0]); },
        [&](auto&& add) {
          for (int i = lane; i < size; i += kGeneralLanes) {
            const int head = i / p.head_dim;
            const int at = i - head * p.head_dim;
            add(0, read_value<float>(o.x, p.dtype, begin.of[kX] + head * o.inner_strides[kX] + at * o.x_step));
          }
        });
    if (!live) continue;
    const auto normed = [&](A value, int parameter) {
      if (p.norm == RopeNorm::kNone) return value;
      const Normaliser& norm = norms[0];
      const float plain = static_cast<float>(value);
      float result = p.norm == RopeNorm::kRms ? plain * norm.factor : fmaf(plain - norm.mean, norm.factor, norm.rest);
      result = rounded_to(p.round_dtype, result);
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
      for (int pair = lane; pair < pairs; pair += kGeneralLanes) {
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
            AxisWalk(p, static_cast<int>(row.of[kSecond]) + pair).template read<A, true>(o, axes, &cos_a, &sin_a);
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
      for (int at = p.rotary + lane; at < p.head_dim; at += kGeneralLanes) {
        const A value = read_value<A>(o.x, p.dtype, row.of[kX] + at * o.x_step);
        write_value(normed(value, parameters + at), o.out, p.dtype, row.of[kOut] + at * o.out_step);
      }
    }
  }
}

// --- launches ------------------------------------------------------------------------------------------

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kMaxLanes = 32;  // of a group in the head kernel

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
  const auto parameter = [&](Dtype dtype) { return dtype == Dtype::kNone || dtype == Dtype::kFloat32 || dtype == p.dtype; };
  if (!parameter(o.weight_dtype) || !parameter(o.bias_dtype)) return false;
  const int64_t bytes = count * bytes_of(p.dtype);
  if (o.x_step != 1 || o.out_step != 1 || !aligned(o.x, bytes) || !aligned(o.out, bytes)) return false;
  if (!aligned(o.weight, kPacketBytes) || !aligned(o.bias, kPacketBytes)) return false;
  if (p.head_dim % (2 * count) != 0 || p.rotary % count != 0) return false;
  if (p.half && p.tables != RopeTables::kNone && (p.rotary % (2 * count) != 0)) return false;
  return rows_are_multiples(o, count);
}

// Whether the values of a full table that belong to a segment can be read in one access.
bool table_in_packets(const RopeParams& p, const RopeOperand& o, RopeStride which) {
  if (p.tables != RopeTables::kFull) return false;
  const bool cos = which == kFirst;
  const int64_t multiple = (cos ? o.compact_cos : o.compact_sin) && !p.half ? kSegment / 2 : kSegment;
  if ((cos ? o.first_step : o.second_step) != 1) return false;
  if (!aligned(cos ? o.cos[0] : o.sin[0], multiple * static_cast<int64_t>(sizeof(float)))) return false;
  if ((cos ? o.first_shift : o.second_shift) % multiple != 0 || o.inner_strides[which] % multiple != 0) return false;
  for (int dim = 0; dim < o.outer.dims; ++dim) {
    if (o.outer.strides[which][dim] % multiple != 0) return false;
  }
  return true;
}

TableVectors table_vectors(const RopeParams& p, const RopeOperand& o) {
  return {table_in_packets(p, o, kFirst), table_in_packets(p, o, kSecond)};
}

template <typename T, int kCount>
void launch_head_kernel(const RopeParams& p, GpuStream stream) {
  const int64_t units = p.head_dim / (2 * kCount);
  HeadGrids grids{};
  grids.lanes = 4;
  while (grids.lanes < units && grids.lanes < kMaxLanes) grids.lanes *= 2;
  int64_t most = 0;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    const int rows = o.shared() ? kHeadRows : 1;
    const int64_t chunks = ceil_div(o.inner, rows);
    const int64_t columns = ceil_div(units, grids.lanes);
    grids.of[i] = {o.outer.rows * chunks * columns, static_cast<unsigned>(chunks), static_cast<unsigned>(columns), rows,
                   table_vectors(p, o)};
    most = std::max(most, grids.of[i].groups);
  }
  const dim3 blocks(static_cast<unsigned>(ceil_div(most, kHeadThreads / grids.lanes)), p.count);
  // Narrow packets are rare enough to do without a plain form.
  const auto launch = [&](auto plain) {
    if (p.half) {
      head_kernel<T, kCount, plain.value, true><<<blocks, kHeadThreads, 0, stream>>>(p, grids);
    } else {
      head_kernel<T, kCount, plain.value, false><<<blocks, kHeadThreads, 0, stream>>>(p, grids);
    }
  };
  constexpr bool kHasPlain = kCount == kPacketSize<T> && sizeof(T) < sizeof(float);
  if (kHasPlain && is_plain(p)) {
    launch(std::integral_constant<bool, kHasPlain>{});
  } else {
    launch(std::false_type{});
  }
}

// Whether the head kernel has room for the work in its counters, and for a row in a group of lanes if need be.
bool head_kernel_fits(const RopeParams& p, int64_t count) {
  const int64_t units = p.head_dim / (2 * count);
  if (p.across || (p.norm != RopeNorm::kNone && units > kMaxLanes)) return false;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    const int64_t chunks = ceil_div(o.inner, o.shared() ? kHeadRows : 1);
    const int64_t groups = o.outer.rows * chunks * ceil_div(units, kMaxLanes);
    if (chunks > UINT32_MAX || groups / (kHeadThreads / kMaxLanes) >= kMaxBlocks || !fits_packets(p, o, count)) return false;
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

template <typename T, int kOperands>
void launch_token_kernel(const RopeParams& p, int64_t units, GpuStream stream) {
  TokenGrid grid{};
  grid.head_dim = make_divisor(static_cast<uint32_t>(p.head_dim));
  grid.head_units = make_divisor(static_cast<uint32_t>(p.head_dim / (2 * kPacketSize<T>)));
  int64_t tokens = 0;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    grid.vectors[i] = table_vectors(p, o);
    // Halves of a row begin at the same element of heads that have the same angles.
    const bool same = o.inner_strides[kFirst] == 0 && o.inner_strides[kSecond] == 0 && o.inner % 2 == 0;
    grid.same_halves = (i == 0 || grid.same_halves) && same;
    tokens = std::max(tokens, o.outer.rows);
  }
  const int64_t wanted = ceil_div(units, kTokenUnits<sizeof(T)>);
  const unsigned threads = static_cast<unsigned>(ceil_div(wanted, kWaveMultiple) * kWaveMultiple);
  const dim3 blocks(static_cast<unsigned>(std::min(kMaxBlocks, tokens)), kOperands == 1 ? p.count : 1);
  const auto launch = [&](auto plain) {
    if (p.half) {
      token_kernel<T, kOperands, plain.value, true><<<blocks, threads, 0, stream>>>(p, grid);
    } else {
      token_kernel<T, kOperands, plain.value, false><<<blocks, threads, 0, stream>>>(p, grid);
    }
  };
  constexpr bool kHasPlain = kOperands == 2 && sizeof(T) < sizeof(float);
  if (kHasPlain && is_plain(p)) {
    launch(std::integral_constant<bool, kHasPlain>{});
  } else {
    launch(std::false_type{});
  }
}

// The largest row of an operand in units of the token kernel, or -1 if the kernel cannot serve it.
int64_t token_units(const RopeParams& p, int64_t count, int units_per_thread) {
  if (!p.across || (p.half && p.rotary != p.head_dim)) return -1;
  int64_t most = 0;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    const int64_t size = o.inner * p.head_dim;
    if (!fits_packets(p, o, count) || size % (2 * count) != 0) return -1;
    if (o.inner > 1 && (o.inner_strides[kX] != p.head_dim || o.inner_strides[kOut] != p.head_dim)) return -1;
    most = std::max(most, size / (2 * count));
  }
  return most <= kTokenThreads * units_per_thread ? most : -1;
}

template <typename T>
bool launch_fast(const RopeParams& p, GpuStream stream) {
  constexpr int kCount = kPacketSize<T>;
  const int64_t units = token_units(p, kCount, kTokenUnits<sizeof(T)>);
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
void launch_general(const RopeParams& p, GpuStream stream) {
  int64_t work = 0;
  for (int i = 0; i < p.count; ++i) work = std::max(work, p.work(p.operands[i]));
  const dim3 blocks(static_cast<unsigned>(std::min(kMaxBlocks, ceil_div(work, kGeneralRows))), p.count);
  general_kernel<A><<<blocks, dim3(kGeneralLanes, kGeneralRows), 0, stream>>>(p);
}

// Whether all arithmetic and all tables are float32.
bool is_float32(const RopeParams& p) {
  if (p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64) return false;
  for (int i = 0; p.tables != RopeTables::kNone && i < p.count; ++i) {
    if (p.operands[i].cos_dtype != Dtype::kFloat32 || p.operands[i].sin_dtype != Dtype::kFloat32) return false;
  }
  return true;
}

}  // namespace

int rope_gpu(const RopeParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  bool done = false;
  if (is_float32(p)) {
    switch (p.dtype) {
      case Dtype::kFloat16: done = launch_fast<Half>(p, stream); break;
      case Dtype::kBFloat16: done = launch_fast<BFloat16>(p, stream); break;
      default: done = launch_fast<float>(p, stream); break;
    }
  }
  if (!done) {
    if (p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64) {
      launch_general<double>(p, stream);
    } else {
      launch_general<float>(p, stream);
    }
  }
  return last_launch_error();
}

}  // namespace diffkern
