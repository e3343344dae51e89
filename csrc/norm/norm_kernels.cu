// CUDA and HIP kernels for rms_norm and layer_norm.
//
//  full kernel:     the plain case of the next one, of half the code (norm_full_kernel.h).
//  register kernel: contiguous aligned rows of one dtype, read once and kept in registers. The fast path.
//  loop kernel:     any dtypes, alignment and size; reads a row again, from the caches.
//  column kernel:   rows across memory, as in channel-first tensors; neighbouring threads take neighbouring
//                   rows, so that accesses coalesce.
#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

#include "../common/gpu_vector.h"
#include "norm.h"
#include "norm_config.h"
#include "norm_full_kernel.h"
#include "norm_packets.h"

namespace diffkern {
namespace {

// What a row's sums say: the normalised value is ((x - mean) - mean_rest) * scale. What rounding left out of
// the mean comes to light as the mean of x - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean;
  float mean_rest;
  float scale;

  __device__ __forceinline__ float operator()(float value) const { return ((value - mean) - mean_rest) * scale; }
};

// Params: NormParams or RegisterParams.
template <typename Params>
__device__ __forceinline__ float scale_of(const Params& p, float sum_of_squares, float inverse_size) {
  if (p.clamp_eps) {
    const float length = sqrtf(sum_of_squares);
    return sqrtf(static_cast<float>(p.size)) / (length < p.eps ? p.eps : length);  // lets NaN through
  }
  return rsqrtf(fmaf(sum_of_squares, inverse_size, p.eps));
}

// A sum in two levels: what many additions in a row would lose is kept by starting anew now and then.
struct Accumulator {
  float total = 0.0f;
  float part = 0.0f;

  __device__ __forceinline__ void add(float value) { part += value; }
  __device__ __forceinline__ void flush() {
    total += part;
    part = 0.0f;
  }
};

// The steps between a row's values and its Normaliser. `sum` adds up a float, or two in one go, over the threads of
// the row; fold(add, flush) calls add with every value that this thread holds, and flush where there are many.
template <typename Sum, typename Fold>
__device__ __forceinline__ Normaliser normaliser_of(const NormParams& p, Sum&& sum, Fold&& fold) {
  const float inverse_size = 1.0f / static_cast<float>(p.size);
  Accumulator squares;
  if (!p.layer_norm) {
    fold([&](float value) { squares.add(value * value); }, [&] { squares.flush(); });
    squares.flush();
    return {0.0f, 0.0f, scale_of(p, sum(squares.total), inverse_size)};
  }
  Accumulator plain;
  fold([&](float value) { plain.add(value); }, [&] { plain.flush(); });
  plain.flush();
  const float mean = sum(plain.total) * inverse_size;
  plain = Accumulator{};
  fold(
      [&](float value) {
        plain.add(value - mean);
        squares.add((value - mean) * (value - mean));
      },
      [&] {
        plain.flush();
        squares.flush();
      });
  plain.flush();
  squares.flush();
  const float2 sums = sum(float2{plain.total, squares.total});
  const float rest = sums.x * inverse_size;
  return {mean, rest, scale_of(p, sums.y - rest * sums.x, inverse_size)};
}

// --- register kernel -----------------------------------------------------------------------------------

// 1 / x to within a few units in the last place.
__device__ __forceinline__ float quick_inverse(float x) {
#if DIFFKERN_HIP
  return 1.0f / x;
#else
  return __fdividef(1.0f, x);
#endif
}

// The statistics of one wave's share of a row: its mean is mean + rest / count, its squares are around `mean`.
struct WaveSums {
  float count;
  float mean;
  float rest;
  float squares;
};

// Merges the waves' shares of a row, in one synchronisation; kWaves is a power of two, no less than the waves there
// are. `partials` may be used again only after the block has been synchronised in between.
template <int kWaves>
__device__ __forceinline__ WaveSums block_merge(const WaveSums& mine, WaveSums* partials, float inverse_size) {
  if (threadIdx.x % kWaveSize == 0) partials[threadIdx.x / kWaveSize] = mine;
  __syncthreads();
  const unsigned wave = threadIdx.x % kWaves;
  WaveSums share{};
  if (wave < blockDim.x / kWaveSize) share = partials[wave];
  const float pivot = partials[0].mean;
  const float delta = share.count > 0.0f ? share.mean - pivot : 0.0f;
  const float rest = group_sum<kWaves>(share.rest + share.count * delta);
  const float centred = delta - rest * inverse_size;
  const float squares = share.squares + centred * (2.0f * share.rest + share.count * centred);
  return {0.0f, pivot, rest, group_sum<kWaves>(squares)};
}

// A row per kLanes threads, several rows per block; kLanes 0: a row per block. Input, output and round_dtype are T,
// weight and bias are Param, which is T or float32.
template <typename T, typename Param, bool kLayerNorm, int kLanes, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) register_kernel(const RegisterParams p) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kGroup = kLanes == 0 ? kWaveSize : kLanes;  // lanes that sum up by shuffles
  constexpr int kWaves = kPowerOfTwo<kThreads / kWaveSize>;
  constexpr bool kAhead = kHoldsParameters<kPackets>;
  __shared__ WaveSums partials[kLanes == 0 ? kWaves : 1];
  __shared__ float squares[kLanes == 0 ? kWaves : 1];

  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const uint32_t row = kLanes == 0 ? blockIdx.x : blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = kLanes == 0 || row < p.rows;
  const unsigned packets = inside ? p.packets : 0;
  const unsigned lanes = kLanes == 0 ? blockDim.x : kLanes;
  const auto each_packet = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const unsigned packet = threadIdx.x + i * lanes;
      if (packet < packets) body(i, packet);
    }
  };

  const auto at = p.map.locate(row);
  uint4 held[kPackets];
  each_packet([&](int i, unsigned packet) { held[i] = load_once(p.x + (at.of[kX] + packet)); });
  // Before the sums, so that these loads are in flight while the threads wait for each other.
  Raw<T, Param> weights[kAhead ? kPackets : 1];
  Raw<T, Param> biases[kAhead ? kPackets : 1];
  if constexpr (kAhead) {
    each_packet([&](int i, unsigned packet) {
      if (p.weight != nullptr) weights[i].load(p.weight, packet);
      if (p.bias != nullptr) biases[i].load(p.bias, packet);
    });
  }

  // The values that this thread holds, a packet at a time.
  const auto each_values = [&](auto&& body) {
    each_packet([&](int i, unsigned) {
      float values[kCount];
      optimization_barrier(held[i]);
      unpack<T>(held[i], values);
      body(values);
    });
  };
  WaveSums sums;
  if constexpr (kLayerNorm) {
    // How many values the lanes hold that shuffle together.
    float count = static_cast<float>(p.size);
    float inverse_count = p.inverse_size;
    if constexpr (kLanes == 0) {
      int held_packets = 0;
      const int before = static_cast<int>(threadIdx.x / kWaveSize * kWaveSize);
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        const int left = static_cast<int>(packets) - before - i * static_cast<int>(lanes);
        held_packets += max(0, min(left, kWaveSize));
      }
      count = static_cast<float>(held_packets * kCount);
      inverse_count = quick_inverse(fmaxf(count, 1.0f));
    }
    float sum = 0.0f;
    each_values([&](const float* values) { sum += sum_of<kCount>(values); });
    const float mean = group_sum<kGroup>(sum) * inverse_count;
    // What rounding left out of the mean comes to light as the mean of x - mean.
    float2 around{0.0f, 0.0f};
    each_values([&](float* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        values[j] -= mean;
        around.y += values[j] * values[j];
      }
      around.x += sum_of<kCount>(values);
    });
    around = group_sum<kGroup>(around);
    if constexpr (kLanes == 0) {
      sums = block_merge<kWaves>({count, mean, around.x, around.y}, partials, p.inverse_size);
    } else {
      sums = {count, mean, around.x, around.y - around.x * around.x * p.inverse_size};
    }
  } else {
    float sum = 0.0f;
    each_values([&](const float* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum += values[j] * values[j];
    });
    if constexpr (kLanes == 0) {
      sum = block_sum<kWaves>(sum, squares);
    } else {
      sum = group_sum<kGroup>(sum);
    }
    sums = {0.0f, 0.0f, 0.0f, sum};
  }

  const float rest = sums.rest * p.inverse_size;
  const float centre = sums.mean + rest;
  const float scale = scale_of(p, sums.squares, p.inverse_size);
  each_packet([&](int i, unsigned packet) {
    float values[kCount], params[kCount];
    optimization_barrier(held[i]);
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (kLayerNorm) {
        // In a half dtype x - mean is no finer than that the mean as one float would do.
        values[j] = sizeof(T) == sizeof(float) ? (values[j] - sums.mean) - rest : values[j] - centre;
      }
      values[j] *= scale;
    }
    if (p.rounds) round_values<T, kCount>(values);
    if (p.weight != nullptr) {
      if constexpr (!kAhead) weights[0].load(p.weight, packet);
      weights[kAhead ? i : 0].unpack_to(params);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] *= kLayerNorm ? params[j] : params[j] + p.weight_offset;
    }
    if (p.bias != nullptr) {
      if constexpr (!kAhead) biases[0].load(p.bias, packet);
      biases[kAhead ? i : 0].unpack_to(params);
      if (p.rounds) round_values<T, kCount>(values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] += params[j];
    }
    p.out[at.of[kOut] + packet] = pack_packet<T>(values);
  });
}

// --- loop kernel ---------------------------------------------------------------------------------------

// Normalises, scales and stores kCount elements, for dtypes known only at run time.
template <int kCount>
__device__ __forceinline__ void finish(const NormParams& p, const Normaliser& normalise, int64_t at, int64_t out_offset,
                                       float* values) {
  float params[kCount];
  const bool rounds = p.round_dtype != Dtype::kNone;
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = rounded_to(p.round_dtype, normalise(values[j]));
  if (p.weight != nullptr) {
    load_elements<kCount>(p.weight, p.weight_dtype, at, params);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= params[j] + p.weight_offset;
  }
  if (p.bias != nullptr) {
    load_elements<kCount>(p.bias, p.bias_dtype, at, params);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = (rounds ? rounded_to(p.out_dtype, values[j]) : values[j]) + params[j];
  }
  store_elements<kCount>(values, p.out, p.out_dtype, out_offset);
}

// A row per block, or, where blockDim.y > 1, per blockDim.x lanes, a power of two within a wave. With one block as the
// least on a multiprocessor the compiler need not write registers to memory to make room for more.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kMaxThreads, 1) loop_kernel(const NormParams p) {
  constexpr int kCount = kVector ? kPacketSize<T> : 1;
  const int lanes = blockDim.x;
  __shared__ float singles[kMaxWaves];
  __shared__ float2 pairs[kMaxWaves];

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.map.rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int64_t size = row < p.map.rows ? p.size : 0;
    const RowOffsets offsets = locate(p.map, row < p.map.rows ? row : first);
    const T* x = static_cast<const T*>(p.x) + offsets.x;
    const int64_t begin = static_cast<int64_t>(threadIdx.x) * kCount;
    const int64_t step = static_cast<int64_t>(lanes) * kCount;

    const auto sum_group = [&](float value) {
      for (int mask = lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
      return value;
    };
    const auto sum = [&](auto value) {
      if constexpr (std::is_same_v<decltype(value), float>) {
        return blockDim.y == 1 ? block_sum(value, singles) : sum_group(value);
      } else {
        return blockDim.y == 1 ? block_sum(value, pairs) : float2{sum_group(value.x), sum_group(value.y)};
      }
    };
    const auto fold = [&](auto&& add, auto&&) {
#pragma unroll 4
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_elements<T, kCount>(x + (kVector ? at : at * p.x_stride), values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) add(values[j]);
      }
    };
    const Normaliser normalise = normaliser_of(p, sum, fold);

    for (int64_t at = begin; at < size; at += step) {
      float values[kCount];
      load_elements<T, kCount>(x + (kVector ? at : at * p.x_stride), values);
      finish<kCount>(p, normalise, at, offsets.out + (kVector ? at : at * p.out_stride), values);
    }
    if (blockDim.y == 1) __syncthreads();  // before the partial sums are used again
  }
}

// --- column kernel -------------------------------------------------------------------------------------

constexpr int64_t kFlushEvery = 64;

// kColumnRows rows per block, one per thread along x; the threads along y share the row's elements.
template <typename T>
__global__ void __launch_bounds__(kColumnRows* kColumnSplits) column_kernel(const NormParams p) {
  __shared__ float partials[kColumnSplits][kColumnRows];

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kColumnRows; first < p.map.rows;
       first += static_cast<int64_t>(gridDim.x) * kColumnRows) {
    const int64_t row = first + threadIdx.x;
    const int64_t size = row < p.map.rows ? p.size : 0;
    const RowOffsets offsets = locate(p.map, row < p.map.rows ? row : first);
    const T* x = static_cast<const T*>(p.x) + offsets.x;

    const auto sum_one = [&](float value) {
      __syncthreads();  // the previous sums have been read
      partials[threadIdx.y][threadIdx.x] = value;
      __syncthreads();
      float total = 0.0f;
#pragma unroll
      for (int split = 0; split < kColumnSplits; ++split) total += partials[split][threadIdx.x];
      return total;
    };
    const auto sum = [&](auto value) {
      if constexpr (std::is_same_v<decltype(value), float>) {
        return sum_one(value);
      } else {
        return float2{sum_one(value.x), sum_one(value.y)};
      }
    };
    const auto fold = [&](auto&& add, auto&& flush) {
      for (int64_t begin = threadIdx.y; begin < size; begin += kFlushEvery * kColumnSplits) {
        const int64_t end = min(begin + kFlushEvery * kColumnSplits, size);
#pragma unroll 8
        for (int64_t at = begin; at < end; at += kColumnSplits) add(to_float(x[at * p.x_stride]));
        flush();
      }
    };
    const Normaliser normalise = normaliser_of(p, sum, fold);

#pragma unroll 4
    for (int64_t at = threadIdx.y; at < size; at += kColumnSplits) {
      float value = to_float(x[at * p.x_stride]);
      finish<1>(p, normalise, at, offsets.out + at * p.out_stride, &value);
    }
  }
}

// --- launches ------------------------------------------------------------------------------------------

constexpr int64_t kMaxBlocks = 0x7fffffff;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

unsigned blocks_for(int64_t rows, int64_t rows_per_block) {
  return static_cast<unsigned>(std::min(kMaxBlocks, ceil_div(rows, rows_per_block)));
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPacketBytes == 0; }

// Whether x, out and the parameters can be walked in packets of 16 bytes of x.
bool vectorisable(const NormParams& p) {
  const int64_t x_packet = kPacketBytes / bytes_of(p.x_dtype);
  const int64_t out_packet = kPacketBytes / bytes_of(p.out_dtype);
  if (p.x_stride != 1 || p.out_stride != 1 || p.size % x_packet != 0) return false;
  if (!aligned(p.x) || !aligned(p.out) || !aligned(p.weight) || !aligned(p.bias)) return false;
  for (int dim = 0; dim < p.map.dims; ++dim) {
    if (p.map.x_strides[dim] % x_packet != 0 || p.map.out_strides[dim] % out_packet != 0) return false;
  }
  return true;
}

// Whether the register kernel has code for these dtypes.
bool uniform(const NormParams& p) {
  const auto plain = [&](Dtype dtype) { return dtype == Dtype::kNone || dtype == p.x_dtype; };
  const auto param = [&](Dtype dtype) { return plain(dtype) || dtype == Dtype::kFloat32; };
  const bool same = p.weight == nullptr || p.bias == nullptr || p.weight_dtype == p.bias_dtype;
  return plain(p.out_dtype) && plain(p.round_dtype) && param(p.weight_dtype) && param(p.bias_dtype) && same;
}

LeadingMap<2> leading_map(const RowMap& map) {
  LeadingMap<2> result{map.rows, map.dims, {}, {}};
  std::copy_n(map.sizes, map.dims, result.sizes);
  std::copy_n(map.x_strides, map.dims, result.strides[kX]);
  std::copy_n(map.out_strides, map.dims, result.strides[kOut]);
  return result;
}

RegisterParams register_params(const NormParams& p, int64_t count) {
  return {static_cast<const uint4*>(p.x),
          static_cast<const uint4*>(p.weight),
          static_cast<const uint4*>(p.bias),
          static_cast<uint4*>(p.out),
          static_cast<uint32_t>(p.map.rows),
          static_cast<uint32_t>(p.size / count),
          static_cast<uint32_t>(p.size),
          1.0f / static_cast<float>(p.size),
          p.eps,
          p.weight_offset,
          p.clamp_eps,
          p.round_dtype != Dtype::kNone,
          PacketMap<2>(leading_map(p.map), {count, count})};
}

// Whether weight and bias are float32 next to a half input.
bool has_wide_parameters(const NormParams& p) {
  return p.x_dtype != Dtype::kFloat32 && (p.weight_dtype == Dtype::kFloat32 || p.bias_dtype == Dtype::kFloat32);
}

template <typename T, typename Call, int... kIndices>
bool launch_full_kernel(const RegisterParams& p, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  const auto launch = [&](auto index) {
    constexpr FullConfig config = kFullConfigs[index];
    if (p.packets != config.packets * config.threads) return false;
    full_kernel<T, Call, config.packets, config.threads, kHoldsParameters<config.packets>>
        <<<p.rows, config.threads, 0, stream>>>(p);
    return true;
  };
  return (launch(std::integral_constant<int, kIndices>{}) || ...);
}

// Launches the kernel for full rows, if there is one for this call.
template <typename T>
bool launch_full_kernel(const NormParams& p, GpuStream stream) {
  if constexpr (std::is_same_v<T, float>) {
    return false;
  } else {
    if (p.clamp_eps || p.weight_offset != 0.0f || has_wide_parameters(p)) return false;
    const RegisterParams params = register_params(p, kPacketSize<T>);
#if defined(DIFFKERN_BENCH)
    if (std::getenv("DIFFKERN_NORM_CONFIG") != nullptr) return false;
#endif
    constexpr auto kConfigs = std::make_integer_sequence<int, static_cast<int>(std::size(kFullConfigs))>{};
    const auto launch = [&](auto call) { return launch_full_kernel<T, decltype(call)>(params, kConfigs, stream); };
    const bool weight = p.weight != nullptr;
    const bool bias = p.bias != nullptr;
    if (p.layer_norm) {
      if (weight != bias) return false;
      return weight ? launch(Call<true, true, true, false>{}) : launch(Call<true, false, false, false>{});
    }
    if (bias) return false;
    if (!weight) return launch(Call<false, false, false, false>{});  // what is stored is rounded anyway
    return params.rounds ? launch(Call<false, true, false, true>{}) : launch(Call<false, true, false, false>{});
  }
}

template <int kIndex, typename T, typename Param, bool kLayerNorm>
bool launch_register_kernel(const RegisterParams& p, int index, GpuStream stream) {
  if (index != kIndex) return false;
  constexpr RowConfig config = kRowConfigs[kIndex];
  dim3 block;
  if constexpr (config.lanes == 0) {
    block = dim3(static_cast<unsigned>(ceil_div(ceil_div(p.packets, config.packets), kWaveMultiple) * kWaveMultiple));
  } else {
    block = dim3(config.lanes, config.threads / config.lanes);
  }
  register_kernel<T, Param, kLayerNorm, config.lanes, config.packets, config.threads>
      <<<blocks_for(p.rows, block.y), block, 0, stream>>>(p);
  return true;
}

template <typename T, typename Param, int... kIndices>
void launch_register_kernel(const NormParams& p, int index, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  const RegisterParams params = register_params(p, kPacketSize<T>);
  if (p.layer_norm) {
    (launch_register_kernel<kIndices, T, Param, true>(params, index, stream) || ...);
  } else {
    (launch_register_kernel<kIndices, T, Param, false>(params, index, stream) || ...);
  }
}

constexpr int kRowConfigCount = static_cast<int>(std::size(kRowConfigs));

// The first configuration that holds the row, or -1.
int choose_config(int64_t row_packets) {
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_NORM_CONFIG")) return std::atoi(chosen);
#endif
  for (int index = 0; index < kRowConfigCount; ++index) {
    if (kRowConfigs[index].fits(row_packets)) return index;
  }
  return -1;
}

template <bool kVector, typename T>
void launch_loop_kernel(const NormParams& p, GpuStream stream) {
  constexpr int kItemsPerThread = 4;  // or more, in a loop
  constexpr int kGroupThreads = 128;
  const int64_t items = kVector ? p.size / kPacketSize<T> : p.size;
  const int64_t wanted = ceil_div(items, kItemsPerThread);
  dim3 block;
  if (wanted <= kMinWaveSize) {
    int lanes = 4;
    while (lanes < wanted) lanes *= 2;
    block = dim3(lanes, kGroupThreads / lanes);
  } else {
    block = dim3(static_cast<unsigned>(std::min<int64_t>(kMaxThreads, ceil_div(wanted, kWaveMultiple) * kWaveMultiple)));
  }
  loop_kernel<T, kVector><<<blocks_for(p.map.rows, block.y), block, 0, stream>>>(p);
}

template <typename T>
void launch(const NormParams& p, GpuStream stream) {
  if (vectorisable(p)) {
    constexpr int64_t kCount = kPacketSize<T>;
    const bool fits = uniform(p) && PacketMap<2>::holds(leading_map(p.map), {kCount, kCount}, p.size / kCount);
    const int index = fits ? choose_config(p.size / kCount) : -1;
    const auto configs = std::make_integer_sequence<int, kRowConfigCount>{};
    if (index >= 0 && launch_full_kernel<T>(p, stream)) return;
    if (index >= 0 && has_wide_parameters(p)) {
      launch_register_kernel<T, float>(p, index, configs, stream);
    } else if (index >= 0) {
      launch_register_kernel<T, T>(p, index, configs, stream);
    } else {
      launch_loop_kernel<true, T>(p, stream);
    }
  } else if (p.x_stride <= p.map.x_strides[0] || p.map.rows < kColumnRows) {
    launch_loop_kernel<false, T>(p, stream);
  } else {
    column_kernel<T>
        <<<blocks_for(p.map.rows, kColumnRows), dim3(kColumnRows, kColumnSplits), 0, stream>>>(p);
  }
}

}  // namespace

int norm_gpu(const NormParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  with_element(p.x_dtype, [&](auto element) { launch<decltype(element)>(p, stream); });
  return last_launch_error();
}

}  // namespace diffkern
