// CPU kernels for channel_rms_norm_silu, compiled once per instruction set (DIFFKERN_CPU_LEVEL).
#include <algorithm>
#include <cmath>
#include <vector>

#include "../common/cpu_activation.h"
#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "channel_norm.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

// The parameters of a channel, with which what is absent changes nothing.
struct Channel {
  float weight;
  float bias;
  float scale;  // 1 + scale
  float shift;
};

Channel channel_of(const ChannelNormParams& p, int64_t sample, int64_t c) {
  const int64_t scale_at = sample * p.scale_steps[0] + c * p.scale_steps[1];
  const int64_t shift_at = sample * p.shift_steps[0] + c * p.shift_steps[1];
  return {parameter(p.weight, p.weight_dtype, c, 1.0f), parameter(p.bias, p.bias_dtype, c, 0.0f),
          1.0f + parameter(p.scale, p.scale_dtype, scale_at, 0.0f), parameter(p.shift, p.shift_dtype, shift_at, 0.0f)};
}

float factor_of(const ChannelNormParams& p, double sum_of_squares) {
  const double size = static_cast<double>(p.shape.channels);
  if (p.clamp_eps) {
    const double length = std::sqrt(sum_of_squares);
    const double bound = p.eps;
    return static_cast<float>(std::sqrt(size) / (length < bound ? bound : length));  // lets NaN through
  }
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / size + static_cast<double>(p.eps)));
}

// What follows the multiplication by the factor, for n values with parameters taken from channel(i).
template <typename Channels>
void finish(const ChannelNormParams& p, float* values, int n, Channels&& channel) {
  round_to(p.round_dtype, values, n);
  for (int i = 0; i < n; ++i) values[i] *= channel(i).weight;
  if (p.bias != nullptr) {
    if (p.round_dtype != Dtype::kNone) round_to(p.x_dtype, values, n);
    for (int i = 0; i < n; ++i) values[i] += channel(i).bias;
  }
  if (p.scale != nullptr) {
    for (int i = 0; i < n; ++i) values[i] *= channel(i).scale;
  }
  if (p.shift != nullptr) {
    for (int i = 0; i < n; ++i) values[i] += channel(i).shift;
  }
  if (p.silu) apply_silu(values, n);
}

// Positions that are not apart by 1 in both tensors, with channels that are: one after the other.
void rows(const ChannelNormParams& p, int64_t sample, int64_t x_at, int64_t out_at, int positions) {
  alignas(64) float values[kChunk];
  std::vector<Channel> parameters(p.shape.channels);
  for (int64_t c = 0; c < p.shape.channels; ++c) parameters[c] = channel_of(p, sample, c);
  for (int i = 0; i < positions; ++i) {
    Sums sums;
    for (int64_t first = 0; first < p.shape.channels; first += kChunk) {
      const int n = static_cast<int>(std::min<int64_t>(kChunk, p.shape.channels - first));
      load(p.x, p.x_dtype, x_at + i * p.x_steps.position + first, 1, n, values);
      accumulate(values, n, &sums);
    }
    const float factor = factor_of(p, sums.squares);
    for (int64_t first = 0; first < p.shape.channels; first += kChunk) {
      const int n = static_cast<int>(std::min<int64_t>(kChunk, p.shape.channels - first));
      load(p.x, p.x_dtype, x_at + i * p.x_steps.position + first, 1, n, values);
      for (int j = 0; j < n; ++j) values[j] *= factor;
      finish(p, values, n, [&](int j) -> const Channel& { return parameters[first + j]; });
      store(values, n, p.out, p.x_dtype, out_at + i * p.out_steps.position + first, 1);
    }
  }
}

// A tile of positions, one channel of all of them at a time.
void columns(const ChannelNormParams& p, int64_t sample, int64_t x_at, int64_t out_at, int positions) {
  constexpr int64_t kFlushEvery = 64;  // float32 additions before a sum moves on to float64
  alignas(64) float values[kTilePositions];
  double squares[kTilePositions] = {};
  for (int64_t first = 0; first < p.shape.channels; first += kFlushEvery) {
    alignas(64) float part[kTilePositions] = {};
    for (int64_t c = first; c < std::min(first + kFlushEvery, p.shape.channels); ++c) {
      load(p.x, p.x_dtype, x_at + c * p.x_steps.channel, p.x_steps.position, positions, values);
      for (int i = 0; i < positions; ++i) part[i] += values[i] * values[i];
    }
    for (int i = 0; i < positions; ++i) squares[i] += part[i];
  }
  alignas(64) float factors[kTilePositions];
  for (int i = 0; i < positions; ++i) factors[i] = factor_of(p, squares[i]);
  for (int64_t c = 0; c < p.shape.channels; ++c) {
    const Channel channel = channel_of(p, sample, c);
    load(p.x, p.x_dtype, x_at + c * p.x_steps.channel, p.x_steps.position, positions, values);
    for (int i = 0; i < positions; ++i) values[i] *= factors[i];
    finish(p, values, positions, [&](int) -> const Channel& { return channel; });
    store(values, positions, p.out, p.x_dtype, out_at + c * p.out_steps.channel, p.out_steps.position);
  }
}

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void channel_norm_cpu(const ChannelNormParams& p, int64_t begin, int64_t end) {
  const int64_t tiles = (p.shape.positions + kTilePositions - 1) / kTilePositions;
  const bool along = channels_are_neighbours(p.x_steps, p.out_steps);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t sample = task / tiles;
    const int64_t first = task % tiles * kTilePositions;
    const int positions = static_cast<int>(std::min(kTilePositions, p.shape.positions - first));
    const int64_t x_at = sample_offset(p.shape, p.x_steps, sample) + first * p.x_steps.position;
    const int64_t out_at = sample_offset(p.shape, p.out_steps, sample) + first * p.out_steps.position;
    along ? rows(p, sample, x_at, out_at, positions) : columns(p, sample, x_at, out_at, positions);
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
