// The kernel for groups that fit the shared memory of a whole GPU: reads the input once.
//
// All blocks are on the GPU at once. In every round they take some units (groups; or whole samples where channels are
// neighbours) into shared memory, tile by tile, leave statistics, wait for each other, and write the normalised tiles.
// Tiles of the next rounds are on their way all the time; where there is room for two rounds, the statistics of the
// next one are computed before the wait for this one.
//
// What a tile contributes does not depend on which block has it, so that results do not depend on the batch.
#pragma once

#include "../common/gpu_samples.h"
#include "group_norm.h"
#include "group_norm_config.h"
#include "group_norm_coefficients.h"

#if !DIFFKERN_HIP

#include <cooperative_groups.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

namespace diffkern {
namespace {

struct ResidentPlan {
  uint32_t unit;   // elements of a unit
  uint32_t tile;   // elements of a tile; the last one of a unit may have fewer
  uint32_t tiles;  // of a unit
  uint32_t units;
  uint32_t round;  // units of a round
  uint32_t slots;  // tiles that a block has room for
  bool ahead;      // whether there is room for two rounds

  __host__ __device__ __forceinline__ uint32_t rounds() const { return (units + round - 1) / round; }
  __host__ __device__ __forceinline__ uint32_t elements(uint32_t part) const {
    return part + 1 < tiles ? tile : unit - part * tile;
  }
  __host__ __device__ __forceinline__ uint32_t round_tiles(uint32_t number) const {
    const uint32_t left = units - number * round;
    return (left < round ? left : round) * tiles;
  }
  // The first tile that a block has of so many.
  __host__ __device__ __forceinline__ static uint32_t share(uint32_t count, uint32_t block, uint32_t blocks) {
    return static_cast<uint32_t>(static_cast<uint64_t>(count) * block / blocks);
  }
};

constexpr int kMaxSlots = 16;
constexpr int kMaxResidentGroups = 256;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Counts bytes that arrive in shared memory; completes a phase when as many have come as were expected.
class ArrivalBarrier {
 public:
  __device__ __forceinline__ void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
  }
  // Makes initialised barriers known to the copy engine.
  __device__ __forceinline__ static void publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

  // Has `bytes`, a multiple of 16, copied to shared memory. By one thread.
  __device__ __forceinline__ void copy(void* to, const void* from, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(bytes), "r"(address())
                 : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    uint32_t done;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(address()), "r"(parity)
          : "memory");
    } while (done == 0);
  }

 private:
  __device__ __forceinline__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&state_));
  }
  uint64_t state_;
};

// A walk over the tiles of this block, round after round.
struct TileCursor {
  uint32_t round;
  uint32_t tile;  // of the round
  uint32_t end;   // of this block's tiles in the round
  uint32_t count; // tiles passed so far

  __device__ __forceinline__ void enter(const ResidentPlan& plan) {
    while (round < plan.rounds()) {
      const uint32_t all = plan.round_tiles(round);
      tile = plan.share(all, blockIdx.x, gridDim.x);
      end = plan.share(all, blockIdx.x + 1, gridDim.x);
      if (tile < end) return;
      ++round;
    }
  }
  __device__ __forceinline__ void next(const ResidentPlan& plan) {
    ++count;
    if (++tile < end) return;
    ++round;
    enter(plan);
  }
};

// Sums around the first value that a thread sees: robust as long as these are few, where a single pivot for all
// would lose digits if it were far from the rest.
struct PivotSums {
  float pivot;
  float sum = 0.0f;
  float squares = 0.0f;

  __device__ __forceinline__ void add(float value) {
    value -= pivot;
    sum += value;
    squares = fmaf(value, value, squares);
  }
  // With the mean relative to `centre`.
  __device__ __forceinline__ Statistics statistics(float count, float centre) const {
    if (count == 0.0f) return {0.0f, 0.0f, 0.0f};
    const float mean = sum / count;
    const float around = squares - sum * mean;
    return {count, pivot - centre + mean, around < 0.0f ? 0.0f : around};  // lets NaN through
  }
};

// Merges over aligned groups of kLanes lanes; the result is that of every lane.
template <int kLanes>
__device__ __forceinline__ Statistics lanes_merge(const Statistics& mine) {
  const float2 sums = group_sum<kLanes>(float2{mine.count, mine.count * mine.mean});
  const float mean = sums.x > 0.0f ? sums.y / sums.x : 0.0f;
  const float delta = mine.mean - mean;
  return {sums.x, mean, group_sum<kLanes>(mine.squares + mine.count * delta * delta)};
}

// Merges the parts of a group: parts[i] is the mean and the squares of count(i) elements. All lanes of a wave take
// part, and all have the result.
template <typename Count>
__device__ __forceinline__ Statistics merge_all(const float2* parts, uint32_t number, Count&& count) {
  const float first = __ldcg(parts).x;
  float elements = 0.0f;
  float2 sums{0.0f, 0.0f};
#pragma unroll 8
  for (uint32_t i = threadIdx.x % kWaveSize; i < number; i += kWaveSize) {
    const float2 part = __ldcg(parts + i);
    const float own = count(i);
    const float delta = part.x - first;
    elements += own;
    sums.x += own * delta;
    sums.y += part.y + own * delta * delta;
  }
  elements = group_sum<kWaveSize>(elements);
  sums = group_sum<kWaveSize>(sums);
  const float rest = sums.x / elements;
  return {elements, first + rest, sums.y - sums.x * rest};
}

#endif  // __CUDA_ARCH__ >= 900

// kPixels: units are samples whose channels are neighbours, read kChunk elements of a group at once. Otherwise they
// are groups, each one run.
template <typename T, bool kPixels, int kChunk, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    resident_kernel(const GroupNormParams p, const ResidentPlan plan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kCount = kPacketSize<T>;
  constexpr int kWaves = kThreads / kWaveSize;
  extern __shared__ __align__(128) unsigned char tiles_memory[];
  __shared__ ArrivalBarrier arrivals[kMaxSlots];
  __shared__ Statistics scratch[kPixels ? kThreads : kMaxSlots * kWaves];
  __shared__ Normaliser norms[kPixels ? kMaxResidentGroups : kMaxSlots];

  const auto grid = cooperative_groups::this_grid();
  const uint32_t groups = static_cast<uint32_t>(p.groups);
  const uint32_t of_group = static_cast<uint32_t>(p.shape.channels) / groups;
  const uint32_t positions = static_cast<uint32_t>(p.shape.positions);
  const uint32_t wave = threadIdx.x / kWaveSize;
  const uint32_t lane = threadIdx.x % kWaveSize;
  const uint32_t rounds = plan.rounds();
  float2* const partials = static_cast<float2*>(p.partials);

  const auto offset_of = [&](const Steps& steps, uint32_t unit) {
    if constexpr (kPixels) return sample_offset(p.shape, steps, unit);
    const uint32_t sample = unit / groups;
    return sample_offset(p.shape, steps, sample) + static_cast<int64_t>((unit - sample * groups) * of_group) * steps.channel;
  };
  const auto unit_of = [&](const TileCursor& at) { return at.round * plan.round + at.tile / plan.tiles; };
  const auto slot_of = [&](const TileCursor& at) { return at.count % plan.slots; };
  const auto data_of = [&](const TileCursor& at) {
    return reinterpret_cast<const T*>(tiles_memory) + static_cast<size_t>(slot_of(at)) * plan.tile;
  };

  TileCursor start{0, 0, 0, 0};
  start.enter(plan);
  TileCursor loading = start;  // of thread 0
  const auto load_next = [&] {
    if (loading.round >= rounds) return;
    const uint32_t part = loading.tile % plan.tiles;
    const T* from = static_cast<const T*>(p.x) + offset_of(p.x_steps, unit_of(loading)) + part * plan.tile;
    arrivals[slot_of(loading)].copy(const_cast<T*>(data_of(loading)), from,
                                    plan.elements(part) * static_cast<uint32_t>(sizeof(T)));
    loading.next(plan);
  };
  if (threadIdx.x == 0) {
    for (uint32_t slot = 0; slot < plan.slots; ++slot) arrivals[slot].init();
    ArrivalBarrier::publish();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t slot = 0; slot < plan.slots; ++slot) load_next();
  }

  TileCursor reading = start;  // statistics have been left of all before
  const auto statistics = [&](uint32_t round) {
    if constexpr (kPixels) {
      const uint32_t rows = kThreads / groups;
      const uint32_t group = threadIdx.x % groups;
      const uint32_t row = threadIdx.x / groups;
      const float centre = to_float(static_cast<const T*>(p.x)[offset_of(p.x_steps, round) + group * of_group]);
      float count = 0.0f;
      PivotSums sums{0.0f};
      for (; reading.round == round; reading.next(plan)) {
        arrivals[slot_of(reading)].wait(reading.count / plan.slots & 1);
        const uint32_t here = plan.elements(reading.tile) / (of_group * groups);
        const T* data = data_of(reading) + group * of_group;
        if (row >= rows) continue;
        if (count == 0.0f && row < here) sums.pivot = to_float(data[row * of_group * groups]);
        for (uint32_t position = row; position < here; position += rows) {
          const T* from = data + position * of_group * groups;
          for (uint32_t c = 0; c < of_group; c += kChunk) {
            float values[kChunk];
            load_chunk<T, kChunk>(from + c, values);
#pragma unroll
            for (int j = 0; j < kChunk; ++j) sums.add(values[j]);
          }
          count += static_cast<float>(of_group);
        }
      }
      scratch[threadIdx.x] = sums.statistics(count, centre);
      __syncthreads();
      if (threadIdx.x < groups) {
        Statistics all = scratch[threadIdx.x];
        for (uint32_t r = 1; r < rows; ++r) all.merge(scratch[r * groups + threadIdx.x]);
        partials[(static_cast<size_t>(round) * groups + threadIdx.x) * gridDim.x + blockIdx.x] = {all.mean, all.squares};
      }
    } else {
      const uint32_t begin = reading.tile;
      uint32_t number = 0;
      for (; reading.round == round; reading.next(plan), ++number) {
        const float centre = to_float(static_cast<const T*>(p.x)[offset_of(p.x_steps, unit_of(reading))]);
        arrivals[slot_of(reading)].wait(reading.count / plan.slots & 1);
        const uint32_t packets = plan.elements(reading.tile % plan.tiles) / kCount;
        const T* data = data_of(reading);
        float count = 0.0f;
        PivotSums sums{threadIdx.x < packets ? to_float(data[threadIdx.x * kCount]) : 0.0f};
#pragma unroll 4
        for (uint32_t packet = threadIdx.x; packet < packets; packet += kThreads) {
          float values[kCount];
          unpack<T>(*reinterpret_cast<const uint4*>(data + packet * kCount), values);
#pragma unroll
          for (int j = 0; j < kCount; ++j) sums.add(values[j]);
          count += kCount;
        }
        const Statistics all = lanes_merge<kWaveSize>(sums.statistics(count, centre));
        if (lane == 0) scratch[number * kWaves + wave] = all;
      }
      __syncthreads();
      for (uint32_t i = wave; i < number; i += kWaves) {
        const Statistics all = lanes_merge<kWaves>(scratch[i * kWaves + lane % kWaves]);
        const uint32_t tile = begin + i;
        if (lane == 0) partials[static_cast<size_t>(round) * plan.round * plan.tiles + tile] = {all.mean, all.squares};
      }
    }
  };

  TileCursor writing = start;  // all before have been written
  const auto finish = [&](uint32_t round) {
    if (writing.round != round) return;  // nothing of it is here
    // After a tile has been written, its place is free for the next.
    const auto each_tile = [&](auto&& body) {
      for (; writing.round == round; writing.next(plan)) {
        body(data_of(writing));
        __syncthreads();
        if (threadIdx.x == 0) load_next();
      }
    };
    const auto normaliser = [&](uint32_t unit, uint32_t group, const Statistics& all) {
      const float pivot = to_float(static_cast<const T*>(p.x)[offset_of(p.x_steps, unit) + group * of_group]);
      return Normaliser(p, pivot, all.mean, all.squares / all.count);
    };
    if constexpr (kPixels) {
      const uint32_t tile_positions = plan.tile / (of_group * groups);
      for (uint32_t group = wave; group < groups; group += kWaves) {
        const float2* parts = partials + (static_cast<size_t>(round) * groups + group) * gridDim.x;
        const Statistics all = merge_all(parts, gridDim.x, [&](uint32_t block) {
          const uint32_t begin = plan.share(plan.tiles, block, gridDim.x) * tile_positions;
          const uint32_t end = plan.share(plan.tiles, block + 1, gridDim.x) * tile_positions;
          return static_cast<float>((min(end, positions) - begin) * of_group);
        });
        if (lane == 0) norms[group] = normaliser(round, group, all);
      }
      __syncthreads();
      const uint32_t width = of_group * groups / kCount;
      const uint32_t height = kThreads / width;
      const uint32_t column = threadIdx.x % width;
      const uint32_t row = threadIdx.x / width;
      Coefficients<T> coefficients[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint32_t channel = column * kCount + j;
        coefficients[j] = Coefficients<T>(p, norms[channel / of_group], channel);
      }
      T* out = static_cast<T*>(p.out) + offset_of(p.out_steps, round) + column * kCount;
      each_tile([&](const T* data) {
        const uint32_t first = writing.tile * tile_positions;
        const uint32_t here = min(tile_positions, positions - first);
        for (uint32_t position = row < height ? row : here; position < here; position += height) {
          float values[kCount];
          unpack<T>(*reinterpret_cast<const uint4*>(data + (position * width + column) * kCount), values);
#pragma unroll
          for (int j = 0; j < kCount; ++j) values[j] = coefficients[j](values[j]);
          if (p.silu) {
#pragma unroll
            for (int j = 0; j < kCount; ++j) values[j] = silu<T>(values[j]);
          }
          *reinterpret_cast<uint4*>(out + static_cast<int64_t>(first + position) * p.out_steps.position) =
              pack_packet<T>(values);
        }
      });
    } else {
      const uint32_t first_unit = writing.tile / plan.tiles;
      const uint32_t last_unit = (writing.end - 1) / plan.tiles;
      for (uint32_t i = wave; i <= last_unit - first_unit; i += kWaves) {
        const uint32_t unit = round * plan.round + first_unit + i;
        const Statistics all = merge_all(partials + static_cast<size_t>(unit) * plan.tiles, plan.tiles,
                                         [&](uint32_t part) { return static_cast<float>(plan.elements(part)); });
        if (lane == 0) norms[i] = normaliser(unit, 0, all);
      }
      __syncthreads();
      const uint32_t per_channel = positions / kCount;
      each_tile([&](const T* data) {
        const uint32_t unit = unit_of(writing);
        const uint32_t part = writing.tile % plan.tiles;
        const uint32_t packets = plan.elements(part) / kCount;
        const uint32_t first = part * plan.tile / kCount;
        const uint32_t first_channel = unit % groups * of_group;
        const Normaliser norm = norms[writing.tile / plan.tiles - first_unit];
        T* out = static_cast<T*>(p.out) + offset_of(p.out_steps, unit) + first * kCount;
        const uint32_t channel = first / per_channel;
        const bool one_channel = (first + packets - 1) / per_channel == channel;
        Coefficients<T> coefficients(p, norm, first_channel + channel);
#pragma unroll 4
        for (uint32_t packet = threadIdx.x; packet < packets; packet += kThreads) {
          if (!one_channel) coefficients = Coefficients<T>(p, norm, first_channel + (first + packet) / per_channel);
          float values[kCount];
          unpack<T>(*reinterpret_cast<const uint4*>(data + packet * kCount), values);
#pragma unroll
          for (int j = 0; j < kCount; ++j) values[j] = coefficients(values[j]);
          if (p.silu) {
#pragma unroll
            for (int j = 0; j < kCount; ++j) values[j] = silu<T>(values[j]);
          }
          *reinterpret_cast<uint4*>(out + packet * kCount) = pack_packet<T>(values);
        }
      });
    }
  };

  if (plan.ahead) {
    statistics(0);
    for (uint32_t round = 0; round < rounds; ++round) {
      auto token = grid.barrier_arrive();
      if (round > 0) finish(round - 1);
      if (round + 1 < rounds) statistics(round + 1);
      grid.barrier_wait(static_cast<decltype(token)&&>(token));
    }
    finish(rounds - 1);
  } else {
    for (uint32_t round = 0; round < rounds; ++round) {
      statistics(round);
      grid.sync();
      finish(round);
    }
  }
#endif
}

// --- launches ------------------------------------------------------------------------------------------

constexpr int kMaxDevices = 64;
constexpr int kMinTileBytes = 8192;
constexpr int64_t kMostUnitBytes = int64_t{1} << 27;  // no GPU has as much shared memory
constexpr int64_t kMostBlocks = 1024;

// What the partial statistics of the resident kernel take, whatever its plan is.
inline int64_t resident_floats(const GroupNormParams& p) {
  const int64_t sample = p.shape.channels * p.shape.positions * bytes_of(p.x_dtype);
  if (channels_are_neighbours(p.x_steps, p.out_steps)) {
    return sample > kMostUnitBytes ? 0 : p.shape.samples * p.groups * kMostBlocks * 2;
  }
  const int64_t group = sample / p.groups;
  return group > kMostUnitBytes ? 0 : p.shape.samples * p.groups * ceil_div(group, kMinTileBytes) * 2;
}

// How many blocks of a kernel the current device holds at once, and how many tiles each; blocks 0 if it does not run
// there.
struct Room {
  int blocks;
  int slots;
};

template <auto kKernel>
Room measure_room(int device, const ResidentConfig& config) {
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
  };
  cudaFuncAttributes own{};
  if (attribute(cudaDevAttrComputeCapabilityMajor) < 9 || attribute(cudaDevAttrCooperativeLaunch) == 0 ||
      cudaFuncGetAttributes(&own, kKernel) != cudaSuccess || own.ptxVersion < 90) {
    return {0, 0};
  }
  constexpr int kReserved = 1024;  // of each block, by the driver
  const int fixed = static_cast<int>(own.sharedSizeBytes);
  const int most = std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - fixed,
                            attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / config.blocks - kReserved - fixed);
  const int slots = std::min(most / config.tile_bytes, kMaxSlots);
  if (slots < 1) return {0, 0};
  const int bytes = slots * config.tile_bytes;
  int blocks = 0;
  if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, config.threads, bytes) != cudaSuccess) {
    return {0, 0};
  }
  const int64_t all = int64_t{std::min(blocks, config.blocks)} * attribute(cudaDevAttrMultiProcessorCount);
  return {static_cast<int>(std::min(all, kMostBlocks)), slots};
}

template <auto kKernel>
Room room_for(int device, const ResidentConfig& config) {
  static std::mutex mutex;
  static Room rooms[kMaxDevices];
  static bool known[kMaxDevices];
  const std::lock_guard<std::mutex> lock(mutex);
  if (!known[device]) {
    rooms[device] = measure_room<kKernel>(device, config);
    static_cast<void>(cudaGetLastError());
    known[device] = true;
  }
  return rooms[device];
}

// The plan of a call; slots 0 if its units do not fit.
inline ResidentPlan make_plan(const GroupNormParams& p, bool pixels, const Room& room, int64_t tile_elements) {
  const int64_t sample = p.shape.channels * p.shape.positions;
  const int64_t unit = pixels ? sample : sample / p.groups;
  const int64_t units = pixels ? p.shape.samples : p.shape.samples * p.groups;
  const int64_t tile = pixels ? tile_elements / p.shape.channels * p.shape.channels : tile_elements;
  ResidentPlan plan{};
  if (tile == 0 || room.blocks == 0 || units > UINT32_MAX) return plan;
  const int64_t tiles = ceil_div(unit, tile);
  const int64_t all = int64_t{room.blocks} * room.slots;
  if (tiles > all) return plan;
  const int64_t half = int64_t{room.blocks} * (room.slots / 2);
  int64_t round = 1;
  bool ahead = tiles <= half && units > 1;
  if (!pixels) {
    if (tiles * units <= all) {
      round = units;
      ahead = false;
    } else if (ahead) {
      round = half / tiles;
      round = ceil_div(units, ceil_div(units, round));
    }
#if defined(DIFFKERN_BENCH)
    if (const char* chosen = std::getenv("DIFFKERN_GROUP_ROUND")) {
      round = std::min<int64_t>({std::atoi(chosen), all / tiles, units});
      ahead = round * tiles <= half && round < units;
    }
#endif
  }
  plan.unit = static_cast<uint32_t>(unit);
  plan.tile = static_cast<uint32_t>(tile);
  plan.tiles = static_cast<uint32_t>(tiles);
  plan.units = static_cast<uint32_t>(units);
  plan.round = static_cast<uint32_t>(round);
  plan.slots = static_cast<uint32_t>(room.slots);
  plan.ahead = ahead;
  return plan;
}

template <typename T, bool kPixels, int kChunk, int kThreads, int kBlocks, int kTileBytes>
bool try_resident(const GroupNormParams& p, GpuStream stream) {
  constexpr auto kKernel = resident_kernel<T, kPixels, kChunk, kThreads, kBlocks>;
  constexpr ResidentConfig config{kThreads, kBlocks, kTileBytes};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  const Room room = room_for<resident_kernel<T, kPixels, kChunk, kThreads, kBlocks>>(device, config);
  const ResidentPlan plan = make_plan(p, kPixels, room, kTileBytes / static_cast<int64_t>(sizeof(T)));
  if (plan.slots == 0) return false;
  const unsigned blocks = std::min(static_cast<unsigned>(room.blocks), plan.round_tiles(0));
  void* arguments[] = {const_cast<GroupNormParams*>(&p), const_cast<ResidentPlan*>(&plan)};
  const cudaError_t error = cudaLaunchCooperativeKernel(kKernel, dim3(blocks), dim3(kThreads), arguments,
                                                        static_cast<size_t>(plan.slots) * kTileBytes, stream);
  if (error != cudaErrorCooperativeLaunchTooLarge) return true;
  static_cast<void>(cudaGetLastError());  // part of the device is not ours: two passes need no such room
  return false;
}

template <typename T, int kThreads, int kBlocks, int kTileBytes>
bool try_pixels(const GroupNormParams& p, GpuStream stream) {
  const int64_t of_group = p.shape.channels / p.groups;
  if (p.groups > std::min(kMaxResidentGroups, kThreads) || p.shape.channels / kPacketSize<T> > kThreads) return false;
  if (of_group % kPacketSize<T> == 0) {
    return try_resident<T, true, kPacketSize<T>, kThreads, kBlocks, kTileBytes>(p, stream);
  }
  if (sizeof(T) < 4 && of_group % 4 == 0) return try_resident<T, true, 4, kThreads, kBlocks, kTileBytes>(p, stream);
  if (of_group % 2 == 0) return try_resident<T, true, 2, kThreads, kBlocks, kTileBytes>(p, stream);
  return try_resident<T, true, 1, kThreads, kBlocks, kTileBytes>(p, stream);
}

// Whether units are runs of whole packets.
inline bool units_are_runs(const GroupNormParams& p, bool pixels) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  const Steps& x = p.x_steps;
  const Steps& out = p.out_steps;
  if (!aligned(p.x) || !aligned(p.out) || !all_multiples(count, x.batch, x.frame, out.batch, out.frame)) return false;
  if (pixels) {
    return x.position == p.shape.channels && all_multiples(count, p.shape.channels, out.position);
  }
  const bool one = p.shape.channels == p.groups;
  const auto dense = [&](const Steps& steps) { return one || steps.channel == p.shape.positions; };
  return x.position == 1 && out.position == 1 && dense(x) && dense(out) &&
         all_multiples(count, p.shape.positions, x.channel, out.channel);
}

#if defined(DIFFKERN_BENCH)
template <typename T, int... kIndices>
bool try_config(const GroupNormParams& p, bool pixels, int index, std::integer_sequence<int, kIndices...>,
                         GpuStream stream) {
  bool done = false;
  const auto take = [&](auto number) {
    constexpr ResidentConfig config = kResidentConfigs[decltype(number)::value];
    done = pixels ? try_pixels<T, config.threads, config.blocks, config.tile_bytes>(p, stream)
                  : try_resident<T, false, 1, config.threads, config.blocks, config.tile_bytes>(p, stream);
  };
  ((index == kIndices ? take(std::integral_constant<int, kIndices>{}) : void()), ...);
  return done;
}
#endif

// Takes the resident kernel if it can have this call.
template <typename T>
bool launch_resident(const GroupNormParams& p, GpuStream stream) {
  const bool pixels = channels_are_neighbours(p.x_steps, p.out_steps);
  if (!units_are_runs(p, pixels)) return false;
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_GROUP_CONFIG")) {
    const int index = std::atoi(chosen);
    return index >= 0 && 
           try_config<T>(p, pixels, index, std::make_integer_sequence<int, std::size(kResidentConfigs)>{}, stream);
  }
#endif
  return pixels ? try_pixels<T, kResidentPixels.threads, kResidentPixels.blocks, kResidentPixels.tile_bytes>(p, stream)
                : try_resident<T, false, 1, kResidentPlanes.threads, kResidentPlanes.blocks,
                               kResidentPlanes.tile_bytes>(p, stream);
}

}  // namespace
}  // namespace diffkern

#endif  // !DIFFKERN_HIP
