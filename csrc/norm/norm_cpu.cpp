// CPU kernels for rms_norm and layer_norm, compiled once per instruction set (DIFFKERN_CPU_LEVEL).
//
// Rows are walked in short chunks that are widened to float32 in a buffer of the first-level cache, so
// that each step is one plain loop over floats, whatever the dtypes are.
#include <algorithm>
#include <cmath>

#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "norm.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

constexpr int kTileRows = 64;   // rows normalised together when the normalised dimension is strided
constexpr int kFlushEvery = 64; // float32 additions in a row before a sum moves on to float64

// How x becomes the normalised value: ((x - mean) - mean_rest) * scale. What rounding left out of the mean
// comes to light as the mean of x - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean = 0.0f;
  float mean_rest = 0.0f;
  float scale = 0.0f;
};

float scale_of(const NormParams& p, double sum_of_squares) {
  const double size = static_cast<double>(p.size);
  if (p.clamp_eps) {
    const double length = std::sqrt(sum_of_squares);
    const double bound = p.eps;
    return static_cast<float>(std::sqrt(size) / (length < bound ? bound : length));  // lets NaN through
  }
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / size + static_cast<double>(p.eps)));
}

// Sets the scale, and the rest of the mean, from the sums over x - mean.
void finish(const NormParams& p, Sums sums, Normaliser* norm) {
  if (p.layer_norm) {
    const double rest = sums.plain / static_cast<double>(p.size);
    norm->mean_rest = static_cast<float>(rest);
    sums.squares -= rest * sums.plain;
  }
  norm->scale = scale_of(p, sums.squares);
}

// --- rows along contiguous memory ----------------------------------------------------------------------

void norm_row(const NormParams& p, RowOffsets row) {
  alignas(64) float buffer[kChunk];
  alignas(64) float others[kChunk];
  const auto each_chunk = [&](auto&& body) {
    for (int64_t at = 0; at < p.size; at += kChunk) {
      const int n = static_cast<int>(std::min<int64_t>(kChunk, p.size - at));
      body(at, n, floats(p.x, p.x_dtype, row.x + at, 1, n, buffer));
    }
  };

  Normaliser norm;
  Sums sums;
  if (p.layer_norm) {
    each_chunk([&](int64_t, int n, const float* x) { accumulate<false>(x, n, 0.0f, &sums); });
    norm.mean = static_cast<float>(sums.plain / static_cast<double>(p.size));
    sums = Sums{};
  }
  each_chunk([&](int64_t, int n, const float* x) { accumulate(x, n, norm.mean, &sums); });
  finish(p, sums, &norm);

  const float mean = norm.mean, rest = norm.mean_rest, scale = norm.scale, offset = p.weight_offset;
  each_chunk([&](int64_t at, int n, const float* x) {
    float* values = room(p.out, p.out_dtype, row.out + at, 1, buffer);
    each(n, [&](int i) { values[i] = ((x[i] - mean) - rest) * scale; });
    round_to(p.round_dtype, values, n);
    if (p.weight != nullptr) {
      const float* weight = floats(p.weight, p.weight_dtype, at, 1, n, others);
      each(n, [&](int i) { values[i] *= weight[i] + offset; });
    }
    if (p.bias != nullptr) {
      if (p.round_dtype != Dtype::kNone) round_to(p.out_dtype, values, n);
      const float* bias = floats(p.bias, p.bias_dtype, at, 1, n, others);
      each(n, [&](int i) { values[i] += bias[i]; });
    }
    store(values, n, p.out, p.out_dtype, row.out + at, 1);
  });
}

// --- rows across memory: a tile of neighbouring rows, one element of each at a time ---------------------

// Sums over x - mean, for each row of the tile.
void sum_tile(const NormParams& p, RowOffsets tile, int rows, const Normaliser* norms, Sums* sums) {
  float means[kTileRows];
  float values[kTileRows];
  for (int r = 0; r < rows; ++r) means[r] = norms[r].mean;
  std::fill_n(sums, rows, Sums{});
  for (int64_t begin = 0; begin < p.size; begin += kFlushEvery) {
    const int64_t end = std::min(begin + kFlushEvery, p.size);
    float plain[kTileRows] = {};
    float squares[kTileRows] = {};
    for (int64_t i = begin; i < end; ++i) {
      load(p.x, p.x_dtype, tile.x + i * p.x_stride, p.map.x_strides[0], rows, values);
      for (int r = 0; r < rows; ++r) {
        const float centred = values[r] - means[r];
        plain[r] += centred;
        squares[r] += centred * centred;
      }
    }
    for (int r = 0; r < rows; ++r) {
      sums[r].plain += plain[r];
      sums[r].squares += squares[r];
    }
  }
}

void norm_tile(const NormParams& p, RowOffsets tile, int rows) {
  Normaliser norms[kTileRows];
  Sums sums[kTileRows];
  sum_tile(p, tile, rows, norms, sums);
  if (p.layer_norm) {
    for (int r = 0; r < rows; ++r) norms[r].mean = static_cast<float>(sums[r].plain / static_cast<double>(p.size));
    sum_tile(p, tile, rows, norms, sums);
  }
  float means[kTileRows];
  float mean_rests[kTileRows];
  float scales[kTileRows];
  for (int r = 0; r < rows; ++r) {
    finish(p, sums[r], &norms[r]);
    means[r] = norms[r].mean;
    mean_rests[r] = norms[r].mean_rest;
    scales[r] = norms[r].scale;
  }

  float values[kTileRows];
  for (int64_t i = 0; i < p.size; ++i) {
    load(p.x, p.x_dtype, tile.x + i * p.x_stride, p.map.x_strides[0], rows, values);
    for (int r = 0; r < rows; ++r) values[r] = ((values[r] - means[r]) - mean_rests[r]) * scales[r];
    round_to(p.round_dtype, values, rows);
    if (p.weight != nullptr) {
      float weight;
      load(p.weight, p.weight_dtype, i, 1, 1, &weight);
      weight += p.weight_offset;
      for (int r = 0; r < rows; ++r) values[r] *= weight;
    }
    if (p.bias != nullptr) {
      if (p.round_dtype != Dtype::kNone) round_to(p.out_dtype, values, rows);
      float bias;
      load(p.bias, p.bias_dtype, i, 1, 1, &bias);
      for (int r = 0; r < rows; ++r) values[r] += bias;
    }
    store(values, rows, p.out, p.out_dtype, tile.out + i * p.out_stride, p.map.out_strides[0]);
  }
}

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void norm_cpu(const NormParams& p, int64_t begin, int64_t end) {
  if (p.x_stride == 1 && p.out_stride == 1) {
    for (int64_t row = begin; row < end; ++row) norm_row(p, locate(p.map, row));
    return;
  }
  const int64_t run = p.map.sizes[0];  // rows that are equally spaced
  for (int64_t row = begin; row < end;) {
    const int64_t rows = std::min({static_cast<int64_t>(kTileRows), run - row % run, end - row});
    norm_tile(p, locate(p.map, row), static_cast<int>(rows));
    row += rows;
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
