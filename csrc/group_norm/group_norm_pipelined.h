// One kernel that reads everything once: a team of blocks holds two groups, or tiles of channels, in its shared memory.
//
// A team is a cluster, or the whole grid where a group needs that much memory. Each of its blocks has one part of every
// group of the team, which go through a ring of packets in the order in which they are read: while the statistics of
// one are on their way from block to block, those of the next are summed up, and the one before is written. What has
// been written leaves its place to what is read next. A thread waits for its own packets alone, as in
// group_norm_resident.h.
#pragma once

#include "group_norm_resident.h"

#if !DIFFKERN_HIP

#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

namespace diffkern {
namespace {

template <typename Task>
constexpr int kRingPackets =
    (kSharedBytes - static_cast<int>(sizeof(typename Task::Scratch))) / (kResidentThreads * kPacketBytes);

// What an environment variable says in a build for benchmarks, else `usual`.
inline int group_choice([[maybe_unused]] const char* variable, int usual) {
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv(variable)) return std::atoi(chosen);
#endif
  return usual;
}

// Waits for all of the thread's copies but the last `later`, or a few more.
__device__ __forceinline__ void wait_for_all_but(int later) {
  if (later >= 24) return wait_for_copies<24>();
  if (later >= 20) return wait_for_copies<20>();
  if (later >= 16) return wait_for_copies<16>();
  if (later >= 12) return wait_for_copies<12>();
  if (later >= 10) return wait_for_copies<10>();
  if (later >= 8) return wait_for_copies<8>();
  if (later >= 6) return wait_for_copies<6>();
  if (later >= 4) return wait_for_copies<4>();
  if (later >= 2) return wait_for_copies<2>();
  wait_for_copies<0>();
}

// The barrier of a team: what a block has written before it arrives, the others can read once they have waited.
template <bool kCluster>
class TeamBarrier {
 public:
  __device__ __forceinline__ void arrive() {
    if constexpr (kCluster) {
      asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    } else {
      token_ = cooperative_groups::this_grid().barrier_arrive();
    }
  }

  __device__ __forceinline__ void wait() {
    if constexpr (kCluster) {
      asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    } else {
      cooperative_groups::this_grid().barrier_wait(std::move(token_));
    }
  }

 private:
  cooperative_groups::grid_group::arrival_token token_;
};

// `units` are the groups or tiles of all samples, whose parts each team's blocks take one by one.
template <typename T, template <typename> class Layout, bool kCluster>
__global__ void __launch_bounds__(kResidentThreads, 1)
    group_norm_pipelined(const GroupNormParams p, const typename Layout<T>::Plan plan, const uint32_t units,
                         const uint32_t team_blocks) {
#if __CUDA_ARCH__ >= 900
  using Task = Layout<T>;
  constexpr int kRing = kRingPackets<Task>;
  extern __shared__ uint4 packets[];
  auto& scratch = *reinterpret_cast<typename Task::Scratch*>(packets + kRing * kResidentThreads);
  uint4* const ring = packets + threadIdx.x;
  const uint32_t teams = gridDim.x / team_blocks;
  const uint32_t team = blockIdx.x / team_blocks;
  const uint32_t rank = blockIdx.x - team * team_blocks;
  const auto task_of = [&](uint32_t unit) { return Task(p, plan, unit * team_blocks + rank); };
  const auto after = [](int slot) { return slot + 1 == kRing ? 0 : slot + 1; };
  const int64_t x_stride = Task::stride(p, plan, p.x_steps);
  const int64_t out_stride = Task::stride(p, plan, p.out_steps);

  Task ahead = task_of(team);
  const int items = ahead.items;  // of this thread, the same in every unit
  ahead.prefetch_parameters(p, plan);
  uint32_t ahead_unit = team;
  int ahead_item = 0;
  const auto copy_next = [&](int slot) {
    if (ahead_unit < units && items > 0) {
      begin_copy(ring + slot * kResidentThreads, ahead.x);
      ahead.x += x_stride;
      if (++ahead_item == items) {
        ahead_item = 0;
        ahead_unit += teams;
        if (ahead_unit < units) ahead = task_of(ahead_unit);
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int slot = 0; slot < kRing; ++slot) copy_next(slot);

  // How many copies there are beyond those that have been summed up.
  int beyond = kRing;
  int sum_slot = 0;
  const auto sum_up = [&](uint32_t unit) {
    const Task task = task_of(unit);
    typename Task::Sums sums;
    typename Task::Sums few;
#pragma unroll 1
    for (int item = 0; item < items; item += kResidentBatch) {
      const int number = min(kResidentBatch, items - item);
      beyond -= number;
      wait_for_all_but(beyond);
      uint4 held[kResidentBatch];
#pragma unroll
      for (int i = 0; i < kResidentBatch; ++i) {
        if (i >= number) continue;
        held[i] = ring[sum_slot * kResidentThreads];
        sum_slot = after(sum_slot);
      }
      if (item == 0) {
        sums.begin(p, plan, task, held[0]);
        few = sums;
      } else if (item % kBlockedSum == 0) {
        sums.take(few);
      }
#pragma unroll
      for (int i = 0; i < kResidentBatch; ++i) {
        if (i < number) few.add(p, plan, task, item + i, held[i]);
      }
    }
    sums.take(few);
    task.finish(p, plan, scratch, sums);
  };

  TeamBarrier<kCluster> barrier;
  sum_up(team);
  barrier.arrive();
  int slot = 0;
#pragma unroll 1
  for (uint32_t unit = team; unit < units; unit += teams) {
    const bool more = unit + teams < units;
    if (more) sum_up(unit + teams);
    barrier.wait();
    if (more) barrier.arrive();
    const Task task = task_of(unit);
    typename Task::Norm norm;
    norm.prepare(p, plan, scratch, task);
    T* out = task.out;
#pragma unroll 1
    for (int item = 0; item < items; item += kResidentBatch) {
      uint4 held[kResidentBatch];
      const int begin = slot;
#pragma unroll
      for (int i = 0; i < kResidentBatch; ++i) {
        if (item + i >= items) continue;
        held[i] = ring[slot * kResidentThreads];
        slot = after(slot);
      }
      int free = begin;
#pragma unroll
      for (int i = 0; i < kResidentBatch; ++i, out += out_stride) {
        if (item + i >= items) continue;
        write_normalised<T>(p, plan, task, norm, item + i, held[i], out);
        copy_next(free);
        free = after(free);
      }
    }
    beyond += items;
  }
#endif
}

// --- launch --------------------------------------------------------------------------------------------------

// A team, or none where this kernel does not serve: it depends on the shape of a sample alone, as all statistics do.
struct Team {
  int blocks;
  bool cluster;
};

// For a unit of so many packets, of which a sample has `number`.
inline Team team_for(int64_t packets, int64_t number, int64_t ring) {
  const auto of_thread = [&](int64_t blocks) { return ceil_div(ceil_div(packets, blocks), kResidentThreads); };
  const int least = group_choice("DIFFKERN_GROUP_TEAM", 1);
  int64_t blocks = 1;
  while (blocks < kMostClusterBlocks && packets >= 2 * blocks * kResidentThreads &&
         (blocks < least || blocks * number < kFullGrid || of_thread(blocks) > ring / 2)) {
    blocks *= 2;
  }
  if (of_thread(blocks) <= ring / 2) return {static_cast<int>(blocks), true};
  const int64_t of_grid = of_thread(kGridTeam);
  return of_grid >= kLeastGridPackets && of_grid <= ring / 2 ? Team{kGridTeam, false} : Team{};
}

template <typename T>
Team pipelined_planes(const GroupNormParams& p, PlaneParts* plan) {
  const int64_t packets = p.shape.channels / p.groups * p.shape.positions / kPacketSize<T>;
  const Team team = team_for(packets, p.groups, kRingPackets<ResidentPlanes<T>>);
  if (team.blocks == 0) return team;
  *plan = split_planes(p, team.blocks);
  return plan->number.value == static_cast<uint32_t>(team.blocks) ? team : Team{};
}

// Only the grid is large enough for a tile of some width; it needs two of them to have something to do meanwhile.
template <typename T>
Team pipelined_pixels(const GroupNormParams& p, PixelPlan* plan) {
  PixelConfig config = kResidentPixels;
  config.tile = group_choice("DIFFKERN_GROUP_TILE", config.tile);
  *plan = plan_pixels(p, kPacketSize<T>, config);
  if (plan->groups == 0 || plan->tiles.value < 2) return {};
  plan->sum = split_positions(p.shape.positions, plan->height.value, kGridTeam, kResidentPixels.sum_positions);
  const int64_t of_thread = ceil_div(ceil_div(p.shape.positions, kGridTeam), plan->height.value);
  const bool fits = plan->sum.number.value == kGridTeam && of_thread >= kLeastGridPackets &&
                    of_thread <= kRingPackets<ResidentPixels<T>> / 2;
  return fits ? Team{kGridTeam, false} : Team{};
}

// How many teams the current device holds at once.
template <bool kCluster>
int teams_at_once(const void* kernel, cudaLaunchConfig_t config, int device) {
  int processors = processors_for(device, kernel, static_cast<int>(config.dynamicSmemBytes), 90);
  if (!kCluster) return processors >= kGridTeam ? 1 : 0;
  int clusters = 0;
  if (processors == 0 || cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess) return clusters;
  cudaGetLastError();
  return 0;
}

template <typename T, template <typename> class Layout, bool kCluster>
bool launch_pipelined(const GroupNormParams& p, const typename Layout<T>::Plan& plan, int64_t units, int blocks,
                      GpuStream stream) {
  constexpr int kRing = kRingPackets<Layout<T>>;
  const void* kernel = reinterpret_cast<const void*>(group_norm_pipelined<T, Layout, kCluster>);
  cudaLaunchAttribute attribute{};
  if constexpr (kCluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  } else {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kResidentThreads);
  config.dynamicSmemBytes = kRing * kResidentThreads * kPacketBytes + sizeof(typename Layout<T>::Scratch);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;

  static std::atomic<int> known[kMostDevices][kMostClusterBlocks + 1];  // teams and one, by the blocks of a cluster
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return false;
  std::atomic<int>& remembered = known[device][kCluster ? blocks : 0];
  int teams = remembered.load(std::memory_order_relaxed) - 1;
  if (teams < 0) {
    teams = teams_at_once<kCluster>(kernel, config, device);
    remembered.store(teams + 1, std::memory_order_relaxed);
  }
  if (teams == 0) return false;
  config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(units, teams) * blocks);
  uint32_t number = static_cast<uint32_t>(units);
  uint32_t team_blocks = static_cast<uint32_t>(blocks);
  void* arguments[] = {const_cast<GroupNormParams*>(&p), const_cast<typename Layout<T>::Plan*>(&plan), &number,
                       &team_blocks};
  if (cudaLaunchKernelExC(&config, kernel, arguments) == cudaSuccess) return true;
  cudaGetLastError();  // as for the resident kernel
  return false;
}

// Whether the kernel has been launched.
template <typename T>
bool launch_pipelined(const GroupNormParams& p, GpuStream stream) {
  if (resident_parts(p) == 0 || group_choice("DIFFKERN_GROUP_PIPELINED", 1) == 0) return false;
  if (channels_are_neighbours(p.x_steps, p.out_steps)) {
    PixelPlan plan;
    const Team team = pipelined_pixels<T>(p, &plan);
    const int64_t units = p.shape.samples * plan.tiles.value;
    return team.blocks != 0 && launch_pipelined<T, ResidentPixels, false>(p, plan, units, team.blocks, stream);
  }
  PlaneParts plan;
  const Team team = pipelined_planes<T>(p, &plan);
  const int64_t units = p.shape.samples * p.groups;
  if (team.blocks == 0) return false;
  return team.cluster ? launch_pipelined<T, ResidentPlanes, true>(p, plan, units, team.blocks, stream)
                      : launch_pipelined<T, ResidentPlanes, false>(p, plan, units, team.blocks, stream);
}

inline int64_t pipelined_floats(const GroupNormParams& p) {
  return p.shape.samples * p.groups * kGridTeam * static_cast<int64_t>(sizeof(Part) / sizeof(float));
}

}  // namespace
}  // namespace diffkern

#endif
