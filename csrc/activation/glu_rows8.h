// Gated units and rows of 8 bits of them in one pass: a row per block.
//
//  packet kernel: rows that are read and written in packets of 16 bytes; the results stay in registers until the scale
//                 of the row is known.
//  loop kernel:   any alignment and length; each thread reads back what it wrote.
#pragma once

#include "activation_rows8.h"

#if !DIFFKERN_HIP
namespace diffkern {
namespace {

constexpr int kGluLongPackets = 6;  // of a thread in small blocks, which have more registers

template <typename T, Activation kActivation, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) glu_rows8_packet_kernel(const GluRows8 p) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kWaves = kThreads / kWaveSize;
  __shared__ float peaks[kWaves];
  const int64_t row = blockIdx.x;
  const auto at = locate(p.glu.runs, row);
  const unsigned packets = static_cast<unsigned>(p.glu.size) / kCount;
  const uint4* gate = packets_of<T>(p.glu.gate, at.of[kGate]);
  const uint4* value = packets_of<T>(p.glu.value, at.of[kValue]);
  uint4* out = static_cast<uint4*>(p.glu.out) + row * packets;
  uint4 held[kPackets];
  uint4 factors[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const unsigned packet = threadIdx.x + i * blockDim.x;
    if (packet >= packets) continue;
    held[i] = load_once(gate + packet);
    factors[i] = load_once(value + packet);
  }
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const unsigned packet = threadIdx.x + i * blockDim.x;
    if (packet >= packets) continue;
    float values[kCount];
    float factor[kCount];
    unpack<T>(held[i], values);
    unpack<T>(factors[i], factor);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = activated<kActivation>(values[j]);
    if (p.glu.round_activation) round_values<T, kCount>(values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= factor[j];
    held[i] = pack_packet<T>(values);
    out[packet] = held[i];
    unpack<T>(held[i], values);
    peak = peak_of<kCount>(values, peak);
  }
  const RowScale scale = row_scale(block_max<kWaves>(peak, peaks));
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const unsigned packet = threadIdx.x + i * blockDim.x;
    if (packet >= packets) continue;
    optimization_barrier(held[i]);
    float values[kCount];
    unpack<T>(held[i], values);
    store_rows8<kCount>(values, scale.factor, p.rows + row * p.glu.size + packet * kCount);
  }
  if (threadIdx.x == 0) p.scales[row] = scale.scale;
}

__global__ void __launch_bounds__(kRows8Threads) glu_rows8_loop_kernel(const GluRows8 p) {
  __shared__ float peaks[kRows8Threads / kWaveSize];
  const ActivationParams& glu = p.glu;
  const int64_t row = blockIdx.x;
  const auto begin = locate(glu.runs, row);
  const int64_t first = row * glu.size;
  float peak = 0.0f;
  for (int64_t at = threadIdx.x; at < glu.size; at += blockDim.x) {
    float value;
    float factor;
    load_elements<1>(glu.gate, glu.gate_dtype, begin.of[kGate] + at * glu.steps[kGate], &value);
    load_elements<1>(glu.value, glu.value_dtype, begin.of[kValue] + at * glu.steps[kValue], &factor);
    apply<1>(glu.activation, &value);
    value = factor * (glu.round_activation ? rounded_to(glu.gate_dtype, value) : value);
    store_elements<1>(&value, glu.out, glu.out_dtype, first + at);
    peak = fmaxf(peak, fabsf(rounded_to(glu.out_dtype, value)));
  }
  const RowScale scale = row_scale(block_max<kRows8Threads / kWaveSize>(peak, peaks));
  for (int64_t at = threadIdx.x; at < glu.size; at += blockDim.x) {
    float value;
    load_elements<1>(glu.out, glu.out_dtype, first + at, &value);
    store_rows8<1>(&value, scale.factor, p.rows + first + at);
  }
  if (threadIdx.x == 0) p.scales[row] = scale.scale;
}

template <typename T, Activation kActivation, int kPackets, int kThreads>
void launch_glu_of(const GluRows8& p, int64_t packets, GpuStream stream) {
  glu_rows8_packet_kernel<T, kActivation, kPackets, kThreads>
      <<<static_cast<unsigned>(p.glu.runs.rows), rows8_threads(ceil_div(packets, kPackets), kThreads), 0, stream>>>(p);
}

template <typename T, Activation kActivation>
void launch_glu_packets(const GluRows8& p, GpuStream stream) {
  const int64_t packets = p.glu.size / kPacketSize<T>;
#if defined(DIFFKERN_BENCH)
  const char* chosen = std::getenv("DIFFKERN_ROWS8_PACKETS");
  const int wanted = chosen != nullptr ? std::atoi(chosen) : 0;
  if (wanted == 1 && packets <= kRows8MostThreads) {
    return launch_glu_of<T, kActivation, 1, kRows8MostThreads>(p, packets, stream);
  }
  if (wanted == 2 && packets <= kRows8MostThreads * 2) {
    return launch_glu_of<T, kActivation, 2, kRows8MostThreads>(p, packets, stream);
  }
  if (wanted == 4 && packets <= kRows8Threads * 4) {
    return launch_glu_of<T, kActivation, 4, kRows8Threads>(p, packets, stream);
  }
#endif
  if (packets <= kRows8Threads) {
    launch_glu_of<T, kActivation, 1, kRows8Threads>(p, packets, stream);
  } else if (packets <= kRows8Threads * 2) {
    launch_glu_of<T, kActivation, 2, kRows8Threads>(p, packets, stream);
  } else if (packets <= kRows8Threads * kRows8Packets) {
    launch_glu_of<T, kActivation, kRows8Packets, kRows8Threads>(p, packets, stream);
  } else if (packets <= kRows8Threads * kGluLongPackets) {
    launch_glu_of<T, kActivation, kGluLongPackets, kRows8Threads>(p, packets, stream);
  } else {
    launch_glu_of<T, kActivation, kRows8Packets, kRows8MostThreads>(p, packets, stream);
  }
}

template <typename T>
void launch_glu_packets(const GluRows8& p, GpuStream stream) {
  switch (p.glu.activation) {
    case Activation::kGelu: return launch_glu_packets<T, Activation::kGelu>(p, stream);
    case Activation::kGeluTanh: return launch_glu_packets<T, Activation::kGeluTanh>(p, stream);
    case Activation::kSilu: return launch_glu_packets<T, Activation::kSilu>(p, stream);
    case Activation::kQuickGelu: return launch_glu_packets<T, Activation::kQuickGelu>(p, stream);
    case Activation::kNone: return;
  }
}

// Whether rows are read in packets; what is written lies densely.
inline bool glu_in_packets(const ActivationParams& p) {
  const int64_t count = kPacketBytes / bytes_of(p.out_dtype);
  if ((reinterpret_cast<uintptr_t>(p.gate) | reinterpret_cast<uintptr_t>(p.value)) % kPacketBytes != 0) return false;
  if (p.steps[kGate] != 1 || p.steps[kValue] != 1 || p.size % count != 0) return false;
  for (int dim = 0; dim < p.runs.dims; ++dim) {
    if (p.runs.strides[kGate][dim] % count != 0 || p.runs.strides[kValue][dim] % count != 0) return false;
  }
  return p.size / count <= kRows8MostThreads * kRows8Packets;
}

}  // namespace

int glu_rows8_gpu(const GluRows8& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  if (glu_in_packets(p.glu)) {
    with_element(p.glu.out_dtype, [&](auto element) { launch_glu_packets<decltype(element)>(p, stream); });
  } else {
    const unsigned threads = rows8_threads(p.glu.size);
    glu_rows8_loop_kernel<<<static_cast<unsigned>(p.glu.runs.rows), threads, 0, stream>>>(p);
  }
  return last_launch_error();
}

}  // namespace diffkern
#endif
