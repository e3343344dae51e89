// The kernel that takes all heads of a token, normalised together or each alone, in packets.
#pragma once

#include "rope_angles.h"
#include "rope_config.h"

namespace diffkern {
namespace {

struct TokenGrid {
  int tokens;  // of a block, one after the other
  bool both;   // q and k of a token side by side, with the same angles; else blockIdx.y says whose
  TableVectors vectors[2];
  Divisor head_dim;
  Divisor head_units;
};

// Where the tokens of a block are, and where their angles are.
struct TokenPlaces {
  int64_t x[kMaxTokens][2];
  int64_t out[kMaxTokens][2];
  TableRow tables[kMaxTokens][kMaxAxes];
  // Sets of axes, 4 bits for each token: those whose coordinate is not the one of the token before, and those whose
  // coordinate is outside the table. `turned` has bit 0 set where the token is turned.
  uint32_t moved;
  uint32_t outside;
  uint32_t turned;

  static_assert(kMaxAxes == 4 && kMaxTokens * kMaxAxes <= kMinWaveSize, "a lane of one wave for each token and axis");

  static __device__ __forceinline__ unsigned of_token(uint32_t sets, int token) { return (sets >> (kMaxAxes * token)) & 15u; }

  // To be called by the first kMaxTokens * kMaxAxes threads.
  __device__ __forceinline__ void fill(const RopeParams& p, const RopeOperand& q, const RopeOperand& k, int64_t first, int count) {
    const int token = static_cast<int>(threadIdx.x) / kMaxAxes;
    const int axis = static_cast<int>(threadIdx.x) % kMaxAxes;
    const bool live = token < count;
    const Offsets at = locate_below_31_bits(q, static_cast<uint32_t>(first) + (live ? token : 0));
    const bool turns_here = live && turns(p, at.of[kToken]);
    int row = -2;  // of no token that is turned
    if (axis == 0 && live) {
      const Offsets other = locate_below_31_bits(k, static_cast<uint32_t>(first) + token);
      x[token][0] = at.of[kX];
      x[token][1] = other.of[kX];
      out[token][0] = at.of[kOut];
      out[token][1] = other.of[kOut];
    }
    if (turns_here) {
      const int64_t cos_row = at.of[kFirst] - q.first_shift;
      const int64_t sin_row = at.of[kSecond] - q.second_shift;
      if (p.tables == RopeTables::kAxes) {
        const AxisRows rows = axis_rows(p, q, cos_row, at.of[kToken] - p.start);
#pragma unroll
        for (int i = 0; i < kMaxAxes; ++i) row = i == axis ? rows.at[i] : row;
        const int64_t begin = row < 0 ? 0 : row;
        tables[token][axis] = {static_cast<const float*>(q.cos[axis]) + begin, static_cast<const float*>(q.sin[axis]) + begin};
      } else if (axis == 0) {
        tables[token][0] = {static_cast<const float*>(q.cos[0]) + cos_row, static_cast<const float*>(q.sin[0]) + sin_row};
      }
    }
    const int before = shuffle_up(row, kMaxAxes);
    const uint32_t moved_here = ballot(turns_here && (token == 0 || before != row));
    const uint32_t outside_here = ballot(row == -1);
    const uint32_t turned_here = ballot(turns_here);
    if (threadIdx.x == 0) {
      moved = moved_here;
      outside = outside_here;
      turned = turned_here;
    }
  }
};

// Sums over the block, in each thread. `partials` may be used again after the block has been synchronised in between.
__device__ __forceinline__ float2 token_sums(float2 values, float2* partials) {
  values = group_sum<kWaveSize>(values);
  if (threadIdx.x % kWaveSize == 0) partials[threadIdx.x / kWaveSize] = values;
  __syncthreads();
  float2 total = partials[0];
  const int waves = blockDim.x / kWaveSize;
#pragma unroll 4
  for (int wave = 1; wave < waves; ++wave) {
    total.x += partials[wave].x;
    total.y += partials[wave].y;
  }
  return total;
}

// kShared: all units of a thread have the same angles. kPerHeadNorm: each head is normalised alone, by lanes side by side, a
// power of two of them.
template <typename T, int kShape, KnownNorm kNorm, bool kHalf, KnownTables kTables, bool kShared, bool kPerHeadNorm>
__global__ void __launch_bounds__(kTokenShapes[kShape].threads, kTokenShapes[kShape].blocks)
    token_kernel(const RopeParams p, const TokenGrid grid) {
  constexpr int kCount = kPacketSize<T>;
  using Elements = Unit<T, kCount, kHalf>;
  constexpr bool kPlain = kNorm != KnownNorm::kAny;
  using Values = typename Elements::Values;
  constexpr int kPairs = Elements::kPairs;
  constexpr bool kEach = kTables != KnownTables::kAxes;
  constexpr int kUnits = kTokenUnits<kShape, kHalf>;
  constexpr int kSets = kShared ? 1 : kUnits;  // of angles
  constexpr bool kAhead = kTokenShapes[kShape].ahead;
  constexpr bool kKeepsWeights = kTokenShapes[kShape].keeps;
  __shared__ TokenPlaces places;
  __shared__ float2 partials[2][kMaxWaves];

  const int number = blockIdx.y;
  const RopeOperand& angles_of = p.operands[number];
  const TableVectors vectors = number == 0 ? grid.vectors[0] : grid.vectors[1];  // an index would go through local memory
  const int streams = grid.both ? 2 : 1;
  const auto operand = [&](int stream) -> const RopeOperand& { return p.operands[grid.both ? stream : number]; };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * grid.tokens;
  const int64_t left = angles_of.outer.rows - first;
  const int tokens = static_cast<int>(left < grid.tokens ? left : grid.tokens);
  if (tokens <= 0) return;  // k may have fewer tokens than q
  if (threadIdx.x < kMaxTokens * kMaxAxes) places.fill(p, operand(0), operand(1), first, tokens);

  const int size = static_cast<int>(angles_of.inner) * p.head_dim;
  const int units = size / (2 * kPairs);
  const auto live = [&](int i) { return static_cast<int>(threadIdx.x + i * blockDim.x) < units; };
  // Heads past the end are the first one again, computed and not stored: their loads and sums have no branches.
  constexpr bool kRepeats = kPerHeadNorm && kNorm == KnownNorm::kLayer;
  const auto holds = [&](int i) { return kRepeats || live(i); };
  int at[kUnits][2];  // where the packets of a unit begin, in the row of all heads
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    int unit = threadIdx.x + i * blockDim.x;
    if (kRepeats && unit >= units) unit = threadIdx.x & (grid.head_units.value - 1);
    if (kHalf) {
      const int head = static_cast<int>(grid.head_units.divide(unit));
      at[i][0] = head * p.head_dim + (unit - head * static_cast<int>(grid.head_units.value)) * kCount;
      at[i][1] = at[i][0] + p.head_dim / 2;
    } else {
      at[i][0] = unit * kCount;
      at[i][1] = 0;
    }
  }
  const bool by_axes = kTables == KnownTables::kAxes || (kTables == KnownTables::kAny && p.tables == RopeTables::kAxes);
  AxisSlots<kPairs> slots[kSets];
  int cos_at[kSets], sin_at[kSets];  // in a row of the full tables
  bool turned[kSets];
  Angles<kPairs, kEach> angles[kSets];
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int head = static_cast<int>(grid.head_dim.divide(at[set][0]));
    const int column = at[set][0] - head * p.head_dim;
    turned[set] = column < p.rotary && live(set);
    if (by_axes) {
      slots[set] = AxisSlots<kPairs>(p, head * static_cast<int>(angles_of.inner_strides[kSecond]) + (kHalf ? column : column / 2));
      set_identity(angles[set]);
    } else {
      cos_at[set] = static_cast<int>(head * angles_of.inner_strides[kFirst] + full_offset<kHalf>(column, angles_of.first_step, angles_of.compact_cos));
      sin_at[set] = static_cast<int>(head * angles_of.inner_strides[kSecond] + full_offset<kHalf>(column, angles_of.second_step, angles_of.compact_sin));
    }
  }
  // Heads that are normalised alone have their weights in common, and those of a thread begin at the same element.
  constexpr int kKept = !kKeepsWeights || kPerHeadNorm ? 1 : kUnits;
  // Numbers of float16 have no registers left for that.
  constexpr bool kUnpacksOnce = kRepeats && std::is_same_v<T, BFloat16>;
  UnitNorm<T, kCount, kHalf, kNorm, kUnpacksOnce> kept[2][kKept];
  const auto parameters_at = [&](int i, int (&to)[2]) {
    const int head_begins = kPerHeadNorm ? static_cast<int>(grid.head_dim.divide(at[i][0])) * p.head_dim : 0;
    to[0] = at[i][0] - head_begins;
    to[1] = at[i][1] - (kHalf ? head_begins : 0);
  };
  if constexpr (kKeepsWeights) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      int from[2];
      parameters_at(i, from);
#pragma unroll
      for (int stream = 0; stream < 2; ++stream) {
        if (live(i) && stream < streams) kept[stream][i].load_ahead(operand(stream), from);
      }
    }
  }
  __syncthreads();  // the places are known

  Elements held[2][kUnits], coming[2][kAhead ? kUnits : 1];
  const auto load = [&](int token, auto& to) {
#pragma unroll
    for (int stream = 0; stream < 2; ++stream) {
      if (stream < streams) {
        const T* x = static_cast<const T*>(operand(stream).x) + places.x[token][stream];
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          if (holds(i)) to[stream][i].load_streamed(x, at[i]);
        }
      }
    }
  };
  if constexpr (kAhead) load(0, coming);

  int sums = 0;
  for (int token = 0; token < tokens; ++token) {
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < 2 * kUnits; ++i) held[i / kUnits][i % kUnits] = coming[i / kUnits][i % kUnits];
      if (token + 1 < tokens) load(token + 1, coming);
    } else {
      load(token, held);
    }
    const bool turns_here = TokenPlaces::of_token(places.turned, token) != 0;
    if (turns_here) {  // the angles are on their way while the sums are made
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        if (by_axes) {
          const auto row_of = [&](unsigned axis) { return places.tables[token][axis]; };
          slots[set].forget_parts();
          if (turned[set]) {
            read_axes(slots[set], TokenPlaces::of_token(places.moved, token), TokenPlaces::of_token(places.outside, token),
                      row_of, angles[set]);
          }
        } else if constexpr (kTables != KnownTables::kAxes) {
          const TableRow row = places.tables[token][0];
          if (turned[set]) read_full<T, kCount, kHalf>(p, angles_of, vectors, {row.cos + cos_at[set], row.sin + sin_at[set]}, angles[set]);
        }
        if (!kPlain && p.arithmetic == RopeArithmetic::kInput) round_angles<T>(angles[set]);
      }
    }

    constexpr int kNorms = kPerHeadNorm ? kUnits : 1;  // of a stream
    Normaliser norms[2 * kNorms];
    normalise<kNorm, kPerHeadNorm && sizeof(T) == 2>(
        p, norms, [&](int row) { return operand(row / kNorms).inverse_size; },
        [&](int row) {
          return first_of_group(held[row / kNorms][row % kNorms].packets[0].first(), static_cast<int>(grid.head_units.value));
        },
        [&](auto&... values) {
          if constexpr (kPerHeadNorm) {
            for (int mask = static_cast<int>(grid.head_units.value) / 2; mask > 0; mask /= 2) {
#pragma unroll
              for (int row = 0; row < 2 * kNorms; ++row) ((values[row] += shuffle_xor(values[row], mask)), ...);
            }
          } else {
            const auto sum = [&](float(&of)[2 * kNorms]) {
              const float2 total = token_sums({of[0], of[1]}, partials[sums++ & 1]);
              of[0] = total.x;
              of[1] = total.y;
            };
            (sum(values), ...);
          }
        },
        [&](auto&& add) {
#pragma unroll
          for (int stream = 0; stream < 2; ++stream) {
            if (stream < streams) {
#pragma unroll
              for (int i = 0; i < kUnits; ++i) {
                if (holds(i)) {
                  Values values;
                  held[stream][i].optimization_barrier();
                  held[stream][i].unpack_to(values);
#pragma unroll
                  for (int j = 0; j < 2 * kPairs; ++j) {
                    add(stream * kNorms + (kPerHeadNorm ? i : 0), values[j / kPairs][j % kPairs]);
                  }
                }
              }
            }
          }
        });

#pragma unroll
    for (int stream = 0; stream < 2; ++stream) {
      if (stream < streams) {
        const RopeOperand& o = operand(stream);
        T* out = static_cast<T*>(o.out) + places.out[token][stream];
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          if (holds(i)) {
            auto& norm = kept[stream][kKept > 1 ? i : 0];
            int from[2];
            parameters_at(i, from);
            if (i == 0 || !kRepeats) {
              if constexpr (!kKeepsWeights) norm.load_ahead(o, from);
              norm.load(p, o, from);
            }
            Elements& elements = held[stream][i];
            elements.optimization_barrier();
            Values values;
            elements.unpack_to(values);
            norm.apply(p, o, norms[stream * kNorms + (kPerHeadNorm ? i : 0)], values);
            const int set = kShared ? 0 : i;
            if (turns_here && turned[set]) rotate<T, kPlain>(p, angles[set], values);
            elements.pack_from(values);
            if (live(i)) elements.store(out, at[i]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace diffkern
