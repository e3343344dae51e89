// CPU kernels for group_norm_silu, compiled once per instruction set (DIFFKERN_CPU_LEVEL).
//
// Values are widened to float32 in short runs that fit the first-level cache; what is summed up over many of them is
// kept in float64.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../common/cpu_activation.h"
#include "../common/cpu_elements.h"
#include "../common/cpu_sums.h"
#include "group_norm.h"

#ifndef DIFFKERN_CPU_LEVEL
#define DIFFKERN_CPU_LEVEL baseline
#endif

namespace diffkern {
namespace {

// How many values there are, their mean, and the sum of squares around it.
struct Statistics {
  double count = 0.0;
  double mean = 0.0;
  double squares = 0.0;

  void merge(const Statistics& other) {
    if (other.count == 0.0) return;
    const double total = count + other.count;
    const double delta = other.mean - mean;
    mean += delta * (other.count / total);
    squares += other.squares + delta * delta * (count * other.count / total);
    count = total;
  }
};

Statistics* partial_of(const GroupNormParams& p, int64_t sample, int64_t group) {
  return static_cast<Statistics*>(p.partials) + (sample * p.groups + group) * p.parts;
}

// The share of `part` out of `size`, as begin and end.
struct Range {
  int64_t begin;
  int64_t end;
};

Range share(int64_t size, int64_t parts, int64_t part) { return {size * part / parts, size * (part + 1) / parts}; }

// (x - mean) - mean_rest: what rounding left out of the mean would otherwise shift the whole group.
struct Normaliser {
  float mean;
  float mean_rest;
  double rate;
};

// What is added to a channel before the norm: it moves the mean of its values, and nothing else.
double added(const GroupNormParams& p, int64_t sample, int64_t channel) {
  return p.add == nullptr ? 0.0 : parameter(p.add, p.add_dtype, add_offset(p, sample, channel), 0.0f);
}

// For a channel of the group, after the parts have been merged into the first one.
Normaliser normaliser_of(const GroupNormParams& p, int64_t sample, int64_t group, int64_t channel) {
  const Statistics& all = *partial_of(p, sample, group);
  const double of_channel = all.mean - added(p, sample, channel);
  const float mean = static_cast<float>(of_channel);
  return {mean, static_cast<float>(of_channel - static_cast<double>(mean)),
          1.0 / std::sqrt(all.squares / all.count + static_cast<double>(p.eps))};
}

// --- groups, channel after channel ----------------------------------------------------------------------

// Calls body(channel of the group, position, n) for runs of a part, each within a channel.
template <typename Body>
void each_run(const GroupNormParams& p, int64_t part, Body&& body) {
  const int64_t positions = p.shape.positions;
  const Range range = share(p.shape.channels / p.groups * positions, p.parts, part);
  for (int64_t at = range.begin; at < range.end;) {
    const int64_t position = at % positions;
    const int64_t n = std::min({static_cast<int64_t>(kChunk), positions - position, range.end - at});
    body(at / positions, position, static_cast<int>(n));
    at += n;
  }
}

Statistics statistics_of(const float* values, int n) {
  Sums sums;
  accumulate<false>(values, n, 0.0f, &sums);
  Statistics result{static_cast<double>(n), sums.plain / n, 0.0};
  const float mean = static_cast<float>(result.mean);
  sums = Sums{};
  accumulate(values, n, mean, &sums);
  const double rest = sums.plain / n;
  result.mean = static_cast<double>(mean) + rest;
  result.squares = sums.squares - rest * sums.plain;
  return result;
}

void planes_statistics(const GroupNormParams& p, int64_t sample, int64_t group, int64_t part) {
  alignas(64) float values[kChunk];
  const int64_t channels = p.shape.channels / p.groups;
  const int64_t base = sample_offset(p.shape, p.x_steps, sample) + group * channels * p.x_steps.channel;
  Statistics sum;
  each_run(p, part, [&](int64_t channel, int64_t position, int n) {
    const int64_t at = base + channel * p.x_steps.channel + position * p.x_steps.position;
    Statistics run = statistics_of(floats(p.x, p.x_dtype, at, p.x_steps.position, n, values), n);
    run.mean += added(p, sample, group * channels + channel);
    sum.merge(run);
  });
  partial_of(p, sample, group)[part] = sum;
}

void planes_normalise(const GroupNormParams& p, int64_t sample, int64_t group, int64_t part) {
  alignas(64) float buffer[kChunk];
  const int64_t first = group * (p.shape.channels / p.groups);
  const int64_t x_base = sample_offset(p.shape, p.x_steps, sample);
  const int64_t out_base = sample_offset(p.shape, p.out_steps, sample);
  Normaliser norm{};
  int64_t channel = -1;
  each_run(p, part, [&](int64_t in_group, int64_t position, int n) {
    if (first + in_group != channel) norm = normaliser_of(p, sample, group, channel = first + in_group);
    const int64_t x_at = x_base + channel * p.x_steps.channel + position * p.x_steps.position;
    const int64_t out_at = out_base + channel * p.out_steps.channel + position * p.out_steps.position;
    const float* x = floats(p.x, p.x_dtype, x_at, p.x_steps.position, n, buffer);
    float* values = room(p.out, p.x_dtype, out_at, p.out_steps.position, buffer);
    const float mean = norm.mean, rest = norm.mean_rest;
    const float factor = static_cast<float>(norm.rate * parameter(p.weight, p.weight_dtype, channel, 1.0f));
    const float offset = parameter(p.bias, p.bias_dtype, channel, 0.0f);
    each(n, [&](int i) { values[i] = ((x[i] - mean) - rest) * factor + offset; });
    if (p.silu) apply_silu(values, n);
    store(values, n, p.out, p.x_dtype, out_at, p.out_steps.position);
  });
}

// --- groups, position after position, all channels at once ----------------------------------------------

constexpr int kBatch = 16;  // positions that are summed up in float32

void pixels_statistics(const GroupNormParams& p, int64_t sample, int64_t part) {
  alignas(64) float values[kBatch][kChunk];
  const Range range = share(p.shape.positions, p.parts, part);
  const int64_t base = sample_offset(p.shape, p.x_steps, sample);
  std::vector<Statistics> channels(p.shape.channels);
  for (int64_t first = 0; first < p.shape.channels; first += kChunk) {
    const int width = static_cast<int>(std::min<int64_t>(kChunk, p.shape.channels - first));
    for (int64_t position = range.begin; position < range.end; position += kBatch) {
      const int n = static_cast<int>(std::min<int64_t>(kBatch, range.end - position));
      alignas(64) float means[kChunk] = {};
      alignas(64) float squares[kChunk] = {};
      for (int i = 0; i < n; ++i) {
        load(p.x, p.x_dtype, base + (position + i) * p.x_steps.position + first, 1, width, values[i]);
        for (int c = 0; c < width; ++c) means[c] += values[i][c];
      }
      for (int c = 0; c < width; ++c) means[c] /= static_cast<float>(n);
      alignas(64) float rests[kChunk] = {};
      for (int i = 0; i < n; ++i) {
        for (int c = 0; c < width; ++c) {
          const float centred = values[i][c] - means[c];
          rests[c] += centred;
          squares[c] += centred * centred;
        }
      }
      for (int c = 0; c < width; ++c) {
        const double rest = static_cast<double>(rests[c]) / n;
        channels[first + c].merge({static_cast<double>(n), means[c] + rest, squares[c] - rest * rests[c]});
      }
    }
  }
  const int64_t of_group = p.shape.channels / p.groups;
  for (int64_t group = 0; group < p.groups; ++group) {
    Statistics sum;
    for (int64_t c = group * of_group; c < (group + 1) * of_group; ++c) {
      channels[c].mean += added(p, sample, c);
      sum.merge(channels[c]);
    }
    partial_of(p, sample, group)[part] = sum;
  }
}

void pixels_normalise(const GroupNormParams& p, int64_t sample, int64_t part) {
  alignas(64) float buffer[kChunk];
  alignas(64) float means[kChunk], rests[kChunk], factors[kChunk], offsets[kChunk];
  const Range range = share(p.shape.positions, p.parts, part);
  const int64_t of_group = p.shape.channels / p.groups;
  const int64_t x_base = sample_offset(p.shape, p.x_steps, sample);
  const int64_t out_base = sample_offset(p.shape, p.out_steps, sample);
  for (int64_t first = 0; first < p.shape.channels; first += kChunk) {
    const int width = static_cast<int>(std::min<int64_t>(kChunk, p.shape.channels - first));
    for (int c = 0; c < width; ++c) {
      const Normaliser norm = normaliser_of(p, sample, (first + c) / of_group, first + c);
      means[c] = norm.mean;
      rests[c] = norm.mean_rest;
      factors[c] = static_cast<float>(norm.rate * parameter(p.weight, p.weight_dtype, first + c, 1.0f));
      offsets[c] = parameter(p.bias, p.bias_dtype, first + c, 0.0f);
    }
    for (int64_t position = range.begin; position < range.end; ++position) {
      const float* x = floats(p.x, p.x_dtype, x_base + position * p.x_steps.position + first, 1, width, buffer);
      const int64_t out_at = out_base + position * p.out_steps.position + first;
      float* values = room(p.out, p.x_dtype, out_at, 1, buffer);
      each(width, [&](int c) { values[c] = ((x[c] - means[c]) - rests[c]) * factors[c] + offsets[c]; });
      if (p.silu) apply_silu(values, width);
      store(values, width, p.out, p.x_dtype, out_at, 1);
    }
  }
}

}  // namespace

namespace DIFFKERN_CPU_LEVEL {

void group_norm_statistics_cpu(const GroupNormParams& p, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = task % p.parts;
    const int64_t rest = task / p.parts;
    if (channels_are_neighbours(p.x_steps, p.out_steps)) {
      pixels_statistics(p, rest, part);
    } else {
      planes_statistics(p, rest / p.groups, rest % p.groups, part);
    }
  }
}

void group_norm_merge_cpu(const GroupNormParams& p) {
  for (int64_t i = 0; i < p.shape.samples * p.groups; ++i) {
    Statistics* partials = partial_of(p, 0, i);
    for (int64_t part = 1; part < p.parts; ++part) partials[0].merge(partials[part]);
  }
}

void group_norm_normalise_cpu(const GroupNormParams& p, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = task % p.parts;
    const int64_t rest = task / p.parts;
    if (channels_are_neighbours(p.x_steps, p.out_steps)) {
      pixels_normalise(p, rest, part);
    } else {
      planes_normalise(p, rest / p.groups, rest % p.groups, part);
    }
  }
}

}  // namespace DIFFKERN_CPU_LEVEL
}  // namespace diffkern
