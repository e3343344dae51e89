// CUDA and HIP kernels for channel_rms_norm_silu.
//
//  column kernel:  positions of a channel are neighbours in memory. A block reads all channels of a few positions
//                  once, in packets of positions, and keeps them in registers.
//  row kernel:     channels of a position are neighbours. The same with a few lanes for each position.
//  general kernel: any alignment, steps and number of channels; reads twice.
#include <algorithm>
#include <iterator>
#include <utility>

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

// --- column kernel -------------------------------------------------------------------------------------

// threadIdx.x: packet of positions; threadIdx.y: lane along the channels. blockIdx.x: tile of positions of a sample.
template <typename T, int kLanes, int kPackets>
__global__ void __launch_bounds__(kColumnPackets* kLanes) column_kernel(const ChannelNormParams p, const uint32_t tiles) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kTile = kColumnPackets * kCount;
  constexpr int kWaves = kColumnPackets * kLanes / kWaveSize;
  __shared__ float sums[kWaves][kTile];
  __shared__ float factors[kTile];

  const uint32_t sample = blockIdx.x / tiles;
  const int64_t position = static_cast<int64_t>(blockIdx.x - sample * tiles) * kTile + threadIdx.x * kCount;
  const bool inside = position < p.shape.positions;
  const T* x = static_cast<const T*>(p.x) + sample * p.x_steps.batch + position;
  T* out = static_cast<T*>(p.out) + sample * p.out_steps.batch + position;
  const int channels = inside ? static_cast<int>(p.shape.channels) : 0;

  uint4 held[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int c = threadIdx.y + i * kLanes;
    if (c < channels) held[i] = load_once(x + c * p.x_steps.channel);
  }
  float squares[kCount] = {};
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (static_cast<int>(threadIdx.y) + i * kLanes >= channels) continue;
    float values[kCount];
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares[j] += values[j] * values[j];
  }
  const int thread = threadIdx.y * kColumnPackets + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int mask = kColumnPackets; mask < kWaveSize; mask *= 2) squares[j] += shuffle_xor(squares[j], mask);
  }
  if (thread % kWaveSize < kColumnPackets) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[thread / kWaveSize][threadIdx.x * kCount + j] = squares[j];
  }
  __syncthreads();
  if (thread < kTile) {
    float sum = 0.0f;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) sum += sums[wave][thread];
    factors[thread] = factor_of(p, sum);
  }
  __syncthreads();
  float factor[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) factor[j] = factors[threadIdx.x * kCount + j];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int c = threadIdx.y + i * kLanes;
    if (c >= channels) continue;
    const Channel channel = channel_of(p, sample, c);
    float values[kCount];
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = finish<T>(p, channel, values[j] * factor[j]);
    *reinterpret_cast<uint4*>(out + c * p.out_steps.channel) = pack_packet<T>(values);
  }
}

// --- row kernel ----------------------------------------------------------------------------------------

// kCount parameters side by side; absent ones change nothing.
template <int kCount>
__device__ __forceinline__ void parameters(const void* base, Dtype dtype, int64_t at, float absent, float* to) {
  if (base != nullptr) return load_elements<kCount>(base, dtype, at, to);
#pragma unroll
  for (int j = 0; j < kCount; ++j) to[j] = absent;
}

// threadIdx.x: lane along the channels; threadIdx.y: position.
template <typename T, int kLanes, int kPackets>
__global__ void __launch_bounds__(128) row_kernel(const ChannelNormParams p, const uint32_t tiles) {
  constexpr int kCount = kPacketSize<T>;
  const uint32_t sample = blockIdx.x / tiles;
  const int64_t position = static_cast<int64_t>(blockIdx.x - sample * tiles) * blockDim.y + threadIdx.y;
  const T* x = static_cast<const T*>(p.x) + sample * p.x_steps.batch + position * p.x_steps.position;
  T* out = static_cast<T*>(p.out) + sample * p.out_steps.batch + position * p.out_steps.position;
  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const int packets = position < p.shape.positions ? static_cast<int>(p.shape.channels) / kCount : 0;

  uint4 held[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int packet = threadIdx.x + i * kLanes;
    if (packet < packets) held[i] = load_once(x + packet * kCount);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (static_cast<int>(threadIdx.x) + i * kLanes >= packets) continue;
    float values[kCount];
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
  }
  const float factor = factor_of(p, group_sum<kLanes>(squares));
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int packet = threadIdx.x + i * kLanes;
    if (packet >= packets) continue;
    const int64_t at = packet * kCount;
    float values[kCount], weights[kCount], biases[kCount], scales[kCount], shifts[kCount];
    unpack<T>(held[i], values);
    parameters<kCount>(p.weight, p.weight_dtype, at, 1.0f, weights);
    parameters<kCount>(p.bias, p.bias_dtype, at, 0.0f, biases);
    parameters<kCount>(p.scale, p.scale_dtype, sample * p.scale_steps[0] + at, 0.0f, scales);
    parameters<kCount>(p.shift, p.shift_dtype, sample * p.shift_steps[0] + at, 0.0f, shifts);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      values[j] = finish<T>(p, {weights[j], biases[j], 1.0f + scales[j], shifts[j]}, values[j] * factor);
    }
    *reinterpret_cast<uint4*>(out + at) = pack_packet<T>(values);
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
  constexpr ColumnConfig config = kColumnConfigs[kIndex];
  if (p.shape.channels > config.lanes * config.packets) return false;
  const Grid grid = grid_for(p, kColumnPackets * kPacketSize<T>);
  column_kernel<T, config.lanes, config.packets>
      <<<grid.blocks, dim3(kColumnPackets, config.lanes), 0, stream>>>(p, grid.tiles);
  return true;
}

template <typename T, int kIndex>
bool try_rows(const ChannelNormParams& p, GpuStream stream) {
  constexpr RowConfig config = kRowConfigs[kIndex];
  if (!config.fits(p.shape.channels / kPacketSize<T>)) return false;
  constexpr int kPositions = config.threads / config.lanes;
  const Grid grid = grid_for(p, kPositions);
  row_kernel<T, config.lanes, config.packets>
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
  switch (p.x_dtype) {
    case Dtype::kFloat16: launch<Half>(p, stream); break;
    case Dtype::kBFloat16: launch<BFloat16>(p, stream); break;
    default: launch<float>(p, stream); break;
  }
  return last_launch_error();
}

}  // namespace diffkern
