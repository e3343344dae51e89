// Activations into rows of 8 bits, maybe behind other elements: a row per block.
//
//  packet kernel: rows that are read in packets of 16 bytes, once, and kept in registers.
//  loop kernel:   any alignment and length; a row is read again once its peak is known, from the caches.
#pragma once

#include <algorithm>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

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
constexpr int kRows8ManyRows = 1024;
constexpr int kRows8FewPackets = 128;

// --- activations for numbers that are rounded to e4m3 --------------------------------------------------------

// To 2^-20, and 2^-19 far below zero, where PyTorch's formulas cancel: what a scale is made of.
template <Activation kActivation>
__device__ __forceinline__ float peak_activated(float x) {
  if constexpr (kActivation == Activation::kGelu) {
    return 0.5f * x * erfcf(x * -0.70710678118654752440f);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // x (1 + tanh y) / 2 = x sigmoid(2 y), which cancels nowhere.
    constexpr float kSlope = -2.0f * 0.79788456080286535588f * kLog2E;
    return quick_logistic(x, x * fmaf(kSlope * 0.044715f, x * x, kSlope));
  } else if constexpr (kActivation == Activation::kSilu) {
    return quick_silu(x);
  } else {
    static_assert(kActivation == Activation::kQuickGelu, "every activation has its formula");
    return quick_logistic(x, x * (-kQuickGeluSlope * kLog2E));
  }
}

// The same to 2^-14 for values, of which e4m3 keeps three bits.
template <Activation kActivation>
__device__ __forceinline__ float value_activated(float x) {
  if constexpr (kActivation == Activation::kGelu) {
    // gelu(x) = max(x, 0) - |x| Q(|x|), where Q is the tail of the normal distribution. log2 Q is nearly a parabola:
    // this polynomial is off by less than 5e-5 up to 6, and falls all the way, to below -127 at 14.
    constexpr float kTail[] = {-1.00004458f,   -1.15057862f,     -0.460050523f,   -0.0525349379f,
                               0.0078950068f,  -0.000795068336f, 4.67634964e-05f, -1.19767355e-06f};
    const float size = fabsf(x);
    float exponent = kTail[7];
#pragma unroll
    for (int i = 6; i >= 0; --i) exponent = fmaf(exponent, size, kTail[i]);
    return fmaf(-size, quick_exp2(exponent), x < 0.0f ? 0.0f : x);  // a NaN stays one
  } else {
    return peak_activated<kActivation>(x);
  }
}

// No negative number is activated to a greater magnitude.
template <Activation kActivation>
constexpr float kLowestDip = kActivation == Activation::kSilu        ? 0.27847f
                             : kActivation == Activation::kQuickGelu ? 0.16362f
                                                                     : 0.17005f;

// --- kernels -----------------------------------------------------------------------------------------------------

// All activations rise from 0 on: the peak of a row is that of its largest element, unless that is so small that a
// negative one may be ahead. So each element is activated once, when the scale is known, and until then a row takes no
// more registers than its bytes.
template <typename T, Activation kActivation, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) rows8_packet_kernel(const ActivationRows8 p) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kWaves = kThreads / kWaveSize;
  constexpr bool kActive = kActivation != Activation::kNone;
  __shared__ float peaks[kWaves];
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
  // Calls use(values, packet, whether they are to be activated) for each packet of the thread.
  const auto each = [&](auto&& use) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const unsigned packet = threadIdx.x + i * blockDim.x;
      if (packet >= packets) continue;
      optimization_barrier(held[i]);
      float values[kCount];
      unpack<T>(held[i], values);
      use(values, packet, kActive && packet >= front);
    }
  };
  float peak = 0.0f;
  float most = 0.0f;
  each([&](float* values, unsigned, bool active) {
    if (active) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) most = fmaxf(most, values[j]);
    } else {
      peak = peak_of<kCount>(values, peak);
    }
  });
  if constexpr (kActive) peak = fmaxf(peak, peak_activated<kActivation>(most));
  peak = block_max<kWaves>(peak, peaks);
  if constexpr (kActive) {
    if (peak < kLowestDip<kActivation>) {
      each([&](float* values, unsigned, bool active) {
        if (!active) return;
#pragma unroll
        for (int j = 0; j < kCount; ++j) peak = fmaxf(peak, fabsf(peak_activated<kActivation>(values[j])));
      });
      __syncthreads();
      peak = block_max<kWaves>(peak, peaks);
    }
  }
  const RowScale scale = row_scale(peak);
  each([&](float* values, unsigned packet, bool active) {
    if constexpr (kActive) {
      if (active) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[j] = value_activated<kActivation>(values[j]);
      }
    }
    store_rows8<kCount>(values, scale.factor, p.out + row * p.size + packet * kCount);
  });
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
#if defined(DIFFKERN_BENCH)
  const char* chosen = std::getenv("DIFFKERN_ROWS8_PACKETS");
  const int wanted = chosen != nullptr ? std::atoi(chosen) : 0;
  if (wanted == 1 && packets <= kRows8MostThreads) {
    return launch_rows8_of<T, kActivation, 1, kRows8MostThreads>(p, packets, stream);
  }
  if (wanted == 2 && packets <= kRows8MostThreads * 2) {
    return launch_rows8_of<T, kActivation, 2, kRows8MostThreads>(p, packets, stream);
  }
  if (wanted == 4 && packets <= kRows8Threads * 4) return launch_rows8_of<T, kActivation, 4>(p, packets, stream);
  if (wanted == 8 && packets <= kRows8Threads * 8) return launch_rows8_of<T, kActivation, 8>(p, packets, stream);
#endif
  // Where rows fill the GPU, threads that compute several packets wait less for each other.
  const bool fewer = kActivation != Activation::kNone && p.map.rows >= kRows8ManyRows && packets > kRows8FewPackets;
  if (fewer && packets <= kRows8Threads * kRows8Packets) {
    launch_rows8_of<T, kActivation, kRows8Packets>(p, packets, stream);
  } else if (packets <= kRows8Threads) {
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
