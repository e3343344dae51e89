// CPU kernels for add_norm_silu_pad, compiled once per instruction set (DIFFKERN_CPU_LEVEL).
#include <algorithm>
#include <cmath>
#include <vector>

#include "../common/cpu_activation.h"
#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "add_norm_silu_pad.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

// The parameters of channels, with which what is absent changes nothing.
struct Channels {
  std::vector<float> bias;
  std::vector<float> scale;  // 1 + scale
  std::vector<float> shift;

  Channels(const AddNormSiluPadParams& p, int64_t batch) {
    for (std::vector<float>* values : {&bias, &scale, &shift}) values->resize(p.shape.channels);
    for (int64_t c = 0; c < p.shape.channels; ++c) {
      const int64_t scale_at = batch * p.scale_steps[0] + c * p.scale_steps[1];
      const int64_t shift_at = batch * p.shift_steps[0] + c * p.shift_steps[1];
      bias[c] = parameter(p.bias, p.bias_dtype, c, 0.0f);
      scale[c] = 1.0f + parameter(p.scale, p.scale_dtype, scale_at, 0.0f);
      shift[c] = parameter(p.shift, p.shift_dtype, shift_at, 0.0f);
    }
  }
};

float factor_of(const AddNormSiluPadParams& p, double sum_of_squares) {
  if (!p.norm) return 1.0f;
  return static_cast<float>(
      1.0 / std::sqrt(sum_of_squares / static_cast<double>(p.shape.channels) + static_cast<double>(p.eps)));
}

// A tile: where its first position lies in each tensor.
struct Tile {
  int64_t x;
  int64_t residual;
  int64_t out;
  int64_t copies;
  int positions;
};

// n values of the sum, with steps of their own through x and the residual.
void load_sum(const AddNormSiluPadParams& p, int64_t x_at, int64_t x_step, int64_t residual_at, int64_t residual_step,
              int n, float* values) {
  load(p.x, p.x_dtype, x_at, x_step, n, values);
  if (p.residual == nullptr) return;
  alignas(64) float more[kChunk];
  load(p.residual, p.residual_dtype, residual_at, residual_step, n, more);
  for (int i = 0; i < n; ++i) values[i] += more[i];
}

void store_copies(const AddNormSiluPadParams& p, const Tile& tile, const float* values, int n, int64_t at,
                  int64_t step) {
  for (int64_t copy = 0; copy < tile.copies; ++copy) {
    store(values, n, p.out, p.x_dtype, tile.out + copy * p.out_steps.frame + at, step);
  }
}

// One position after the other, all its channels in a row.
void rows(const AddNormSiluPadParams& p, const Channels& channels, const Tile& tile) {
  const int64_t size = p.shape.channels;
  std::vector<float> row(size);
  for (int i = 0; i < tile.positions; ++i) {
    Sums sums;
    for (int64_t first = 0; first < size; first += kChunk) {
      const int n = static_cast<int>(std::min<int64_t>(kChunk, size - first));
      float* values = row.data() + first;
      load_sum(p, tile.x + i * p.x_steps.position + first * p.x_steps.channel, p.x_steps.channel,
               tile.residual + i * p.residual_steps.position + first * p.residual_steps.channel,
               p.residual_steps.channel, n, values);
      const float* bias = channels.bias.data() + first;
      each(n, [&](int j) { values[j] += bias[j]; });
      if (p.norm) accumulate(values, n, 0.0f, &sums);
    }
    const float factor = factor_of(p, sums.squares);
    for (int64_t first = 0; first < size; first += kChunk) {
      const int n = static_cast<int>(std::min<int64_t>(kChunk, size - first));
      float* values = row.data() + first;
      const float *scale = channels.scale.data() + first, *shift = channels.shift.data() + first;
      each(n, [&](int j) { values[j] = values[j] * factor * scale[j] + shift[j]; });
      if (p.silu) apply_silu(values, n);
      store_copies(p, tile, values, n, i * p.out_steps.position + first * p.out_steps.channel, p.out_steps.channel);
    }
  }
}

// One channel of all positions after the other.
void columns(const AddNormSiluPadParams& p, const Channels& channels, const Tile& tile) {
  constexpr int64_t kFlushEvery = 64;  // float32 additions before a sum moves on to float64
  std::vector<float> held(p.shape.channels * kPadTilePositions);
  double squares[kPadTilePositions] = {};
  for (int64_t first = 0; first < p.shape.channels; first += kFlushEvery) {
    alignas(64) float part[kPadTilePositions] = {};
    for (int64_t c = first; c < std::min(first + kFlushEvery, p.shape.channels); ++c) {
      float* values = held.data() + c * kPadTilePositions;
      load_sum(p, tile.x + c * p.x_steps.channel, p.x_steps.position, tile.residual + c * p.residual_steps.channel,
               p.residual_steps.position, tile.positions, values);
      for (int i = 0; i < tile.positions; ++i) {
        values[i] += channels.bias[c];
        part[i] += values[i] * values[i];
      }
    }
    for (int i = 0; i < tile.positions; ++i) squares[i] += part[i];
  }
  alignas(64) float factors[kPadTilePositions];
  for (int i = 0; i < tile.positions; ++i) factors[i] = factor_of(p, squares[i]);
  for (int64_t c = 0; c < p.shape.channels; ++c) {
    float* values = held.data() + c * kPadTilePositions;
    for (int i = 0; i < tile.positions; ++i) {
      values[i] = values[i] * factors[i] * channels.scale[c] + channels.shift[c];
    }
    if (p.silu) apply_silu(values, tile.positions);
    store_copies(p, tile, values, tile.positions, c * p.out_steps.channel, p.out_steps.position);
  }
}

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void add_norm_silu_pad_cpu(const AddNormSiluPadParams& p, int64_t begin, int64_t end) {
  const int64_t tiles = (p.shape.positions + kPadTilePositions - 1) / kPadTilePositions;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t sample = task / tiles;
    const int64_t first = task % tiles * kPadTilePositions;
    const Target target = target_of(p, sample);
    const Tile tile{sample_offset(p.shape, p.x_steps, sample) + first * p.x_steps.position,
                    sample_offset(p.shape, p.residual_steps, sample) + first * p.residual_steps.position,
                    target.offset + first * p.out_steps.position, target.copies,
                    static_cast<int>(std::min(kPadTilePositions, p.shape.positions - first))};
    const Channels channels(p, target.batch);
    channels_are_neighbours(p.x_steps, p.out_steps) ? rows(p, channels, tile) : columns(p, channels, tile);
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
