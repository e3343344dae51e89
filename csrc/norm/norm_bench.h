// Variants of the full kernel that a tuning build compares: ways to memory, shapes of blocks, blocks that walk over
// rows, and rows that arrive in shared memory by bulk copies. For bfloat16, with all parameters.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "norm_full_kernel.h"

namespace diffkern {
namespace {

enum BenchLoad : int { kLoadOnce, kLoadStreaming, kLoadPlain, kLoadWide, kLoadEvictFirst };
enum BenchStore : int { kStorePlain, kStoreStreaming, kStoreEvictFirst };

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <int kLoad, int kStore>
struct BenchAccess {
  static __device__ __forceinline__ uint4 load(const uint4* from) {
    uint4 packet;
    if constexpr (kLoad == kLoadOnce) {
      packet = load_once(from);
    } else if constexpr (kLoad == kLoadStreaming) {
      packet = __ldcs(from);
    } else if constexpr (kLoad == kLoadPlain) {
      packet = *from;
    } else if constexpr (kLoad == kLoadWide) {
      asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
          : "l"(from));
    } else {
      asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
          : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
          : "l"(from), "l"(evict_first_policy()));
    }
    return packet;
  }

  static __device__ __forceinline__ void store(uint4* to, const uint4& packet) {
    if constexpr (kStore == kStorePlain) {
      *to = packet;
    } else if constexpr (kStore == kStoreStreaming) {
      __stcs(to, packet);
    } else {
      asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(packet.x), "r"(packet.y),
                   "r"(packet.z), "r"(packet.w), "l"(evict_first_policy())
                   : "memory");
    }
  }
};

// Blocks that stay: the next row is on its way while this one's sums are made. per_block 0: rows at a distance of
// gridDim.x; else that many neighbours.
template <typename T, typename Call, int kPackets, int kThreads, typename Access>
__global__ void __launch_bounds__(kThreads) walking_kernel(const RegisterParams p, uint32_t per_block) {
  constexpr int kCount = kPacketSize<T>;
  using Sums = FullSums<T, Call::kLayerNorm, kPackets, kThreads>;
  __shared__ typename Sums::Shared shared[2];
  uint4 held[kPackets], next[kPackets], weights[kPackets], biases[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if constexpr (Call::kWeight) weights[i] = p.weight[threadIdx.x + i * kThreads];
    if constexpr (Call::kBias) biases[i] = p.bias[threadIdx.x + i * kThreads];
  }
  const uint32_t step = per_block == 0 ? gridDim.x : 1;
  uint32_t row = per_block == 0 ? blockIdx.x : blockIdx.x * per_block;
  const uint32_t end = per_block == 0 ? p.rows : min(p.rows, row + per_block);
  if (row >= end) return;
  const auto load = [&](uint32_t from, uint4(&to)[kPackets]) {
    const uint4* x = p.x + (full_offsets(p, from).of[kX] + threadIdx.x);
#pragma unroll
    for (int i = 0; i < kPackets; ++i) to[i] = Access::load(x + i * kThreads);
  };
  load(row, held);
  for (int turn = 0; row < end; row += step, turn ^= 1) {
    if (row + step < end) load(row + step, next);
    const FullNormaliser normaliser = Sums::of(held, p.inverse_size, p.eps, shared[turn]);
    uint4* out = p.out + (full_offsets(p, row).of[kOut] + threadIdx.x);
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      float values[kCount];
      Sums::unpacked(held[i], values);
      Access::store(out + i * kThreads, full_result<T, Call>(values, normaliser, weights[i], biases[i]));
      held[i] = next[i];
    }
  }
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

constexpr int kMaxStages = 16;

// Rows arrive in `stages` buffers of shared memory. kBulkStore: they leave from there as well.
template <typename T, typename Call, int kPackets, int kThreads, bool kBulkStore>
__global__ void __launch_bounds__(kThreads) bulk_kernel(const RegisterParams p, int stages) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kCount = kPacketSize<T>;
  constexpr int kRowPackets = kPackets * kThreads;
  constexpr uint32_t kRowBytes = kRowPackets * kPacketBytes;
  using Sums = FullSums<T, Call::kLayerNorm, kPackets, kThreads>;
  extern __shared__ __align__(128) uint4 buffers[];
  __shared__ typename Sums::Shared shared[2];
  __shared__ uint64_t arrived[kMaxStages];
  uint4 held[kPackets], weights[kPackets], biases[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if constexpr (Call::kWeight) weights[i] = p.weight[threadIdx.x + i * kThreads];
    if constexpr (Call::kBias) biases[i] = p.bias[threadIdx.x + i * kThreads];
  }
  const auto fetch = [&](uint32_t row, int stage) {  // by one thread
    const uint32_t barrier = shared_address(&arrived[stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kRowBytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(buffers + stage * kRowPackets)),
        "l"(p.x + full_offsets(p, row).of[kX]), "r"(kRowBytes), "r"(barrier)
        : "memory");
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived[stage])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int stage = 0; stage < stages; ++stage) {
      const uint32_t row = blockIdx.x + stage * gridDim.x;
      if (row < p.rows) fetch(row, stage);
    }
  }
  __syncthreads();
  int stage = 0, turn = 0;
  uint32_t parity = 0;
  uint32_t refill_row = 0;  // kBulkStore: what the previous row's buffer gets once it has been stored
  int refill_stage = -1;
  for (uint32_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(&arrived[stage])), "r"(parity)
          : "memory");
    }
    uint4* buffer = buffers + stage * kRowPackets + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) held[i] = buffer[i * kThreads];
    const FullNormaliser normaliser = Sums::of(held, p.inverse_size, p.eps, shared[turn]);
    const uint32_t later = row + stages * gridDim.x;
    if constexpr (!kBulkStore) {
      // All threads have read the buffer: their sums are known.
      if (threadIdx.x == 0 && later < p.rows) fetch(later, stage);
    }
    const uint32_t out_offset = full_offsets(p, row).of[kOut];
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      float values[kCount];
      Sums::unpacked(held[i], values);
      const uint4 result = full_result<T, Call>(values, normaliser, weights[i], biases[i]);
      if constexpr (kBulkStore) {
        buffer[i * kThreads] = result;
      } else {
        p.out[out_offset + threadIdx.x + i * kThreads] = result;
      }
    }
    if constexpr (kBulkStore) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(p.out + out_offset),
                     "r"(shared_address(buffers + stage * kRowPackets)), "r"(kRowBytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (refill_stage >= 0) {
          asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
          if (refill_row < p.rows) fetch(refill_row, refill_stage);
        }
      }
      refill_row = later;
      refill_stage = stage;
    }
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if constexpr (kBulkStore) {
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
#endif
}

// DIFFKERN_NORM_FULL: "off", or numbers in this order.
struct BenchChoice {
  int kind;      // 0 full, 1 walking at a distance, 2 walking over neighbours, 3 bulk, 4 bulk with bulk stores
  int packets;
  int threads;
  int ahead;     // full: the parameters are loaded first
  int load;      // BenchLoad
  int store;     // BenchStore
  int resident;  // blocks on a multiprocessor; 0: as many as fit (full only)
  int stages;    // bulk
};

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

template <typename Kernel, typename... Args>
void launch_with_shared(Kernel kernel, unsigned blocks, int threads, int bytes, GpuStream stream, Args... args) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<blocks, threads, bytes, stream>>>(args...);
}

// Dynamic shared memory of which just `resident` blocks have room on an H100.
inline int bytes_that_limit(int resident) {
  return resident == 0 ? 0 : std::min(226 * 1024, (228 * 1024 / resident - 1024 - 256) / 128 * 128);
}

template <typename Call, int kPackets, int kThreads, typename Access>
bool bench_full(const RegisterParams& p, const BenchChoice& c, GpuStream stream) {
  const int bytes = bytes_that_limit(c.resident);
  if (c.ahead) {
    launch_with_shared(full_kernel<BFloat16, Call, kPackets, kThreads, true, Access>, p.rows, kThreads, bytes, stream, p);
  } else {
    launch_with_shared(full_kernel<BFloat16, Call, kPackets, kThreads, false, Access>, p.rows, kThreads, bytes, stream, p);
  }
  return true;
}

template <typename Call, int kPackets, int kThreads, typename Access>
bool bench_walking(const RegisterParams& p, const BenchChoice& c, GpuStream stream) {
  const unsigned blocks = std::min<unsigned>(p.rows, multiprocessors() * c.resident);
  const uint32_t per_block = c.kind == 2 ? (p.rows + blocks - 1) / blocks : 0;
  launch_with_shared(walking_kernel<BFloat16, Call, kPackets, kThreads, Access>, blocks, kThreads, 0, stream, p, per_block);
  return true;
}

template <typename Call, int kPackets, int kThreads>
bool bench_bulk(const RegisterParams& p, const BenchChoice& c, GpuStream stream) {
  if (c.stages < 2 || c.stages > kMaxStages) return false;
  const unsigned blocks = std::min<unsigned>(p.rows, multiprocessors() * c.resident);
  const int bytes = c.stages * kPackets * kThreads * kPacketBytes;
  if (c.kind == 4) {
    launch_with_shared(bulk_kernel<BFloat16, Call, kPackets, kThreads, true>, blocks, kThreads, bytes, stream, p, c.stages);
  } else {
    launch_with_shared(bulk_kernel<BFloat16, Call, kPackets, kThreads, false>, blocks, kThreads, bytes, stream, p, c.stages);
  }
  return true;
}

// kThorough: with all ways to memory, and the kernels that stay.
template <typename Call, int kPackets, int kThreads, bool kThorough>
bool bench_shape(const RegisterParams& p, const BenchChoice& c, GpuStream stream) {
  if (c.packets != kPackets || c.threads != kThreads || p.packets != kPackets * kThreads) return false;
  const auto with = [&](auto load, auto store) {
    if (c.load != load || c.store != store) return false;
    using Access = BenchAccess<load, store>;
    if (c.kind == 0) return bench_full<Call, kPackets, kThreads, Access>(p, c, stream);
    if constexpr (kThorough && load == kLoadOnce) {
      return bench_walking<Call, kPackets, kThreads, Access>(p, c, stream);
    } else {
      return false;
    }
  };
  using std::integral_constant;
  const integral_constant<int, kLoadOnce> once;
  const integral_constant<int, kLoadStreaming> streaming_load;
  const integral_constant<int, kStorePlain> plain;
  const integral_constant<int, kStoreStreaming> streaming;
  if constexpr (kThorough) {
    if (c.kind >= 3) return bench_bulk<Call, kPackets, kThreads>(p, c, stream);
    const integral_constant<int, kLoadPlain> plain_load;
    const integral_constant<int, kLoadWide> wide;
    const integral_constant<int, kLoadEvictFirst> evict_load;
    const integral_constant<int, kStoreEvictFirst> evict;
    if (with(once, evict) || with(streaming_load, plain) || with(plain_load, plain) || with(plain_load, streaming) ||
        with(wide, plain) || with(wide, streaming) || with(evict_load, plain) || with(evict_load, evict)) {
      return true;
    }
  }
  return with(once, plain) || with(once, streaming) || with(streaming_load, streaming);
}

template <typename Call>
bool bench_call(const RegisterParams& p, const BenchChoice& c, GpuStream stream) {
  return bench_shape<Call, 2, 128, true>(p, c, stream) || bench_shape<Call, 3, 128, true>(p, c, stream) ||
         bench_shape<Call, 5, 128, true>(p, c, stream) || bench_shape<Call, 1, 256, false>(p, c, stream) ||
         bench_shape<Call, 4, 64, false>(p, c, stream) || bench_shape<Call, 8, 32, false>(p, c, stream) ||
         bench_shape<Call, 6, 64, false>(p, c, stream) || bench_shape<Call, 10, 64, false>(p, c, stream) ||
         bench_shape<Call, 4, 160, false>(p, c, stream) || bench_shape<Call, 2, 320, true>(p, c, stream) ||
         bench_shape<Call, 1, 640, false>(p, c, stream);
}

// Whether the register kernel is to be taken instead.
inline bool bench_off() {
  const char* chosen = std::getenv("DIFFKERN_NORM_FULL");
  return chosen != nullptr && chosen[0] == 'o';
}

// Launches the variant that was chosen, if one was.
inline bool launch_bench(const RegisterParams& p, bool layer_norm, GpuStream stream) {
  const char* chosen = std::getenv("DIFFKERN_NORM_FULL");
  if (chosen == nullptr) return false;
  BenchChoice c{};
  std::sscanf(chosen, "%d,%d,%d,%d,%d,%d,%d,%d", &c.kind, &c.packets, &c.threads, &c.ahead, &c.load, &c.store, &c.resident,
              &c.stages);
  const bool launched = layer_norm ? bench_call<Call<true, true, true, false>>(p, c, stream)
                                   : bench_call<Call<false, true, false, false>>(p, c, stream);
  if (!launched) {
    std::fprintf(stderr, "DIFFKERN_NORM_FULL=%s: no such variant for rows of %u packets\n", chosen, p.packets);
    std::exit(1);
  }
  return true;
}

}  // namespace
}  // namespace diffkern
