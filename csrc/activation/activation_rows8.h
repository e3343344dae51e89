// Activations into rows of 8 bits: a row per block.
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
constexpr int kRows8Packets = 8;  // of a thread, at most: 32,768 numbers of 16 bits in a row

template <typename T, Activation kActivation, int kPackets>
__global__ void __launch_bounds__(kRows8Threads) rows8_packet_kernel(const ActivationRows8 p) {
  constexpr int kCount = kPacketSize<T>;
  __shared__ float peaks[kRows8Threads / kWaveSize];
  const int64_t row = blockIdx.x;
  const unsigned packets = static_cast<unsigned>(p.size) / kCount;
  const uint4* from = packets_of<T>(p.x, row * p.x_row);
  uint4 held[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const unsigned packet = threadIdx.x + i * blockDim.x;
    if (packet < packets) held[i] = load_once(from + packet);
  }
  float values[kPackets][kCount];
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (threadIdx.x + i * blockDim.x >= packets) continue;
    unpack<T>(held[i], values[i]);
    if constexpr (kActivation != Activation::kNone) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[i][j] = activated<kActivation>(values[i][j]);
    }
    peak = peak_of<kCount>(values[i], peak);
  }
  const RowScale scale = row_scale(block_max<kRows8Threads / kWaveSize>(peak, peaks));
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
  const auto load = [&](int64_t at) {
    float value;
    load_elements<1>(p.x, p.dtype, row * p.x_row + at * p.x_step, &value);
    apply<1>(p.activation, &value);
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
inline unsigned rows8_threads(int64_t items) {
  return static_cast<unsigned>(std::min<int64_t>(kRows8Threads, ceil_div(items, kWaveSize) * kWaveSize));
}

template <typename T, Activation kActivation>
void launch_rows8_packets(const ActivationRows8& p, GpuStream stream) {
  // As few packets in a thread as hold the row: 1, 2, 4 or 8.
  const int64_t packets = p.size / kPacketSize<T>;
  const auto launch = [&](auto kernel, int64_t held) {
    kernel<<<static_cast<unsigned>(p.rows), rows8_threads(ceil_div(packets, held)), 0, stream>>>(p);
  };
  if (packets <= kRows8Threads) return launch(rows8_packet_kernel<T, kActivation, 1>, 1);
  if (packets <= 2 * kRows8Threads) return launch(rows8_packet_kernel<T, kActivation, 2>, 2);
  if (packets <= 4 * kRows8Threads) return launch(rows8_packet_kernel<T, kActivation, 4>, 4);
  launch(rows8_packet_kernel<T, kActivation, kRows8Packets>, kRows8Packets);
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
  return reinterpret_cast<uintptr_t>(p.x) % kPacketBytes == 0 && p.x_step == 1 && p.size % count == 0 &&
         p.x_row % count == 0 && p.size / count <= kRows8Threads * kRows8Packets;
}

}  // namespace

int activation_rows8_gpu(const ActivationRows8& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  if (rows8_in_packets(p)) {
    with_element(p.dtype, [&](auto element) { launch_rows8_packets<decltype(element)>(p, stream); });
  } else {
    rows8_loop_kernel<<<static_cast<unsigned>(p.rows), rows8_threads(p.size), 0, stream>>>(p);
  }
  return last_launch_error();
}

}  // namespace diffkern
#endif
