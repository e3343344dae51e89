// CUDA and HIP kernels for channel_rms_norm_silu.
//
//  column kernel:  positions of a channel are neighbours in memory. A block reads all channels of a few positions
//                  once, in packets of positions, and keeps them in registers.
//  row kernel:     channels of a position are neighbours. The same with a few lanes for each position.
//  general kernel: any alignment, steps and number of channels; reads twice.
#include <algorithm>
#include <iterator>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

#include "../common/gpu_samples.h"
#include "channel_norm.h"
#include "channel_norm_config.h"

namespace diffkern {
namespace {

__device__ __forceinline__ float factor_of(const ChannelNormParams& p, float sum_of_squares) {
  const float size = static_cast<float>(p.shape.channels);
  if (p.clamp_eps) {
    const float length = sqrtf(sum_of_squares);
    return sqrtf(size) / (length < p.eps ? p.eps : length);  // lets NaN through
  }
  return rsqrtf(sum_of_squares / size + p.eps);
}

// The parameters of a channel in one sample, with which what is absent changes nothing.
struct Channel {
  float weight;
  float bias;
  float scale;  // 1 + scale
  float shift;
};

__device__ __forceinline__ Channel channel_of(const ChannelNormParams& p, int64_t sample, int64_t c) {
  return {parameter(p.weight, p.weight_dtype, c, 1.0f), parameter(p.bias, p.bias_dtype, c, 0.0f),
          1.0f + parameter(p.scale, p.scale_dtype, sample * p.scale_steps[0] + c * p.scale_steps[1], 0.0f),
          parameter(p.shift, p.shift_dtype, sample * p.shift_steps[0] + c * p.shift_steps[1], 0.0f)};
}

// All that follows the multiplication by the factor.
template <typename T>
__device__ __forceinline__ float finish(const ChannelNormParams& p, const Channel& channel, float value) {
  const bool rounds = p.round_dtype != Dtype::kNone;
  if (rounds) value = rounded_to(p.round_dtype, value);
  value *= channel.weight;
  if (rounds && p.bias != nullptr) value = rounded<T>(value);
  value = (value + channel.bias) * channel.scale + channel.shift;
  return p.silu ? silu<T>(value) : value;
}

// The parameters of all channels of a block, in shared memory. Where nothing is rounded in between, they are one
// multiplication and one addition: value * affine[0].x + affine[0].y.
template <int kChannels>
struct Parameters {
  float2 affine[kChannels];
  float2 modulation[kChannels];  // used where there is rounding alone

  __device__ __forceinline__ void gather(const ChannelNormParams& p, int64_t sample, int thread, int threads) {
    const bool rounds = p.round_dtype != Dtype::kNone;
    for (int c = thread; c < static_cast<int>(p.shape.channels); c += threads) {
      const Channel channel = channel_of(p, sample, c);
      if (rounds) {
        affine[c] = {channel.weight, channel.bias};
        modulation[c] = {channel.scale, channel.shift};
      } else {
        affine[c] = {channel.weight * channel.scale, fmaf(channel.bias, channel.scale, channel.shift)};
      }
    }
  }

  // All that follows the multiplication by the factor, for kCount values: of channels side by side from c on, or
  // without kWide all of channel c.
  template <typename T, int kCount, bool kWide>
  __device__ __forceinline__ void finish_all(const ChannelNormParams& p, int c, float* values) const {
    if (p.round_dtype != Dtype::kNone) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float2 a = affine[kWide ? c + j : c];
        const float2 m = modulation[kWide ? c + j : c];
        values[j] = finish<T>(p, {a.x, a.y, m.x, m.y}, values[j]);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float2 a = affine[kWide ? c + j : c];
      values[j] = fmaf(values[j], a.x, a.y);
    }
    if (!p.silu) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = silu<T>(values[j]);
  }
};

// --- column kernel -------------------------------------------------------------------------------------

// threadIdx.x: packet of positions; threadIdx.y: lane along the channels. blockIdx.x: tile of positions of a sample.
template <typename T, int kWidth, int kLanes, int kPackets>
__global__ void __launch_bounds__(kWidth* kLanes) column_kernel(const ChannelNormParams p, const uint32_t tiles) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kTile = kWidth * kCount;
  constexpr int kWaves = kWidth * kLanes / kWaveSize;
  __shared__ float sums[kWaves][kTile];
  __shared__ float factors[kTile];
  __shared__ Parameters<kLanes * kPackets> parameters;

  const uint32_t sample = blockIdx.x / tiles;
  const int64_t position = static_cast<int64_t>(blockIdx.x - sample * tiles) * kTile + threadIdx.x * kCount;
  const bool inside = position < p.shape.positions;
  const T* x = static_cast<const T*>(p.x) + sample * p.x_steps.batch + position;
  T* out = static_cast<T*>(p.out) + sample * p.out_steps.batch + position;
  const int channels = inside ? static_cast<int>(p.shape.channels) : 0;
  const int thread = threadIdx.y * kWidth + threadIdx.x;

  uint4 held[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int c = threadIdx.y + i * kLanes;
    if (c < channels) held[i] = load_once(x + c * p.x_steps.channel);
  }
  parameters.gather(p, sample, thread, kWidth * kLanes);
  float squares[kCount] = {};
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (static_cast<int>(threadIdx.y) + i * kLanes >= channels) continue;
    float values[kCount];
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares[j] += values[j] * values[j];
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int mask = kWidth; mask < kWaveSize; mask *= 2) squares[j] += shuffle_xor(squares[j], mask);
  }
  if (thread % kWaveSize < kWidth) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[thread / kWaveSize][threadIdx.x * kCount + j] = squares[j];
  }
  __syncthreads();
  for (int at = thread; at < kTile; at += kWidth * kLanes) {
    float sum = 0.0f;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) sum += sums[wave][at];
    factors[at] = factor_of(p, sum);
  }
  __syncthreads();
  float factor[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) factor[j] = factors[threadIdx.x * kCount + j];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int c = threadIdx.y + i * kLanes;
    if (c >= channels) continue;
    float values[kCount];
    optimization_barrier(held[i]);
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= factor[j];
    parameters.template finish_all<T, kCount, false>(p, c, values);
    *reinterpret_cast<uint4*>(out + c * p.out_steps.channel) = pack_packet<T>(values);
  }
}

// --- row kernel ----------------------------------------------------------------------------------------

// threadIdx.x: lane along the channels; threadIdx.y: position, or kRows positions blockDim.y apart.
template <typename T, int kLanes, int kPackets, int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads) row_kernel(const ChannelNormParams p, const uint32_t tiles) {
  constexpr int kCount = kPacketSize<T>;
  __shared__ Parameters<kLanes * kPackets * kCount> parameters;
  const uint32_t sample = blockIdx.x / tiles;
  const int64_t first = static_cast<int64_t>(blockIdx.x - sample * tiles) * (blockDim.y * kRows) + threadIdx.y;
  const T* x = static_cast<const T*>(p.x) + sample * p.x_steps.batch;
  T* out = static_cast<T*>(p.out) + sample * p.out_steps.batch;
  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const int packets = static_cast<int>(p.shape.channels) / kCount;
  const auto each_packet = [&](int r, auto&& body) {
    const int64_t position = first + r * blockDim.y;
    if (position >= p.shape.positions) return;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const int packet = threadIdx.x + i * kLanes;
      if (packet < packets) body(i, packet, position);
    }
  };

  uint4 held[kRows][kPackets];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    each_packet(r, [&](int i, int packet, int64_t position) {
      held[r][i] = load_once(x + position * p.x_steps.position + packet * kCount);
    });
  }
  parameters.gather(p, sample, threadIdx.y * kLanes + threadIdx.x, kThreads);
  float factors[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float squares = 0.0f;
    each_packet(r, [&](int i, int, int64_t) {
      float values[kCount];
      unpack<T>(held[r][i], values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
    });
    factors[r] = factor_of(p, group_sum<kLanes>(squares));
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    each_packet(r, [&](int i, int packet, int64_t position) {
      float values[kCount];
      optimization_barrier(held[r][i]);
      unpack<T>(held[r][i], values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] *= factors[r];
      parameters.template finish_all<T, kCount, true>(p, packet * kCount, values);
      *reinterpret_cast<uint4*>(out + position * p.out_steps.position + packet * kCount) = pack_packet<T>(values);
    });
  }
}

// --- general kernel ------------------------------------------------------------------------------------

// kGeneralLanes threads share a position. Neighbouring threads take neighbours in memory: positions or, with kRows,
// channels.
template <typename T, bool kRows>
__global__ void __launch_bounds__(kGeneralPositions* kGeneralLanes)
    general_kernel(const ChannelNormParams p, const uint32_t tiles) {
  __shared__ float partials[kGeneralLanes][kGeneralPositions + 1];
  const int lane = kRows ? threadIdx.x % kGeneralLanes : threadIdx.x / kGeneralPositions;
  const int column = kRows ? threadIdx.x / kGeneralLanes : threadIdx.x % kGeneralPositions;
  const uint32_t sample = blockIdx.x / tiles;
  const int64_t position = static_cast<int64_t>(blockIdx.x - sample * tiles) * kGeneralPositions + column;
  const int64_t channels = position < p.shape.positions ? p.shape.channels : 0;
  const T* x = static_cast<const T*>(p.x) + sample * p.x_steps.batch + position * p.x_steps.position;
  T* out = static_cast<T*>(p.out) + sample * p.out_steps.batch + position * p.out_steps.position;

  float squares = 0.0f;
#pragma unroll 8
  for (int64_t c = lane; c < channels; c += kGeneralLanes) {
    const float value = to_float(x[c * p.x_steps.channel]);
    squares += value * value;
  }
  partials[lane][column] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kGeneralLanes; ++i) squares += partials[i][column];
  const float factor = factor_of(p, squares);
#pragma unroll 4
  for (int64_t c = lane; c < channels; c += kGeneralLanes) {
    const float value = to_float(x[c * p.x_steps.channel]) * factor;
    out[c * p.out_steps.channel] = from_float<T>(finish<T>(p, channel_of(p, sample, c), value));
  }
}

// --- launches ------------------------------------------------------------------------------------------

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What all kernels are launched with: a row of blocks for each sample.
struct Grid {
  unsigned blocks;
  uint32_t tiles;
};

Grid grid_for(const ChannelNormParams& p, int64_t positions_per_block) {
  const int64_t tiles = ceil_div(p.shape.positions, positions_per_block);
  return {static_cast<unsigned>(p.shape.samples * tiles), static_cast<uint32_t>(tiles)};
}

template <typename T, int kIndex>
bool try_columns(const ChannelNormParams& p, GpuStream stream) {
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_COLUMN_CONFIG"); chosen && std::atoi(chosen) != kIndex) return false;
#endif
  constexpr ColumnConfig config = kColumnConfigs[kIndex];
  if (p.shape.channels > config.lanes * config.packets) return false;
  const Grid grid = grid_for(p, config.width * kPacketSize<T>);
  column_kernel<T, config.width, config.lanes, config.packets>
      <<<grid.blocks, dim3(config.width, config.lanes), 0, stream>>>(p, grid.tiles);
  return true;
}

template <typename T, int kIndex>
bool try_rows(const ChannelNormParams& p, GpuStream stream) {
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_ROW_CONFIG"); chosen && std::atoi(chosen) != kIndex) return false;
#endif
  constexpr RowConfig config = kRowConfigs[kIndex];
  if (!config.fits(p.shape.channels / kPacketSize<T>)) return false;
  constexpr int kPositions = config.threads / config.lanes;
  const Grid grid = grid_for(p, kPositions * config.rows);
  row_kernel<T, config.lanes, config.packets, config.threads, config.rows>
      <<<grid.blocks, dim3(config.lanes, kPositions), 0, stream>>>(p, grid.tiles);
  return true;
}

// Takes the first configuration that holds all channels; false if none does.
template <typename T, int... kIndices>
bool try_all_columns(const ChannelNormParams& p, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  return (try_columns<T, kIndices>(p, stream) || ...);
}

template <typename T, int... kIndices>
bool try_all_rows(const ChannelNormParams& p, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  return (try_rows<T, kIndices>(p, stream) || ...);
}

bool columns_in_packets(const ChannelNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  return p.x_steps.position == 1 && p.out_steps.position == 1 && aligned(p.x) && aligned(p.out) &&
         all_multiples(count, p.shape.positions, p.x_steps.batch, p.x_steps.channel, p.out_steps.batch,
                       p.out_steps.channel);
}

// Whether a modulation can be read in packets as wide as those of x.
bool modulation_in_packets(const void* data, const int64_t* steps, int64_t count) {
  return data == nullptr || (aligned(data) && steps[1] == 1 && steps[0] % count == 0);
}

bool rows_in_packets(const ChannelNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  return channels_are_neighbours(p.x_steps, p.out_steps) && aligned(p.x) && aligned(p.out) && aligned(p.weight) &&
         aligned(p.bias) &&
         all_multiples(count, p.shape.channels, p.x_steps.batch, p.x_steps.position, p.out_steps.batch,
                       p.out_steps.position) &&
         modulation_in_packets(p.scale, p.scale_steps, count) && modulation_in_packets(p.shift, p.shift_steps, count);
}

template <typename T>
void launch(const ChannelNormParams& p, GpuStream stream) {
  constexpr int kColumnCount = static_cast<int>(std::size(kColumnConfigs));
  constexpr int kRowCount = static_cast<int>(std::size(kRowConfigs));
  if (columns_in_packets(p) && try_all_columns<T>(p, std::make_integer_sequence<int, kColumnCount>{}, stream)) return;
  if (rows_in_packets(p) && try_all_rows<T>(p, std::make_integer_sequence<int, kRowCount>{}, stream)) return;
  const Grid grid = grid_for(p, kGeneralPositions);
  constexpr int kThreads = kGeneralPositions * kGeneralLanes;
  if (p.x_steps.channel < p.x_steps.position) {
    general_kernel<T, true><<<grid.blocks, kThreads, 0, stream>>>(p, grid.tiles);
  } else {
    general_kernel<T, false><<<grid.blocks, kThreads, 0, stream>>>(p, grid.tiles);
  }
}

}  // namespace

int channel_norm_gpu(const ChannelNormParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  with_element(p.x_dtype, [&](auto element) { launch<decltype(element)>(p, stream); });
  return last_launch_error();
}

}  // namespace diffkern
