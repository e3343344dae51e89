// CUDA and HIP kernels for add_norm_silu_pad.
//
//  row kernel:  channels of a position are neighbours in memory. A few lanes read all channels of some positions once,
//               in packets, and keep their sums in registers. Without a norm nothing is summed over the channels, and
//               a block may take a slice of them: of any number.
//  tile kernel: any alignment, order and number of channels. It reads and writes each in the order of its own memory,
//               by way of tiles in shared memory; for a norm it reads twice. Without one a block takes a slice, too.
#include <algorithm>
#include <iterator>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

#include "../common/gpu_samples.h"
#include "add_norm_silu_pad.h"
#include "add_norm_silu_pad_config.h"

namespace diffkern {
namespace {

__device__ __forceinline__ float factor_of(const AddNormSiluPadParams& p, float sum_of_squares) {
  return p.norm ? rsqrtf(sum_of_squares / static_cast<float>(p.shape.channels) + p.eps) : 1.0f;
}

__device__ __forceinline__ float bias_of(const AddNormSiluPadParams& p, int64_t c) {
  return parameter(p.bias, p.bias_dtype, c, 0.0f);
}

// 1 + scale, and shift, with which what is absent changes nothing.
__device__ __forceinline__ float2 modulation_of(const AddNormSiluPadParams& p, int64_t batch, int64_t c) {
  return {1.0f + parameter(p.scale, p.scale_dtype, batch * p.scale_steps[0] + c * p.scale_steps[1], 0.0f),
          parameter(p.shift, p.shift_dtype, batch * p.shift_steps[0] + c * p.shift_steps[1], 0.0f)};
}

// --- row kernel ----------------------------------------------------------------------------------------

// threadIdx.x: lane along the channels; threadIdx.y: position, or kRows positions blockDim.y apart.
// blockIdx.x: tile of positions of a sample; blockIdx.y: slice of kChannels channels, of which a norm has one.
template <typename T, bool kResidual, int kLanes, int kPackets, int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads) row_kernel(const AddNormSiluPadParams p, const uint32_t tiles) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kChannels = kLanes * kPackets * kCount;
  __shared__ __align__(16) float biases[kChannels];
  __shared__ __align__(16) float2 modulations[kChannels];

  const uint32_t sample = blockIdx.x / tiles;
  const int64_t first = static_cast<int64_t>(blockIdx.x - sample * tiles) * (blockDim.y * kRows) + threadIdx.y;
  const int from = blockIdx.y * kChannels;
  const int channels = min(static_cast<int>(p.shape.channels) - from, kChannels);
  const Target target = target_of(p, sample);
  const T* x = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, sample) + from;
  const T* residual = static_cast<const T*>(p.residual);
  if constexpr (kResidual) residual += sample_offset(p.shape, p.residual_steps, sample) + from;
  T* out = static_cast<T*>(p.out) + target.offset + from;
  const bool biased = p.bias != nullptr;
  const bool modulated = p.scale != nullptr || p.shift != nullptr;
  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const int packets = channels / kCount;
  const auto each_packet = [&](int r, auto&& body) {
    const int64_t position = first + r * blockDim.y;
    if (position >= p.shape.positions) return;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const int packet = threadIdx.x + i * kLanes;
      if (packet < packets) body(i, packet * kCount, position);
    }
  };

  uint4 held[kRows][kPackets];
  [[maybe_unused]] uint4 added[kRows][kPackets];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    each_packet(r, [&](int i, int c, int64_t position) {
      held[r][i] = load_once(x + position * p.x_steps.position + c);
      if constexpr (kResidual) added[r][i] = load_once(residual + position * p.residual_steps.position + c);
    });
  }
  if (biased || modulated) {
    for (int c = threadIdx.y * kLanes + threadIdx.x; c < channels; c += kThreads) {
      if (biased) biases[c] = bias_of(p, from + c);
      if (modulated) modulations[c] = modulation_of(p, target.batch, from + c);
    }
    __syncthreads();
  }

  float sums[kRows][kPackets][kCount];
  float factors[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float squares = 0.0f;
    each_packet(r, [&](int i, int c, int64_t) {
      float(&sum)[kCount] = sums[r][i];
      unpack<T>(held[r][i], sum);
      if (biased) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] += biases[c + j];
      }
      if constexpr (kResidual) {
        float more[kCount];
        unpack<T>(added[r][i], more);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] += more[j];
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) squares += sum[j] * sum[j];
    });
    factors[r] = factor_of(p, p.norm ? group_sum<kLanes>(squares) : 0.0f);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    each_packet(r, [&](int i, int c, int64_t position) {
      float(&values)[kCount] = sums[r][i];
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] *= factors[r];
      if (modulated) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[j] = fmaf(values[j], modulations[c + j].x, modulations[c + j].y);
      }
      if (p.silu) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[j] = silu<T>(values[j]);
      }
      const uint4 packet = pack_packet<T>(values);
      T* to = out + position * p.out_steps.position + c;
      for (int64_t copy = 0; copy < target.copies; ++copy, to += p.out_steps.frame) {
        *reinterpret_cast<uint4*>(to) = packet;
      }
    });
  }
}

// --- tile kernel ---------------------------------------------------------------------------------------

// The place in a tile of element `i`, in the order of a tensor's memory.
struct Place {
  int channel;
  int position;
};

__device__ __forceinline__ Place place_of(int i, bool channels_last) {
  return channels_last ? Place{i % kTileChannels, i / kTileChannels} : Place{i / kTilePositions, i % kTilePositions};
}

__host__ __device__ inline bool in_channel_order(const Steps& steps) { return steps.channel < steps.position; }

template <typename T>
__global__ void __launch_bounds__(kTileThreads) tile_kernel(const AddNormSiluPadParams p, const uint32_t tiles) {
  constexpr int kElements = kTileChannels * kTilePositions;
  constexpr int kLanes = kTileThreads / kTilePositions;
  __shared__ float tile[kTileChannels][kTilePositions + 1];
  __shared__ float partials[kLanes][kTilePositions];
  __shared__ float factors[kTilePositions];

  const uint32_t sample = blockIdx.x / tiles;
  const int64_t start = static_cast<int64_t>(blockIdx.x - sample * tiles) * kTilePositions;
  const Target target = target_of(p, sample);
  const T* x = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, sample) + start * p.x_steps.position;
  const int64_t residual_at = sample_offset(p.shape, p.residual_steps, sample) + start * p.residual_steps.position;
  T* out = static_cast<T*>(p.out) + target.offset + start * p.out_steps.position;
  const int64_t positions = p.shape.positions - start;
  const bool x_last = in_channel_order(p.x_steps);
  const bool out_last = in_channel_order(p.out_steps);

  // Calls body(place, channel) for the elements of this thread, in the order of a tensor's memory.
  const auto each_element = [&](bool channels_last, int64_t from, auto&& body) {
#pragma unroll 4
    for (int i = 0; i < kElements / kTileThreads; ++i) {
      const Place place = place_of(i * kTileThreads + threadIdx.x, channels_last);
      const int64_t c = from + place.channel;
      if (c < p.shape.channels && place.position < positions) body(place, c);
    }
  };
  const auto sum_at = [&](const Place& place, int64_t c) {
    float value = to_float(x[c * p.x_steps.channel + place.position * p.x_steps.position]) + bias_of(p, c);
    const int64_t at = residual_at + c * p.residual_steps.channel + place.position * p.residual_steps.position;
    return value + parameter(p.residual, p.residual_dtype, at, 0.0f);
  };

  const int column = threadIdx.x % kTilePositions;
  const int lane = threadIdx.x / kTilePositions;
  float squares = 0.0f;
  if (p.norm) {
    for (int64_t from = 0; from < p.shape.channels; from += kTileChannels) {
      each_element(x_last, from,
                   [&](const Place& place, int64_t c) { tile[place.channel][place.position] = sum_at(place, c); });
      __syncthreads();
      const int64_t left = p.shape.channels - from;
      const int channels = left < kTileChannels ? static_cast<int>(left) : kTileChannels;
      if (column < positions) {
        for (int c = lane; c < channels; c += kLanes) squares += tile[c][column] * tile[c][column];
      }
      __syncthreads();
    }
  }
  partials[lane][column] = squares;
  __syncthreads();
  if (threadIdx.x < kTilePositions) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum += partials[i][column];
    factors[column] = factor_of(p, sum);
  }
  __syncthreads();
  // A norm has one block for all channels, and has summed over them by now.
  for (int64_t from = blockIdx.y * kTileChannels; from < p.shape.channels; from += gridDim.y * kTileChannels) {
    each_element(x_last, from, [&](const Place& place, int64_t c) {
      const float2 modulation = modulation_of(p, target.batch, c);
      const float value = fmaf(sum_at(place, c) * factors[place.position], modulation.x, modulation.y);
      tile[place.channel][place.position] = p.silu ? silu<T>(value) : value;
    });
    __syncthreads();
    each_element(out_last, from, [&](const Place& place, int64_t c) {
      const T value = from_float<T>(tile[place.channel][place.position]);
      T* to = out + c * p.out_steps.channel + place.position * p.out_steps.position;
      for (int64_t copy = 0; copy < target.copies; ++copy, to += p.out_steps.frame) *to = value;
    });
    __syncthreads();
  }
}

// --- launches ------------------------------------------------------------------------------------------

struct Grid {
  unsigned blocks;
  uint32_t tiles;
};

// A row of blocks for each sample.
Grid grid_for(const AddNormSiluPadParams& p, int64_t positions_per_block) {
  const int64_t tiles = (p.shape.positions + positions_per_block - 1) / positions_per_block;
  return {static_cast<unsigned>(p.shape.samples * tiles), static_cast<uint32_t>(tiles)};
}

template <typename T, bool kResidual, int kIndex>
void launch_rows(const AddNormSiluPadParams& p, unsigned slices, GpuStream stream) {
  constexpr RowConfig config = kRowConfigs[kIndex];
  constexpr int kPositions = config.threads / config.lanes;
  const Grid grid = grid_for(p, kPositions * config.rows);
  row_kernel<T, kResidual, config.lanes, config.packets, config.threads, config.rows>
      <<<dim3(grid.blocks, slices), dim3(config.lanes, kPositions), 0, stream>>>(p, grid.tiles);
}

template <typename T, bool kResidual, int kIndex>
bool try_rows(const AddNormSiluPadParams& p, GpuStream stream) {
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_ROW_CONFIG"); chosen && std::atoi(chosen) != kIndex) return false;
#endif
  if (!kRowConfigs[kIndex].fits(p.shape.channels / kPacketSize<T>)) return false;
  launch_rows<T, kResidual, kIndex>(p, 1, stream);
  return true;
}

// Without a norm: slices of the channels, where there are more than any configuration holds.
template <typename T, bool kResidual>
bool try_slices(const AddNormSiluPadParams& p, GpuStream stream) {
  constexpr RowConfig config = kRowConfigs[kSliceConfig];
  constexpr int64_t kChannels = config.lanes * config.packets * kPacketSize<T>;
  const int64_t slices = (p.shape.channels + kChannels - 1) / kChannels;
  if (p.norm || slices > kMostSlices) return false;
  launch_rows<T, kResidual, kSliceConfig>(p, static_cast<unsigned>(slices), stream);
  return true;
}

// Takes the first configuration that holds all channels, or slices of them; false if a norm needs more than any holds.
template <typename T, bool kResidual, int... kIndices>
bool try_all_rows(const AddNormSiluPadParams& p, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  return (try_rows<T, kResidual, kIndices>(p, stream) || ...) || try_slices<T, kResidual>(p, stream);
}

bool in_packets(const AddNormSiluPadParams& p, const void* data, Dtype dtype, const Steps& steps) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  return dtype == p.x_dtype && aligned(data) && steps.channel == 1 &&
         all_multiples(count, p.shape.channels, steps.batch, steps.frame, steps.position);
}

template <typename T>
void launch(const AddNormSiluPadParams& p, GpuStream stream) {
  constexpr auto kIndices = std::make_integer_sequence<int, static_cast<int>(std::size(kRowConfigs))>{};
  if (in_packets(p, p.x, p.x_dtype, p.x_steps) && in_packets(p, p.out, p.x_dtype, p.out_steps)) {
    if (p.residual == nullptr && try_all_rows<T, false>(p, kIndices, stream)) return;
    if (p.residual != nullptr && in_packets(p, p.residual, p.residual_dtype, p.residual_steps) &&
        try_all_rows<T, true>(p, kIndices, stream)) {
      return;
    }
  }
  const Grid grid = grid_for(p, kTilePositions);
  const int64_t slices = p.norm ? 1 : std::min((p.shape.channels + kTileChannels - 1) / kTileChannels, kMostSlices);
  tile_kernel<T><<<dim3(grid.blocks, static_cast<unsigned>(slices)), kTileThreads, 0, stream>>>(p, grid.tiles);
}

}  // namespace

int add_norm_silu_pad_gpu(const AddNormSiluPadParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  with_element(p.x_dtype, [&](auto element) { launch<decltype(element)>(p, stream); });
  return last_launch_error();
}

}  // namespace diffkern
