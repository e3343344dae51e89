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

// The parameters of channels, with which what is absent changes nothing.
struct Channels {
  std::vector<float> weight;
  std::vector<float> bias;
  std::vector<float> scale;  // 1 + scale
  std::vector<float> shift;

  Channels(const ChannelNormParams& p, int64_t sample) {
    for (std::vector<float>* values : {&weight, &bias, &scale, &shift}) values->resize(p.shape.channels);
    for (int64_t c = 0; c < p.shape.channels; ++c) {
      const int64_t scale_at = sample * p.scale_steps[0] + c * p.scale_steps[1];
      const int64_t shift_at = sample * p.shift_steps[0] + c * p.shift_steps[1];
      weight[c] = parameter(p.weight, p.weight_dtype, c, 1.0f);
      bias[c] = parameter(p.bias, p.bias_dtype, c, 0.0f);
      scale[c] = 1.0f + parameter(p.scale, p.scale_dtype, scale_at, 0.0f);
      shift[c] = parameter(p.shift, p.shift_dtype, shift_at, 0.0f);
    }
  }
};

float factor_of(const ChannelNormParams& p, double sum_of_squares) {
  const double size = static_cast<double>(p.shape.channels);
  if (p.clamp_eps) {
    const double length = std::sqrt(sum_of_squares);
    const double bound = p.eps;
    return static_cast<float>(std::sqrt(size) / (length < bound ? bound : length));  // lets NaN through
  }
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / size + static_cast<double>(p.eps)));
}

// What follows the multiplication by the factor, for n values of which number i belongs to channel(i).
template <typename Channel>
void finish(const ChannelNormParams& p, const Channels& channels, float* values, int n, Channel&& channel) {
  const float *weight = channels.weight.data(), *bias = channels.bias.data();
  const float *scale = channels.scale.data(), *shift = channels.shift.data();
  round_to(p.round_dtype, values, n);
  each(n, [&](int i) { values[i] *= weight[channel(i)]; });
  if (p.bias != nullptr) {
    if (p.round_dtype != Dtype::kNone) round_to(p.x_dtype, values, n);
    each(n, [&](int i) { values[i] += bias[channel(i)]; });
  }
  if (p.scale != nullptr) each(n, [&](int i) { values[i] *= scale[channel(i)]; });
  if (p.shift != nullptr) each(n, [&](int i) { values[i] += shift[channel(i)]; });
  if (p.silu) apply_silu(values, n);
}

// Positions that are not apart by 1 in both tensors, with channels that are: one after the other.
void rows(const ChannelNormParams& p, const Channels& channels, int64_t x_at, int64_t out_at, int positions) {
  alignas(64) float buffer[kChunk];
  for (int i = 0; i < positions; ++i) {
    const auto each_chunk = [&](auto&& body) {
      for (int64_t first = 0; first < p.shape.channels; first += kChunk) {
        const int n = static_cast<int>(std::min<int64_t>(kChunk, p.shape.channels - first));
        body(first, n, floats(p.x, p.x_dtype, x_at + i * p.x_steps.position + first, 1, n, buffer));
      }
    };
    Sums sums;
    each_chunk([&](int64_t, int n, const float* x) { accumulate(x, n, 0.0f, &sums); });
    const float factor = factor_of(p, sums.squares);
    each_chunk([&](int64_t first, int n, const float* x) {
      const int64_t at = out_at + i * p.out_steps.position + first;
      float* values = room(p.out, p.x_dtype, at, 1, buffer);
      each(n, [&](int j) { values[j] = x[j] * factor; });
      finish(p, channels, values, n, [&](int j) { return first + j; });
      store(values, n, p.out, p.x_dtype, at, 1);
    });
  }
}

// A tile of positions, one channel of all of them at a time.
void columns(const ChannelNormParams& p, const Channels& channels, int64_t x_at, int64_t out_at, int positions) {
  constexpr int64_t kFlushEvery = 64;  // float32 additions before a sum moves on to float64
  alignas(64) float buffer[kTilePositions];
  const auto channel_of = [&](int64_t c) {
    return floats(p.x, p.x_dtype, x_at + c * p.x_steps.channel, p.x_steps.position, positions, buffer);
  };
  double squares[kTilePositions] = {};
  for (int64_t first = 0; first < p.shape.channels; first += kFlushEvery) {
    alignas(64) float part[kTilePositions] = {};
    for (int64_t c = first; c < std::min(first + kFlushEvery, p.shape.channels); ++c) {
      const float* x = channel_of(c);
      each(positions, [&](int i) { part[i] += x[i] * x[i]; });
    }
    for (int i = 0; i < positions; ++i) squares[i] += part[i];
  }
  alignas(64) float factors[kTilePositions];
  for (int i = 0; i < positions; ++i) factors[i] = factor_of(p, squares[i]);
  for (int64_t c = 0; c < p.shape.channels; ++c) {
    const float* x = channel_of(c);
    const int64_t at = out_at + c * p.out_steps.channel;
    float* values = room(p.out, p.x_dtype, at, p.out_steps.position, buffer);
    each(positions, [&](int i) { values[i] = x[i] * factors[i]; });
    finish(p, channels, values, positions, [&](int) { return c; });
    store(values, positions, p.out, p.x_dtype, at, p.out_steps.position);
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
    const Channels channels(p, sample);
    along ? rows(p, channels, x_at, out_at, positions) : columns(p, channels, x_at, out_at, positions);
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
