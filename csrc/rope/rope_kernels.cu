// CUDA and HIP kernels for rope, rope_3d and qk_norm_rope: which one a call takes, and with how many threads.
//
//  head kernel:    heads normalised alone or not at all, in packets. A few lanes to a head; they load several heads of
//                  q and k at once that share their angles, and read those once.
//  token kernel:   all heads of a token, normalised together or alone, in packets. A block to a few tokens, one after
//                  the other; q and k side by side, so that the angles are read once for both.
//  general kernel: any dtypes, alignment, strides and sizes, and float64; a wave to a row, which it reads again, from
//                  the caches, after the sums.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <type_traits>

#include "rope_general_kernel.h"
#include "rope_head_kernel.h"
#include "rope_token_kernel.h"

namespace diffkern {
namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kMaxLanes = 32;  // of a group in the head kernel

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// --- what fits the fast kernels ------------------------------------------------------------------------

// Whether all arithmetic and all tables are float32.
bool is_float32(const RopeParams& p) {
  if (p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64) return false;
  for (int i = 0; p.tables != RopeTables::kNone && i < p.count; ++i) {
    if (p.operands[i].cos_dtype != Dtype::kFloat32 || p.operands[i].sin_dtype != Dtype::kFloat32) return false;
  }
  return true;
}

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
  const int64_t unit = p.half ? 2 * count : count;
  if (p.head_dim % unit != 0 || p.rotary % unit != 0) return false;
  if (p.tables == RopeTables::kAxes) {
    for (int axis = 0; axis < p.axes; ++axis) {
      if (p.sizes[axis] == 0 || p.widths[axis] >= kMaxAxisWidth) return false;
    }
  }
  return rows_are_multiples(o, count);
}

// Whether the values of a full table that belong to a unit of packets of `count` elements can be read in packets.
bool table_in_packets(const RopeParams& p, const RopeOperand& o, RopeStride which, int64_t count) {
  if (p.tables != RopeTables::kFull) return false;
  const bool cos = which == kFirst;
  const bool compact = cos ? o.compact_cos : o.compact_sin;
  const int64_t multiple = std::min<int64_t>(compact && !p.half ? count / 2 : count, kPacketSize<float>);
  if ((cos ? o.first_step : o.second_step) != 1) return false;
  if (!aligned(cos ? o.cos[0] : o.sin[0], multiple * static_cast<int64_t>(sizeof(float)))) return false;
  if ((cos ? o.first_shift : o.second_shift) % multiple != 0 || o.inner_strides[which] % multiple != 0) return false;
  for (int dim = 0; dim < o.outer.dims; ++dim) {
    if (o.outer.strides[which][dim] % multiple != 0) return false;
  }
  return !p.half || compact || p.rotary / 2 % multiple == 0;
}

TableVectors table_vectors(const RopeParams& p, const RopeOperand& o, int64_t count) {
  return {table_in_packets(p, o, kFirst, count), table_in_packets(p, o, kSecond, count)};
}

// Whether q and k have their tokens in the same order and turn them by the same angles.
bool same_angles(const RopeParams& p) {
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

// --- launches ------------------------------------------------------------------------------------------

// Calls launch(norm, half, tables) with constants that say what the kernel may know of the call. Plain forms exist
// for half dtypes alone, which is where the arithmetic is the most next to the memory; those of layer norms for heads
// alone, and for full tables or none.
template <typename T, bool kHasPlain, typename Launch>
void with_known(const RopeParams& p, Launch&& launch) {
  const auto with_half = [&](auto norm, auto tables) {
    if (p.half) {
      launch(norm, std::true_type{}, tables);
    } else {
      launch(norm, std::false_type{}, tables);
    }
  };
  constexpr std::integral_constant<KnownTables, KnownTables::kFull> full;
  if constexpr (kHasPlain && sizeof(T) < sizeof(float)) {
    const bool by_axes = p.tables == RopeTables::kAxes;
    if (p.norm == RopeNorm::kLayer) {
      if (is_plain(p) && !by_axes && !p.across) {
        return with_half(std::integral_constant<KnownNorm, KnownNorm::kLayer>{}, full);
      }
    } else if (is_plain(p)) {
      constexpr std::integral_constant<KnownNorm, KnownNorm::kRms> rms;
      if (by_axes) return with_half(rms, std::integral_constant<KnownTables, KnownTables::kAxes>{});
      return with_half(rms, full);
    }
  }
  with_half(std::integral_constant<KnownNorm, KnownNorm::kAny>{}, std::integral_constant<KnownTables, KnownTables::kAny>{});
}

#if defined(DIFFKERN_BENCH)
int tuned(const char* name, int otherwise) {
  const char* chosen = std::getenv(name);
  return chosen == nullptr ? otherwise : std::atoi(chosen);
}

// Calls launch with the number of a shape as a constant.
template <int kShapes, typename Launch, int kIndex = 0>
void with_shape(int shape, const Launch& launch) {
  if constexpr (kIndex < kShapes) {
    if (shape == kIndex) return launch(std::integral_constant<int, kIndex>{});
    with_shape<kShapes, Launch, kIndex + 1>(shape, launch);
  }
}
#endif

int64_t units_of_head(const RopeParams& p, int64_t count) { return p.head_dim / (p.half ? 2 * count : count); }

template <typename T, int kCount, int kShape, KnownNorm kNorm, bool kHalf, KnownTables kTables>
void launch_head_kernel(const RopeParams& p, GpuStream stream) {
  constexpr HeadShape shape = kHeadShapes[kShape];
  const int64_t units = units_of_head(p, kCount);
  HeadGrids grids{};
  grids.both = same_angles(p);
  grids.lanes = 4;
  while (grids.lanes < units && grids.lanes < kMaxLanes) grids.lanes *= 2;
  const int64_t columns = ceil_div(units, grids.lanes);
  int64_t most = 0;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    const int64_t rows = o.shared() ? kStreamRows<kShape, kHalf> : 1;
    const int64_t span = grids.both || !o.shared() ? rows : kStreams * rows;
    const int64_t chunks = ceil_div(o.inner, span);
    const int64_t groups = o.outer.rows * chunks * columns;
    grids.of[i] = {static_cast<uint32_t>(groups), make_divisor(static_cast<uint32_t>(chunks)),
                   make_divisor(static_cast<uint32_t>(columns)), static_cast<int>(rows), static_cast<int>(span),
                   table_vectors(p, o, kCount)};
    most = std::max(most, groups);
  }
  const dim3 blocks(static_cast<unsigned>(ceil_div(most, shape.threads / grids.lanes)), grids.both ? 1 : p.count);
  head_kernel<T, kCount, kShape, kNorm, kHalf, kTables><<<blocks, shape.threads, 0, stream>>>(p, grids);
}

// Whether the head kernel has room for the work in its counters, and for a row in a group of lanes if need be.
bool head_kernel_fits(const RopeParams& p, int64_t count) {
  const int64_t units = units_of_head(p, count);
  if (p.across || (p.norm != RopeNorm::kNone && units > kMaxLanes)) return false;
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    if (o.inner > UINT32_MAX || o.rows() * ceil_div(units, kMaxLanes) > kMaxBlocks || !fits_packets(p, o, count)) return false;
  }
  return true;
}

template <typename T, int kCount>
bool launch_head_kernel(const RopeParams& p, GpuStream stream) {
  if (!head_kernel_fits(p, kCount)) return false;
  with_known<T, kCount == kPacketSize<T>>(p, [&](auto norm, auto half, auto tables) {
#if defined(DIFFKERN_BENCH)
    if constexpr (norm == KnownNorm::kRms && !half && std::is_same_v<T, BFloat16>) {
      return with_shape<std::size(kHeadShapes)>(tuned("DIFFKERN_ROPE_HEAD", 0), [&](auto shape) {
        launch_head_kernel<T, kCount, shape, norm, half, tables>(p, stream);
      });
    }
#endif
    launch_head_kernel<T, kCount, 0, norm, half, tables>(p, stream);
  });
  return true;
}

// Whether the token kernel can address an operand in packets of `count` elements.
bool fits_tokens(const RopeParams& p, const RopeOperand& o, int64_t count) {
  if (p.norm == RopeNorm::kNone || (p.half && p.rotary != p.head_dim) || !fits_packets(p, o, count)) return false;
  if (o.inner > 1 && (o.inner_strides[kX] != p.head_dim || o.inner_strides[kOut] != p.head_dim)) return false;
  if (o.inner > INT32_MAX / p.head_dim || o.inner_strides[kToken] != 0 || o.outer.rows > kMaxBlocks) return false;
  // Where a head's angles begin in those of its token is kept in 32 bits.
  for (const RopeStride which : {kFirst, kSecond}) {
    const int64_t step = which == kFirst ? o.first_step : o.second_step;
    if (std::abs(o.inner_strides[which]) > INT32_MAX / 2 / o.inner || std::abs(step) > INT32_MAX / 2 / p.head_dim) return false;
  }
  for (int dim = 0; p.tables == RopeTables::kAxes && dim < o.outer.dims; ++dim) {
    if (o.outer.strides[kSecond][dim] != 0) return false;
  }
  return true;
}

// Whether all heads of a token have the same angles, or none.
bool heads_share_angles(const RopeParams& p) {
  return p.tables == RopeTables::kNone || std::all_of(p.operands, p.operands + p.count, [](const RopeOperand& o) { return o.shared(); });
}

bool has_many_tokens(const RopeParams& p) {
  return std::any_of(p.operands, p.operands + p.count, [](const RopeOperand& o) { return o.outer.rows >= kManyTokens; });
}

// Launches the token kernel if a block can hold the rows.
template <typename T, int kShape, KnownNorm kNorm, bool kHalf, KnownTables kTables, bool kShared, bool kPerHeadNorm>
bool launch_token_kernel(const RopeParams& p, GpuStream stream) {
  constexpr TokenShape shape = kTokenShapes[kShape];
  constexpr int kCount = kPacketSize<T>;
  if (kTokenUnits<kShape, kHalf> == 0) return false;
  const int64_t head_units = units_of_head(p, kCount);
  if (kPerHeadNorm && (head_units > kMaxLanes || (head_units & (head_units - 1)) != 0)) return false;
  int64_t units = 0;
  int64_t tokens = 0;
  TokenGrid grid{};
  for (int i = 0; i < p.count; ++i) {
    const RopeOperand& o = p.operands[i];
    units = std::max(units, o.inner * head_units);
    tokens = std::max(tokens, o.outer.rows);
    grid.vectors[i] = table_vectors(p, o, kCount);
  }
  constexpr int64_t kHeld = std::max(1, kTokenUnits<kShape, kHalf>);
  int64_t threads = round_up(ceil_div(units, kHeld), kWaveMultiple);
  if (kShared) {  // the units of a thread begin at the same element of their heads
    threads = round_up(threads, std::lcm(head_units, int64_t{kWaveMultiple}));
  }
  if (threads > shape.threads) return false;
  grid.both = same_angles(p);
  grid.tokens = static_cast<int>(std::clamp<int64_t>(tokens / kMinTokenBlocks, 1, shape.tokens));
#if defined(DIFFKERN_BENCH)
  grid.tokens = tuned("DIFFKERN_ROPE_TOKENS", grid.tokens);
#endif
  grid.head_dim = make_divisor(static_cast<uint32_t>(p.head_dim));
  grid.head_units = make_divisor(static_cast<uint32_t>(head_units));
  const dim3 blocks(static_cast<unsigned>(ceil_div(tokens, grid.tokens)), grid.both ? 1 : p.count);
  token_kernel<T, kShape, kNorm, kHalf, kTables, kShared, kPerHeadNorm><<<blocks, static_cast<unsigned>(threads), 0, stream>>>(p, grid);
  return true;
}

template <int kNumber>
constexpr std::integral_constant<int, kNumber> number{};

template <typename T>
bool launch_token_kernel(const RopeParams& p, GpuStream stream) {
  for (int i = 0; i < p.count; ++i) {
    if (!fits_tokens(p, p.operands[i], kPacketSize<T>)) return false;
  }
  const bool shared = heads_share_angles(p);
  bool done = false;
  with_known<T, true>(p, [&](auto norm, auto half, auto tables) {
    const auto launch = [&](auto shape, auto shares, auto alone) {
      if (!done) done = launch_token_kernel<T, shape, norm, half, tables, shares, alone>(p, stream);
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
#if defined(DIFFKERN_BENCH)
    static_assert(sizeof(kTokenUses) == std::size(kTokenShapes) + 1, "a use for each shape");
    if constexpr (norm != KnownNorm::kAny && std::is_same_v<T, BFloat16>) {
      const int chosen = tuned("DIFFKERN_ROPE_TOKEN", -1);
      if (chosen == -2 && !p.across) return;  // to try the head kernel
      with_shape<std::size(kTokenShapes)>(chosen, [&](auto shape) {
        constexpr char use = kTokenUses[shape];
        constexpr bool full = tables == KnownTables::kFull;
        if constexpr (kTokenUnits<shape, half> == 0) {
          return;
        } else if constexpr (use == 'a' && full && !half) {
          if (!p.across && shared) launch(shape, yes, yes);
        } else if constexpr (norm == KnownNorm::kLayer) {
          return;
        } else if constexpr ((use == 's' || (use == 'h' && half)) && full) {
          if (p.across && shared) launch(shape, yes, no);
        } else if constexpr (use == 'o' && full == half) {
          if (p.across && !shared) launch(shape, no, no);
        }
      });
      if (done) return;
    }
#endif
    // Elsewhere the shapes with few registers would spill them.
    constexpr bool kKnown = norm != KnownNorm::kAny && sizeof(T) < sizeof(float);
    constexpr bool kTuned = kKnown && !half;
    if (!p.across) {
      if (!shared) return;
      if constexpr (kTuned) launch(number<norm == KnownNorm::kLayer ? kLayerAloneTokens : kPerHeadNormTokens>, yes, yes);
      launch(number<kWideAloneTokens>, yes, yes);
      return;
    }
    if constexpr (norm != KnownNorm::kLayer) {  // which is plain for heads alone, see with_known
      if (shared) {
        if constexpr (kTuned) launch(number<kNarrowSharedTokens>, yes, no);
        if constexpr (kTuned) launch(number<kSharedTokens>, yes, no);
        if constexpr (kKnown && half) launch(number<kHalfSharedTokens>, yes, no);
        launch(number<kWideSharedTokens>, yes, no);
      }
      if constexpr (kTuned && tables == KnownTables::kAxes) {
        if (has_many_tokens(p)) launch(number<kManyOwnTokens>, no, no);
        launch(number<kOwnTokens>, no, no);
      }
      launch(number<sizeof(T) < sizeof(float) ? kWideOwnTokens : kFloatTokens>, no, no);
    }
  });
  return done;
}

template <typename A>
void launch_general_kernel(const RopeParams& p, GpuStream stream) {
  int64_t work = 0;
  for (int i = 0; i < p.count; ++i) work = std::max(work, p.work(p.operands[i]));
  const dim3 blocks(static_cast<unsigned>(std::min(kMaxBlocks, ceil_div(work, kGeneralRows))), p.count);
  general_kernel<A><<<blocks, dim3(kGeneralLanes, kGeneralRows), 0, stream>>>(p);
}

template <typename T>
bool launch_packets(const RopeParams& p, GpuStream stream) {
  constexpr int kCount = kPacketSize<T>;
  if (launch_token_kernel<T>(p, stream) || launch_head_kernel<T, kCount>(p, stream)) return true;
  if constexpr (kCount == 8) return launch_head_kernel<T, kCount / 2>(p, stream);
  return false;
}

bool launch_packets(const RopeParams& p, GpuStream stream) {
  if (!is_float32(p)) return false;
  switch (p.dtype) {
    case Dtype::kFloat16: return launch_packets<Half>(p, stream);
    case Dtype::kBFloat16: return launch_packets<BFloat16>(p, stream);
    default: return launch_packets<float>(p, stream);
  }
}

}  // namespace

int rope_gpu(const RopeParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  if (!launch_packets(p, stream)) {
    if (p.dtype == Dtype::kFloat64 || p.arithmetic == RopeArithmetic::kFloat64) {
      launch_general_kernel<double>(p, stream);
    } else {
      launch_general_kernel<float>(p, stream);
    }
  }
  return last_launch_error();
}

}  // namespace diffkern
