// CUDA and HIP kernels for rms_norm and layer_norm.
//
//  full kernel:     the plain case of the next one, of half the code (norm_full_kernel.h).
//  register kernel: contiguous aligned rows of one dtype (norm_register_kernel.h). The fast path.
//  loop kernel:     any dtypes, alignment and size (norm_loop_kernels.h).
//  column kernel:   rows across memory, as in channel-first tensors; neighbouring threads take neighbouring
//                   rows, so that accesses coalesce (there as well).
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
#include "norm_loop_kernels.h"
#include "norm_packets.h"
#include "norm_register_kernel.h"

namespace diffkern {
namespace {

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
