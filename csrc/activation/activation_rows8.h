// Activations into rows of 8 bits, maybe behind other elements: a row per block.
//
//  packet kernel: rows that are read in packets of 16 bytes, once, and kept in registers.
//  loop kernel:   any alignment and length; a row is read again once its peak is known, from the caches.
#pragma once

#include <algorithm>

#include "../common/gpu_activation.h"
#include "../common/gpu_rows8.h"
#include "../common/gpu_vector.h"
#include "activation.h"

#if !DIFFKERN_HIP
namespace diffkern {
namespace {

constexpr int kRows8Threads = 512;
constexpr int kRows8MostThreads = 1024;
constexpr int kRows8Packets = 4;  // of a thread, at most

template <typename T, Activation kActivation, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) rows8_packet_kernel(const ActivationRows8 p) {
  constexpr int kCount = kPacketSize<T>;
  __shared__ float peaks[kThreads / kWaveSize];
  const int64_t row = blockIdx.x;
  const auto at = locate(p.map, row);
  const unsigned front = static_cast<unsigned>(p.front_size) / kCount;
  const unsigned packets = static_cast<unsigned>(p.size) / kCount;
  const uint4* x = packets_of<T>(p.x, at.of[kRowOfX] - p.front_size);
  const uint4* ahead = packets_of<T>(p.front, at.of[kRowOfFront]);
  uint4 held[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const unsigned packet = threadIdx.x + i * blockDim.x;
    if (packet < packets) held[i] = load_once((packet < front ? ahead : x) + packet);
  }
  float values[kPackets][kCount];
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const unsigned packet = threadIdx.x + i * blockDim.x;
    if (packet >= packets) continue;
    unpack<T>(held[i], values[i]);
    if constexpr (kActivation != Activation::kNone) {
      if (packet >= front) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[i][j] = activated<kActivation>(values[i][j]);
      }
    }
    peak = peak_of<kCount>(values[i], peak);
  }
  const RowScale scale = row_scale(block_max<kThreads / kWaveSize>(peak, peaks));
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const unsigned packet = threadIdx.x + i * blockDim.x;
    if (packet < packets) store_rows8<kCount>(values[i], scale.factor, p.out + row * p.size + packet * kCount);
  }
  if (threadIdx.x == 0) p.scales[row] = scale.scale;
}

__global__ void __launch_bounds__(kRows8Threads) rows8_loop_kernel(const ActivationRows8 p) {
  __shared__ float peaks[kRows8Threads / kWaveSize];
  const int64_t row = blockIdx.x;
  const auto begin = locate(p.map, row);
  const auto load = [&](int64_t at) {
    float value;
    if (at < p.front_size) {
      load_elements<1>(p.front, p.dtype, begin.of[kRowOfFront] + at * p.front_step, &value);
    } else {
      load_elements<1>(p.x, p.dtype, begin.of[kRowOfX] + (at - p.front_size) * p.x_step, &value);
      apply<1>(p.activation, &value);
    }
    return value;
  };
  float peak = 0.0f;
  for (int64_t at = threadIdx.x; at < p.size; at += blockDim.x) peak = fmaxf(peak, fabsf(load(at)));
  const RowScale scale = row_scale(block_max<kRows8Threads / kWaveSize>(peak, peaks));
  for (int64_t at = threadIdx.x; at < p.size; at += blockDim.x) {
    const float value = load(at);
    store_rows8<1>(&value, scale.factor, p.out + row * p.size + at);
  }
  if (threadIdx.x == 0) p.scales[row] = scale.scale;
}

// A block of whole waves for `items` of a row.
inline unsigned rows8_threads(int64_t items, int64_t most = kRows8Threads) {
  return static_cast<unsigned>(std::min<int64_t>(most, ceil_div(items, kWaveSize) * kWaveSize));
}

template <typename T, Activation kActivation, int kPackets, int kThreads = kRows8Threads>
void launch_rows8_of(const ActivationRows8& p, int64_t packets, GpuStream stream) {
  const unsigned threads = rows8_threads(ceil_div(packets, kPackets), kThreads);
  rows8_packet_kernel<T, kActivation, kPackets, kThreads><<<static_cast<unsigned>(p.map.rows), threads, 0, stream>>>(p);
}

// Feed-forwards of image and video models have rows of 6144 to 15360 elements, which must be read once, too.
template <typename T, Activation kActivation>
void launch_rows8_packets(const ActivationRows8& p, GpuStream stream) {
  const int64_t packets = p.size / kPacketSize<T>;
  if (packets <= kRows8Threads) {
    launch_rows8_of<T, kActivation, 1>(p, packets, stream);
  } else if (packets <= kRows8Threads * 2) {
    launch_rows8_of<T, kActivation, 2>(p, packets, stream);
  } else if (packets <= kRows8Threads * kRows8Packets) {
    launch_rows8_of<T, kActivation, kRows8Packets>(p, packets, stream);
  } else {
    launch_rows8_of<T, kActivation, kRows8Packets, kRows8MostThreads>(p, packets, stream);
  }
}

template <typename T>
void launch_rows8_packets(const ActivationRows8& p, GpuStream stream) {
  switch (p.activation) {
    case Activation::kGelu: return launch_rows8_packets<T, Activation::kGelu>(p, stream);
    case Activation::kGeluTanh: return launch_rows8_packets<T, Activation::kGeluTanh>(p, stream);
    case Activation::kSilu: return launch_rows8_packets<T, Activation::kSilu>(p, stream);
    case Activation::kQuickGelu: return launch_rows8_packets<T, Activation::kQuickGelu>(p, stream);
    case Activation::kNone: return launch_rows8_packets<T, Activation::kNone>(p, stream);
  }
}

inline bool rows8_in_packets(const ActivationRows8& p) {
  const int64_t count = kPacketBytes / bytes_of(p.dtype);
  if ((reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.front)) % kPacketBytes != 0) return false;
  if (p.x_step != 1 || p.front_step != 1 || p.size % count != 0 || p.front_size % count != 0) return false;
  for (int dim = 0; dim < p.map.dims; ++dim) {
    if (p.map.strides[kRowOfX][dim] % count != 0 || p.map.strides[kRowOfFront][dim] % count != 0) return false;
  }
  return p.size / count <= kRows8MostThreads * kRows8Packets;
}

}  // namespace

int activation_rows8_gpu(const ActivationRows8& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  if (rows8_in_packets(p)) {
    with_element(p.dtype, [&](auto element) { launch_rows8_packets<decltype(element)>(p, stream); });
  } else {
    rows8_loop_kernel<<<static_cast<unsigned>(p.map.rows), rows8_threads(p.size), 0, stream>>>(p);
  }
  return last_launch_error();
}

}  // namespace diffkern
#endif
