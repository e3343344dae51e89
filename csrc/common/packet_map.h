// Where the rows of several tensors begin, for kernels that count in packets of 16 bytes and in 32 bits: a LeadingMap
// without 64-bit arithmetic and without divisions.
#pragma once

#include <array>
#include <cstdint>

#include "divisor.h"
#include "leading_map.h"

namespace diffkern {

template <int kOperands>
struct PacketOffsets {
  uint32_t of[kOperands];
};

// Row n of an operand is at n times its innermost stride plus, for each outer dimension, a jump for every step that
// this dimension has gone. Jumps may lead backwards: modulo 2^32 the sum is right nevertheless.
template <int kOperands>
struct PacketMap {
  static constexpr int kMaxOuter = kMaxLeadingDims - 1;

  int outer;  // dimensions around the innermost one
  uint32_t strides[kOperands];
  Divisor sizes[kMaxOuter];  // of the dimension within each outer one
  uint32_t jumps[kMaxOuter][kOperands];

  // counts: elements in a packet of each operand.
  PacketMap(const LeadingMap<kOperands>& map, const std::array<int64_t, kOperands>& counts) : outer(map.dims - 1) {
    const auto stride = [&](int operand, int dim) { return map.strides[operand][dim] / counts[operand]; };
    for (int operand = 0; operand < kOperands; ++operand) strides[operand] = static_cast<uint32_t>(stride(operand, 0));
    for (int dim = 0; dim < outer; ++dim) {
      sizes[dim] = make_divisor(static_cast<uint32_t>(map.sizes[dim]));
      for (int operand = 0; operand < kOperands; ++operand) {
        jumps[dim][operand] =
            static_cast<uint32_t>(stride(operand, dim + 1) - map.sizes[dim] * stride(operand, dim));
      }
    }
  }

  // Whether 32 bits hold the end of all rows, of row_packets packets each, and a Divisor the number of each; with room
  // for threads that have no row left.
  static bool holds(const LeadingMap<kOperands>& map, const std::array<int64_t, kOperands>& counts, int64_t row_packets) {
    if (map.rows > INT32_MAX - (1 << 16)) return false;
    for (int operand = 0; operand < kOperands; ++operand) {
      int64_t end = row_packets;
      for (int dim = 0; dim < map.dims; ++dim) end += (map.sizes[dim] - 1) * (map.strides[operand][dim] / counts[operand]);
      if (end > UINT32_MAX) return false;
    }
    return true;
  }

  // Where several rows begin, in packets.
  template <int kRows>
  __device__ __forceinline__ void locate(const uint32_t (&rows)[kRows], PacketOffsets<kOperands> (&at)[kRows]) const {
    uint32_t steps[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      steps[r] = rows[r];
#pragma unroll
      for (int operand = 0; operand < kOperands; ++operand) at[r].of[operand] = rows[r] * strides[operand];
    }
    jump<0>(steps, at);
  }

  // Where one row begins.
  __device__ __forceinline__ PacketOffsets<kOperands> locate(uint32_t row) const {
    const uint32_t rows[] = {row};
    PacketOffsets<kOperands> at[1];
    locate(rows, at);
    return at[0];
  }

 private:
  // No loop, since only with a dimension known at compile time the parameters of a kernel are read where they are, and
  // not from a copy that each thread writes to memory.
  template <int kDim, int kRows>
  __device__ __forceinline__ void jump(uint32_t (&steps)[kRows], PacketOffsets<kOperands> (&at)[kRows]) const {
    if constexpr (kDim < kMaxOuter) {
      if (kDim >= outer) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        steps[r] = sizes[kDim].divide(steps[r]);
#pragma unroll
        for (int operand = 0; operand < kOperands; ++operand) at[r].of[operand] += steps[r] * jumps[kDim][operand];
      }
      jump<kDim + 1>(steps, at);
    }
  }
};

}  // namespace diffkern
