// Copies into shared memory that run by themselves, from sm_80 on.
#pragma once

#include "../common/gpu.h"
#include "group_norm_config.h"

namespace diffkern {
namespace {

// Starts to copy 16 bytes into shared memory.
__device__ __forceinline__ void begin_copy(uint4* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

// Ends a group of copies, which may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of copies but the last kLater.
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// Has a line on its way into the second-level cache.
__device__ __forceinline__ void prefetch(const void* base, Dtype dtype, int64_t at) {
  const int bytes = dtype == Dtype::kFloat32 ? 4 : 2;
  if (base != nullptr) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(base) + at * bytes));
}

}  // namespace
}  // namespace diffkern
