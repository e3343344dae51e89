// CUDA and HIP kernels for group_norm_silu.
//
// Two passes, each over enough blocks to fill the GPU even for one sample of a few groups: the first leaves count,
// mean and squares for each part of a group, the second normalises. Where the positions of a channel are neighbours
// in memory (planes) the blocks of the second pass merge the few parts of their group; where the channels of a
// position are (pixels) a block has many groups of many parts, which a small kernel merges in between.
//
// Values are taken relative to the first element of their group, so that a mean far from zero costs no accuracy.
#include "../common/gpu_samples.h"
#include "group_norm.h"
#include "group_norm_config.h"

namespace diffkern {
namespace {

struct Statistics {
  float count;
  float mean;
  float squares;  // sum of squares around the mean

  __device__ __forceinline__ void merge(const Statistics& other) {
    const float total = count + other.count;
    const float share = total > 0.0f ? other.count / total : 0.0f;
    const float delta = other.mean - mean;
    mean += delta * share;
    squares += other.squares + delta * delta * (count * share);
    count = total;
  }
};

// Merges over the block, which has kGroupThreads threads; the result is that of thread 0.
__device__ __forceinline__ Statistics block_merge(Statistics mine, Statistics* waves) {
  const auto merge_lanes = [](Statistics value) {
#pragma unroll
    for (int mask = kWaveSize / 2; mask > 0; mask /= 2) {
      value.merge({shuffle_xor(value.count, mask), shuffle_xor(value.mean, mask), shuffle_xor(value.squares, mask)});
    }
    return value;
  };
  mine = merge_lanes(mine);
  if (threadIdx.x % kWaveSize == 0) waves[threadIdx.x / kWaveSize] = mine;
  __syncthreads();
  if (threadIdx.x >= kWaveSize) return mine;
  return merge_lanes(threadIdx.x < kGroupThreads / kWaveSize ? waves[threadIdx.x] : Statistics{0.0f, 0.0f, 0.0f});
}

__device__ __forceinline__ float* partial_of(const GroupNormParams& p, int64_t sample, int64_t group) {
  return static_cast<float*>(p.partials) + (sample * p.groups + group) * p.parts * 3;
}

__device__ __forceinline__ void write(float* to, const Statistics& value) {
  to[0] = value.count;
  to[1] = value.mean;
  to[2] = value.squares;
}

struct Normaliser {
  float mean;  // relative to the first element of the group
  float rate;
};

// Merges the parts of a group. All threads of a wave take part, and all have the result. The loop is unrolled if
// the most parts there may be are known to be few.
template <int64_t kMaxParts>
__device__ __forceinline__ Normaliser normaliser_of(const GroupNormParams& p, int64_t sample, int64_t group) {
  const float* partials = partial_of(p, sample, group);
  const int lane = threadIdx.x % kWaveSize;
  const auto each = [&](auto&& body) {
    constexpr int kUnroll = kMaxParts <= kMaxPlaneParts ? static_cast<int>(kMaxParts) / kWaveSize : 1;
#pragma unroll kUnroll
    for (int first = 0; first < kMaxParts; first += kWaveSize) {
      const int part = first + lane;
      if (part < p.parts) body(Statistics{partials[part * 3], partials[part * 3 + 1], partials[part * 3 + 2]});
    }
  };
  float count = 0.0f;
  float sum = 0.0f;
  each([&](const Statistics& part) {
    count += part.count;
    sum += part.count * part.mean;
  });
  count = group_sum<kWaveSize>(count);
  const float mean = group_sum<kWaveSize>(sum) / count;
  float squares = 0.0f;
  each([&](const Statistics& part) {
    const float delta = part.mean - mean;
    squares += part.squares + part.count * delta * delta;
  });
  return {mean, rsqrtf(group_sum<kWaveSize>(squares) / count + p.eps)};
}

// kCount neighbours as they are in memory; a single element is held as a float.
template <typename T, int kCount>
struct Held {
  uint4 packet;
  __device__ __forceinline__ void load(const T* from) { packet = load_once(from); }
  __device__ __forceinline__ void unpack_to(float* to) const { unpack<T>(packet, to); }
};

template <typename T>
struct Held<T, 1> {
  float value;
  __device__ __forceinline__ void load(const T* from) { value = to_float(*from); }
  __device__ __forceinline__ void unpack_to(float* to) const { to[0] = value; }
};

template <typename T, int kCount>
__device__ __forceinline__ void store(const float* from, T* to) {
  if constexpr (kCount == 1) {
    *to = from_float<T>(from[0]);
  } else {
    *reinterpret_cast<uint4*>(to) = pack_packet<T>(from);
  }
}

// --- planes --------------------------------------------------------------------------------------------

// Which block does what: kernels of planes have a row of blocks for each sample and group.
struct GroupBlock {
  int64_t sample;
  int64_t group;
  int64_t part;
};

__device__ __forceinline__ GroupBlock group_block(const GroupNormParams& p, uint32_t index, uint32_t parts) {
  const uint32_t row = index / parts;
  const uint32_t sample = row / static_cast<uint32_t>(p.groups);
  return {sample, row - sample * static_cast<uint32_t>(p.groups), index - row * parts};
}

// One part of one group. A group is one run of kCount-element items where its channels follow each other without
// a gap (items_per_channel covers all of it), else items_per_channel of them and a step.
template <typename T, int kCount>
__global__ void __launch_bounds__(kGroupThreads) planes_statistics(const GroupNormParams p, const uint32_t items,
                                                                   const uint32_t items_per_channel) {
  __shared__ Statistics waves[kMaxWaves];
  const uint32_t parts = static_cast<uint32_t>(p.parts);
  const GroupBlock block = group_block(p, blockIdx.x, parts);
  const int64_t first_channel = block.group * (p.shape.channels / p.groups);
  const T* x = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, block.sample) +
               first_channel * p.x_steps.channel;
  const float pivot = to_float(*x);
  const uint32_t begin = static_cast<uint32_t>(static_cast<uint64_t>(items) * block.part / parts);
  const uint32_t end = static_cast<uint32_t>(static_cast<uint64_t>(items) * (block.part + 1) / parts);

  Statistics mine{0.0f, 0.0f, 0.0f};
  for (uint32_t at = begin + threadIdx.x; at < end; at += kGroupThreads * kSumPackets) {
    Held<T, kCount> held[kSumPackets];
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      const uint32_t item = at + i * kGroupThreads;
      if (item >= end) continue;
      const uint32_t channel = items_per_channel == items ? 0 : item / items_per_channel;
      held[i].load(x + channel * p.x_steps.channel + static_cast<int64_t>(item - channel * items_per_channel) * kCount);
    }
    // Sum, mean, and sum of squares around it, of what is held; then merge.
    float values[kSumPackets][kCount];
    float sum = 0.0f;
    float count = 0.0f;
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      if (at + i * kGroupThreads >= end) continue;
      held[i].unpack_to(values[i]);
      count += kCount;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        values[i][j] -= pivot;
        sum += values[i][j];
      }
    }
    Statistics batch{count, sum / count, 0.0f};
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      if (at + i * kGroupThreads >= end) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float centred = values[i][j] - batch.mean;
        batch.squares += centred * centred;
      }
    }
    mine.merge(batch);
  }
  mine = block_merge(mine, waves);
  if (threadIdx.x == 0) write(partial_of(p, block.sample, block.group) + block.part * 3, mine);
}

// kNormPackets items per thread of one group.
template <typename T, int kCount>
__global__ void __launch_bounds__(kGroupThreads)
    planes_normalise(const GroupNormParams p, const uint32_t items, const uint32_t items_per_channel,
                     const uint32_t blocks_per_group) {
  // Backwards: what the first pass read last is still in the cache.
  const GroupBlock block = group_block(p, gridDim.x - 1 - blockIdx.x, blocks_per_group);
  const int64_t first_channel = block.group * (p.shape.channels / p.groups);
  const T* x = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, block.sample) +
               first_channel * p.x_steps.channel;
  T* out = static_cast<T*>(p.out) + sample_offset(p.shape, p.out_steps, block.sample) +
           first_channel * p.out_steps.channel;
  const uint32_t begin = static_cast<uint32_t>(block.part) * (kGroupThreads * kNormPackets) + threadIdx.x;

  Held<T, kCount> held[kNormPackets];
#pragma unroll
  for (int i = 0; i < kNormPackets; ++i) {
    const uint32_t item = begin + i * kGroupThreads;
    if (item >= items) continue;
    const uint32_t channel = item / items_per_channel;
    held[i].load(x + channel * p.x_steps.channel + static_cast<int64_t>(item - channel * items_per_channel) * kCount);
  }
  const float pivot = to_float(*x);
  const Normaliser norm = normaliser_of<kMaxPlaneParts>(p, block.sample, block.group);
#pragma unroll
  for (int i = 0; i < kNormPackets; ++i) {
    const uint32_t item = begin + i * kGroupThreads;
    if (item >= items) continue;
    const uint32_t channel = item / items_per_channel;
    const float factor = norm.rate * parameter(p.weight, p.weight_dtype, first_channel + channel, 1.0f);
    const float offset = parameter(p.bias, p.bias_dtype, first_channel + channel, 0.0f);
    float values[kCount];
    held[i].unpack_to(values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      values[j] = ((values[j] - pivot) - norm.mean) * factor + offset;
      if (p.silu) values[j] = silu<T>(values[j]);
    }
    store<T, kCount>(values, out + channel * p.out_steps.channel +
                                 static_cast<int64_t>(item - channel * items_per_channel) * kCount);
  }
}

// --- pixels --------------------------------------------------------------------------------------------

// A block takes a tile of channels, whole groups of them: `width` threads side by side take kCount channels each,
// `height` of those rows take one position each.
struct PixelTile {
  int groups;    // of a tile
  int channels;  // of a tile
  int width;
  int height;
  int tiles;  // of a sample
};

struct PixelBlock {
  int64_t sample;
  int64_t tile;
  int64_t part;
};

__device__ __forceinline__ PixelBlock pixel_block(const PixelTile& t, uint32_t index, uint32_t parts) {
  const uint32_t row = index / parts;
  const uint32_t sample = row / static_cast<uint32_t>(t.tiles);
  return {sample, row - sample * static_cast<uint32_t>(t.tiles), index - row * parts};
}

// One part of the positions for all groups of a tile.
template <typename T, int kCount>
__global__ void __launch_bounds__(kGroupThreads) pixels_statistics(const GroupNormParams p, const PixelTile t) {
  __shared__ float counts[kGroupThreads];
  __shared__ float means[kGroupThreads * kCount];
  __shared__ float squares[kGroupThreads * kCount];
  const PixelBlock block = pixel_block(t, blockIdx.x, static_cast<uint32_t>(p.parts));
  const int of_group = t.channels / t.groups;
  const int column = threadIdx.x % t.width;
  const int row = threadIdx.x / t.width;
  const T* sample = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, block.sample);
  const T* tile = sample + block.tile * t.channels;
  const T* x = tile + column * kCount;
  const int64_t begin = p.shape.positions * block.part / p.parts;
  const int64_t end = row < t.height ? p.shape.positions * (block.part + 1) / p.parts : begin;

  float pivots[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const int channel = column * kCount + j;
    pivots[j] = to_float(tile[channel - channel % of_group]);
  }
  float count = 0.0f;
  float mean[kCount] = {};
  float square[kCount] = {};
  for (int64_t at = begin + row; at < end; at += static_cast<int64_t>(t.height) * kSumPackets) {
    Held<T, kCount> held[kSumPackets];
    float here = 0.0f;
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      const int64_t position = at + i * t.height;
      if (position >= end) continue;
      held[i].load(x + position * p.x_steps.position);
      here += 1.0f;
    }
    float values[kSumPackets][kCount];
    float sums[kCount] = {};
#pragma unroll
    for (int i = 0; i < kSumPackets; ++i) {
      if (at + i * t.height >= end) continue;
      held[i].unpack_to(values[i]);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        values[i][j] -= pivots[j];
        sums[j] += values[i][j];
      }
    }
    const float total = count + here;
    const float part = 1.0f / here;
    const float share = here / total;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float batch_mean = sums[j] * part;
#pragma unroll
      for (int i = 0; i < kSumPackets; ++i) {
        if (at + i * t.height >= end) continue;
        const float centred = values[i][j] - batch_mean;
        square[j] += centred * centred;
      }
      const float delta = batch_mean - mean[j];
      mean[j] += delta * share;
      square[j] += delta * delta * (count * share);
    }
    count = total;
  }

  // Over the rows of the block, as a tree. Threads past the last row have counted nothing.
  counts[threadIdx.x] = count;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    means[threadIdx.x * kCount + j] = mean[j];
    squares[threadIdx.x * kCount + j] = square[j];
  }
  int rows = 1;
  while (rows < t.height) rows *= 2;
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half && row + half < t.height) {
      const int mine = threadIdx.x;
      const int other = threadIdx.x + half * t.width;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        Statistics value{counts[mine], means[mine * kCount + j], squares[mine * kCount + j]};
        value.merge({counts[other], means[other * kCount + j], squares[other * kCount + j]});
        means[mine * kCount + j] = value.mean;
        squares[mine * kCount + j] = value.squares;
      }
      counts[mine] += counts[other];
    }
  }
  __syncthreads();
  // Over the channels of each group, all of which have counted the same positions.
  if (threadIdx.x < static_cast<unsigned>(t.groups)) {
    const int first = threadIdx.x * of_group;
    float sum = 0.0f;
    for (int c = 0; c < of_group; ++c) sum += means[first + c];
    const float positions = counts[0];
    const float group_mean = sum / static_cast<float>(of_group);
    Statistics all{positions * static_cast<float>(of_group), group_mean, 0.0f};
    for (int c = 0; c < of_group; ++c) {
      const float delta = means[first + c] - group_mean;
      all.squares += squares[first + c] + positions * delta * delta;
    }
    const int64_t group = block.tile * t.groups + threadIdx.x;
    write(partial_of(p, block.sample, group) + block.part * 3, all);
  }
}

// Leaves mean and 1 / deviation in the place of a group's first part; a wave for each group.
__global__ void __launch_bounds__(kGroupThreads) merge_parts(const GroupNormParams p) {
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x) / kWaveSize;
  if (group >= p.shape.samples * p.groups) return;
  const Normaliser norm = normaliser_of<kMaxPixelParts>(p, 0, group);
  if (threadIdx.x % kWaveSize != 0) return;
  float* to = partial_of(p, 0, group);
  to[0] = norm.mean;
  to[1] = norm.rate;
}

// kNormRounds * kNormPackets positions per thread, for all groups of a tile.
template <typename T, int kCount>
__global__ void __launch_bounds__(kGroupThreads)
    pixels_normalise(const GroupNormParams p, const PixelTile t, const uint32_t blocks_per_tile) {
  const PixelBlock block = pixel_block(t, gridDim.x - 1 - blockIdx.x, blocks_per_tile);
  const int of_group = t.channels / t.groups;
  const int column = threadIdx.x % t.width;
  const int row = threadIdx.x / t.width;
  if (row >= t.height) return;
  const int64_t first_channel = block.tile * t.channels;
  const T* tile = static_cast<const T*>(p.x) + sample_offset(p.shape, p.x_steps, block.sample) + first_channel;
  T* out = static_cast<T*>(p.out) + sample_offset(p.shape, p.out_steps, block.sample) + first_channel + column * kCount;

  float pivots[kCount], means[kCount], factors[kCount], offsets[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const int channel = column * kCount + j;
    const int group = channel / of_group;
    pivots[j] = to_float(tile[group * of_group]);
    const float* norm = partial_of(p, block.sample, block.tile * t.groups + group);
    means[j] = norm[0];
    factors[j] = norm[1] * parameter(p.weight, p.weight_dtype, first_channel + channel, 1.0f);
    offsets[j] = parameter(p.bias, p.bias_dtype, first_channel + channel, 0.0f);
  }
  int64_t at = block.part * (static_cast<int64_t>(t.height) * kNormPackets * kNormRounds) + row;
#pragma unroll 1
  for (int round = 0; round < kNormRounds; ++round, at += static_cast<int64_t>(t.height) * kNormPackets) {
    Held<T, kCount> held[kNormPackets];
#pragma unroll
    for (int i = 0; i < kNormPackets; ++i) {
      const int64_t position = at + i * t.height;
      if (position < p.shape.positions) held[i].load(tile + column * kCount + position * p.x_steps.position);
    }
#pragma unroll
    for (int i = 0; i < kNormPackets; ++i) {
      const int64_t position = at + i * t.height;
      if (position >= p.shape.positions) continue;
      float values[kCount];
      held[i].unpack_to(values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        values[j] = ((values[j] - pivots[j]) - means[j]) * factors[j] + offsets[j];
        if (p.silu) values[j] = silu<T>(values[j]);
      }
      store<T, kCount>(values, out + position * p.out_steps.position);
    }
  }
}

// --- launches ------------------------------------------------------------------------------------------

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The plan of the planes kernels. Statistics may walk several channels as one run.
struct PlanePlan {
  bool sum_packets;   // whether the statistics can be read in packets of 16 bytes
  bool norm_packets;  // the same for input and output of the second pass
  bool run;           // whether a group is one run
  int64_t group_size;
};

PlanePlan plan_planes(const GroupNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  const int64_t of_group = p.shape.channels / p.groups;
  const Steps& x = p.x_steps;
  const Steps& out = p.out_steps;
  PlanePlan plan{};
  plan.group_size = of_group * p.shape.positions;
  plan.run = of_group == 1 || x.channel == p.shape.positions;
  const bool x_fits = aligned(p.x) && all_multiples(count, x.batch, x.frame);
  plan.sum_packets = x_fits && (plan.run ? all_multiples(count, plan.group_size, of_group * x.channel)
                                         : all_multiples(count, p.shape.positions, x.channel));
  plan.norm_packets = x_fits && aligned(p.out) &&
                      all_multiples(count, p.shape.positions, x.channel, out.batch, out.frame, out.channel);
  return plan;
}

template <typename T, int kCount>
void launch_planes_statistics(const GroupNormParams& p, const PlanePlan& plan, GpuStream stream) {
  const int64_t items = plan.group_size / kCount;
  const int64_t per_channel = plan.run ? items : p.shape.positions / kCount;
  const int64_t blocks = p.shape.samples * p.groups * p.parts;
  planes_statistics<T, kCount><<<static_cast<unsigned>(blocks), kGroupThreads, 0, stream>>>(
      p, static_cast<uint32_t>(items), static_cast<uint32_t>(per_channel));
}

template <typename T, int kCount>
void launch_planes_normalise(const GroupNormParams& p, const PlanePlan& plan, GpuStream stream) {
  const int64_t items = plan.group_size / kCount;
  const int64_t per_group = ceil_div(items, kGroupThreads * kNormPackets);
  planes_normalise<T, kCount>
      <<<static_cast<unsigned>(p.shape.samples * p.groups * per_group), kGroupThreads, 0, stream>>>(
          p, static_cast<uint32_t>(items), static_cast<uint32_t>(p.shape.positions / kCount),
          static_cast<uint32_t>(per_group));
}

// The tile for kCount channels per thread; width 0 if there is none.
PixelTile plan_pixels(const GroupNormParams& p, int count) {
  const int64_t of_group = p.shape.channels / p.groups;
  int64_t groups = 1;
  while (groups < p.groups && (groups * of_group % count != 0 || p.groups % groups != 0)) ++groups;
  if (groups * of_group % count != 0 || groups * of_group / count > kGroupThreads) return {};
  while (p.groups % (2 * groups) == 0 && 2 * groups <= kTileGroups &&
         2 * groups * of_group / count <= kTilePackets) {
    groups *= 2;
  }
  const int width = static_cast<int>(groups * of_group / count);
  return {static_cast<int>(groups), static_cast<int>(groups * of_group), width, kGroupThreads / width,
          static_cast<int>(p.groups / groups)};
}

bool pixels_in_packets(const GroupNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  const Steps& x = p.x_steps;
  const Steps& out = p.out_steps;
  return aligned(p.x) && aligned(p.out) &&
         all_multiples(count, x.batch, x.frame, x.position, out.batch, out.frame, out.position) &&
         plan_pixels(p, static_cast<int>(count)).width != 0;
}

template <typename T, int kCount>
void launch_pixels(const GroupNormParams& p, GpuStream stream) {
  const PixelTile tile = plan_pixels(p, kCount);
  const int64_t rows = p.shape.samples * tile.tiles;
  const int64_t per_tile = ceil_div(p.shape.positions, static_cast<int64_t>(tile.height) * kNormPackets * kNormRounds);
  pixels_statistics<T, kCount><<<static_cast<unsigned>(rows * p.parts), kGroupThreads, 0, stream>>>(p, tile);
  // The host does not know the size of a wave; the wider one makes enough of them.
  merge_parts<<<static_cast<unsigned>(ceil_div(p.shape.samples * p.groups, kGroupThreads / kWaveMultiple)), kGroupThreads,
                0, stream>>>(p);
  pixels_normalise<T, kCount><<<static_cast<unsigned>(rows * per_tile), kGroupThreads, 0, stream>>>(
      p, tile, static_cast<uint32_t>(per_tile));
}

template <typename T>
void launch(const GroupNormParams& p, GpuStream stream) {
  constexpr int kCount = kPacketSize<T>;
  if (channels_are_neighbours(p.x_steps, p.out_steps)) {
    pixels_in_packets(p) ? launch_pixels<T, kCount>(p, stream) : launch_pixels<T, 1>(p, stream);
    return;
  }
  const PlanePlan plan = plan_planes(p);
  plan.sum_packets ? launch_planes_statistics<T, kCount>(p, plan, stream)
                   : launch_planes_statistics<T, 1>(p, plan, stream);
  plan.norm_packets ? launch_planes_normalise<T, kCount>(p, plan, stream)
                    : launch_planes_normalise<T, 1>(p, plan, stream);
}

}  // namespace

bool group_norm_gpu_fits(const GroupNormParams& p) {
  constexpr int64_t kMost = 0x7fffffff;  // items of a group, and blocks
  if (channels_are_neighbours(p.x_steps, p.out_steps)) return pixels_in_packets(p) || plan_pixels(p, 1).width != 0;
  return p.x_steps.position == 1 && p.out_steps.position == 1 &&
         p.shape.channels / p.groups * p.shape.positions <= kMost;
}

int group_norm_gpu(const GroupNormParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  with_element(p.x_dtype, [&](auto element) { launch<decltype(element)>(p, stream); });
  return last_launch_error();
}

}  // namespace diffkern
