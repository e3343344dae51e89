// One kernel, which reads again only what the shared memory of all multiprocessors could not hold.
//
// Each block, one for a multiprocessor, streams its parts through a ring of packets in shared memory, leaves their
// statistics, waits for all other blocks, and normalises backwards: what the ring still holds is not read again, and
// what has to be was read last. A thread waits for its own packets alone: no other thread reads or writes them.
#pragma once

#include "../common/gpu.h"

#if !DIFFKERN_HIP  // a ring needs copies that run by themselves

#include <cooperative_groups.h>

#include <algorithm>
#include <atomic>

#include "group_norm.h"
#include "group_norm_config.h"
#include "group_norm_resident_copies.h"
#include "group_norm_resident_pixels.h"
#include "group_norm_resident_planes.h"

namespace diffkern {
namespace {

// --- the kernel ----------------------------------------------------------------------------------------------

template <typename T, template <typename> class Layout>
__global__ void __launch_bounds__(kResidentThreads, 1)
    group_norm_resident(const GroupNormParams p, const typename Layout<T>::Plan plan, const uint32_t parts) {
#if __CUDA_ARCH__ >= 800
  using Task = Layout<T>;
  constexpr int kCount = kPacketSize<T>;
  constexpr int kBatches = kResidentSlots / kResidentBatch;
  constexpr int kBatchPackets = kResidentBatch * kResidentThreads;
  extern __shared__ uint4 packets[];
  auto& scratch = *reinterpret_cast<typename Task::Scratch*>(packets + kBatches * kBatchPackets);
  uint4* const ring = packets + threadIdx.x;
  const uint32_t share = parts / gridDim.x;
  const uint32_t longer = parts - share * gridDim.x;  // so many blocks have one part more
  const uint32_t first = blockIdx.x * share + min(blockIdx.x, longer);
  const uint32_t last = first + share + (blockIdx.x < longer ? 1 : 0);

  const int64_t x_stride = Task::stride(p, plan, p.x_steps);
  const int64_t out_stride = Task::stride(p, plan, p.out_steps);

  const auto copy_batch = [&](int slot, const T* from, int items) {
    uint4* const to = ring + slot * kBatchPackets;
#pragma unroll
    for (int i = 0; i < kResidentBatch; ++i) {
      if (i < items) begin_copy(to + i * kResidentThreads, from + i * x_stride);
    }
  };

  // Forwards, with the copies kBatches ahead.
  int slot = 0;
  {
    uint32_t ahead_part = first;
    Task ahead(p, plan, first);
    const auto copy_next = [&](int to) {
      while (ahead.items <= 0 && ++ahead_part < last) ahead = Task(p, plan, ahead_part);
      copy_batch(to, ahead.x, ahead.items);
      commit_copies();
      ahead.x += kResidentBatch * x_stride;
      ahead.items -= kResidentBatch;
    };
#pragma unroll 1
    for (int i = 0; i < kBatches; ++i) copy_next(i);
    ahead.prefetch_parameters(p, plan);
#pragma unroll 1
    for (uint32_t part = first; part < last; ++part) {
      const Task task(p, plan, part);
      typename Task::Sums sums;
      typename Task::Sums few;
#pragma unroll 1
      for (int item = 0; item < task.items; item += kResidentBatch) {
        wait_for_copies<kBatches - 1>();
        uint4 held[kResidentBatch];
#pragma unroll
        for (int i = 0; i < kResidentBatch; ++i) held[i] = ring[slot * kBatchPackets + i * kResidentThreads];
        copy_next(slot);
        slot = slot + 1 == kBatches ? 0 : slot + 1;
        if (item == 0) {
          sums.begin(p, plan, task, held[0]);
          few = sums;
        } else if (item % kBlockedSum == 0) {
          sums.take(few);
        }
#pragma unroll
        for (int i = 0; i < kResidentBatch; ++i) {
          if (item + i < task.items) few.add(p, plan, task, item + i, held[i]);
        }
      }
      sums.take(few);
      task.finish(p, plan, scratch, sums);
    }
  }
  cooperative_groups::this_grid().sync();

  // Backwards, with the copies kBatches behind.
  uint32_t behind_part = last;
  Task behind(p, plan, first);
  int behind_item = -1;
  int still_held = kBatches;
  const auto copy_next = [&](int to) {
    while (behind_item < 0 && behind_part > first) {
      behind = Task(p, plan, --behind_part);
      const int batches = (behind.items + kResidentBatch - 1) / kResidentBatch;
      const int held = min(still_held, batches);
      still_held -= held;
      behind_item = (batches - held - 1) * kResidentBatch;
      behind.x += behind_item * x_stride;
    }
    copy_batch(to, behind.x, behind_item < 0 ? 0 : behind.items - behind_item);
    commit_copies();
    behind.x -= kResidentBatch * x_stride;
    behind_item -= kResidentBatch;
  };
  typename Task::Norm norm;
  uint32_t prepared = 0;
#pragma unroll 1
  for (uint32_t part = last; part-- > first;) {
    const Task task(p, plan, part);
    if (part + 1 == last || task.norms(plan) != prepared) norm.prepare(p, plan, scratch, task);
    prepared = task.norms(plan);
    int item = (task.items + kResidentBatch - 1) / kResidentBatch * kResidentBatch;
    T* out = task.out + item * out_stride;
#pragma unroll 1
    while (item > 0) {
      item -= kResidentBatch;
      out -= kResidentBatch * out_stride;
      slot = slot == 0 ? kBatches - 1 : slot - 1;
      wait_for_copies<kBatches - 1>();
      uint4 held[kResidentBatch];
#pragma unroll
      for (int i = 0; i < kResidentBatch; ++i) held[i] = ring[slot * kBatchPackets + i * kResidentThreads];
      copy_next(slot);
#pragma unroll
      for (int i = 0; i < kResidentBatch; ++i) {
        if (item + i >= task.items) continue;
        float values[kCount];
        unpack<T>(held[i], values);
        norm.apply(p, plan, task, item + i, values);
        if (p.silu) {
#pragma unroll
          for (int j = 0; j < kCount; ++j) values[j] = silu<T>(values[j]);
        }
        // Past the caches, which hold what is still to be read.
        __stcs(reinterpret_cast<uint4*>(out + i * out_stride), pack_packet<T>(values));
      }
    }
  }
#endif
}

// --- launch --------------------------------------------------------------------------------------------------

// How many parts there are of all groups, or 0 where this kernel does not serve.
inline int64_t resident_parts(const GroupNormParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.x_dtype);
  const Steps& x = p.x_steps;
  const Steps& out = p.out_steps;
  if (!aligned(p.x) || !aligned(p.out) || !all_multiples(count, x.batch, x.frame, out.batch, out.frame)) return 0;
  if (channels_are_neighbours(x, out)) {
    if (!all_multiples(count, x.position, out.position)) return 0;
    const PixelPlan plan = plan_resident_pixels(p);
    const bool fits = plan.groups != 0 && plan.channels() <= count * kResidentThreads / 4;
    return !fits ? 0 : p.shape.samples * p.groups * plan.sum.number.value;
  }
  const bool gapless = p.shape.channels == 1 || (x.channel == p.shape.positions && out.channel == p.shape.positions);
  if (!gapless || !all_multiples(count, p.shape.positions)) return 0;
  return p.shape.samples * p.groups * plan_resident_planes(p).number.value;
}

constexpr int kMostDevices = 64;  // of a process, for which it is remembered what they can do

// The multiprocessors of the current device if their shared memory holds a block of so many bytes, else 0.
inline int processors_for(int device, int bytes) {
  int shared = 0;
  int together = 0;
  int processors = 0;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&together, cudaDevAttrCooperativeLaunch, device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return together != 0 && shared >= bytes ? processors : 0;
}

template <typename T, template <typename> class Layout>
bool launch_resident(const GroupNormParams& p, const typename Layout<T>::Plan& plan, int64_t parts,
                     GpuStream stream) {
  constexpr int kBytes = kResidentSlots * kResidentThreads * kPacketBytes + sizeof(typename Layout<T>::Scratch);
  const void* kernel = reinterpret_cast<const void*>(group_norm_resident<T, Layout>);
  static std::atomic<int> known[kMostDevices];  // multiprocessors and one
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return false;
  int processors = known[device].load(std::memory_order_relaxed) - 1;
  if (processors < 0) {
    processors = processors_for(device, kBytes);
    if (processors != 0 &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) != cudaSuccess) {
      processors = 0;
    }
    known[device].store(processors + 1, std::memory_order_relaxed);
  }
  if (processors == 0) return false;
  uint32_t number = static_cast<uint32_t>(parts);
  void* arguments[] = {const_cast<GroupNormParams*>(&p), const_cast<typename Layout<T>::Plan*>(&plan), &number};
  const dim3 blocks(static_cast<unsigned>(std::min<int64_t>(parts, processors)));
  if (cudaLaunchCooperativeKernel(kernel, blocks, dim3(kResidentThreads), arguments, kBytes, stream) == cudaSuccess) {
    return true;
  }
  cudaGetLastError();  // a share of a GPU may not hold all blocks at once: the other kernels do without
  return false;
}

// Whether the kernel has been launched.
template <typename T>
bool launch_resident(const GroupNormParams& p, GpuStream stream) {
  if (resident_parts(p) == 0) return false;
  if (channels_are_neighbours(p.x_steps, p.out_steps)) {
    const PixelPlan plan = plan_resident_pixels(p);
    const int64_t parts = p.shape.samples * plan.tiles.value * plan.sum.number.value;
    return launch_resident<T, ResidentPixels>(p, plan, parts, stream);
  }
  const PlaneParts plan = plan_resident_planes(p);
  return launch_resident<T, ResidentPlanes>(p, plan, p.shape.samples * p.groups * plan.number.value, stream);
}

inline int64_t resident_floats(const GroupNormParams& p) {
  return resident_parts(p) * static_cast<int64_t>(sizeof(Part) / sizeof(float));
}

}  // namespace
}  // namespace diffkern

#endif
