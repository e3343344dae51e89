// CUDA and HIP kernels for activations and gated units.
//
//  packet kernel:  runs of one dtype that all operands can be read and written in packets of 16 bytes.
//  element kernel: any dtypes, alignment and strides.
#include <algorithm>
#include <iterator>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

#include "../common/gpu_activation.h"
#include "../common/gpu_vector.h"
#include "../common/packet_map.h"
#include "activation.h"
#include "activation_config.h"
#include "activation_rows8.h"
#include "glu_rows8.h"

namespace diffkern {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // of a thread of the element kernel

using Places = PacketMap<kActivationOperands>;  // whose rows are single packets

// Each thread computes a few packets, all of whose loads are on their way before the first is used. The activation
// is known at compile time: chosen at run time, its code would be held once for each that there is.
template <typename T, Activation kActivation, bool kGated, int kBlock, int kPackets>
__global__ void __launch_bounds__(kBlock) packet_kernel(const uint4* gate, const uint4* value, uint4* out,
                                                        const uint32_t packets, const uint32_t round_activation,
                                                        const Places places) {
  constexpr int kCount = kPacketSize<T>;
  const uint32_t first = blockIdx.x * (kBlock * kPackets) + threadIdx.x;

  // Past the end the last packet is read again, which costs less than a branch around every load.
  uint32_t indices[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) indices[i] = min(first + i * kBlock, packets - 1);
  PacketOffsets<kActivationOperands> at[kPackets];
  places.locate(indices, at);

  uint4 gates[kPackets];
  uint4 factors[kGated ? kPackets : 1];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    gates[i] = load_once(gate + at[i].of[kGate]);
    if constexpr (kGated) factors[i] = load_once(value + at[i].of[kValue]);
  }
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    float values[kCount];
    unpack<T>(gates[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = activated<kActivation>(values[j]);
    if constexpr (kGated) {
      if (round_activation != 0) round_values<T, kCount>(values);
      float factor[kCount];
      unpack<T>(factors[i], factor);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] *= factor[j];
    }
    if (first + i * kBlock < packets) out[at[i].of[kOut]] = pack_packet<T>(values);
  }
}

__global__ void __launch_bounds__(kThreads) element_kernel(const ActivationParams p) {
  const int64_t elements = p.size * p.runs.rows;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kElements) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int64_t index = first + i * kThreads;
    if (index >= elements) return;
    const auto run = locate(p.runs, index / p.size);
    const int64_t at = index % p.size;
    float value;
    load_elements<1>(p.gate, p.gate_dtype, run.of[kGate] + at * p.steps[kGate], &value);
    apply<1>(p.activation, &value);
    if (p.value != nullptr) {
      float factor;
      load_elements<1>(p.value, p.value_dtype, run.of[kValue] + at * p.steps[kValue], &factor);
      value = factor * (p.round_activation ? rounded_to(p.gate_dtype, value) : value);
    }
    store_elements<1>(&value, p.out, p.out_dtype, run.of[kOut] + at * p.steps[kOut]);
  }
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPacketBytes == 0; }

// The packets of all operands as rows of a map, whose innermost dimension goes through a run.
LeadingMap<kActivationOperands> map_of_packets(const ActivationParams& p, int64_t count) {
  LeadingMap<kActivationOperands> map{p.size / count * p.runs.rows, 1, {p.size / count}, {}};
  for (int operand = 0; operand < kActivationOperands; ++operand) map.strides[operand][0] = count;
  for (int dim = 0; dim < p.runs.dims && p.runs.rows > 1; ++dim, ++map.dims) {
    map.sizes[map.dims] = p.runs.sizes[dim];
    for (int operand = 0; operand < kActivationOperands; ++operand) {
      map.strides[operand][map.dims] = p.runs.strides[operand][dim];
    }
  }
  return map;
}

bool in_packets(const ActivationParams& p) {
  if (p.gate_dtype != p.out_dtype || (p.value != nullptr && p.value_dtype != p.out_dtype)) return false;
  if (!aligned(p.gate) || !aligned(p.value) || !aligned(p.out)) return false;
  const int64_t count = kPacketBytes / bytes_of(p.out_dtype);
  if (p.size % count != 0) return false;
  for (int operand = 0; operand < kActivationOperands; ++operand) {
    if (p.steps[operand] != 1) return false;
    for (int dim = 0; dim < p.runs.dims; ++dim) {
      if (p.runs.strides[operand][dim] % count != 0) return false;
    }
  }
  return Places::holds(map_of_packets(p, count), {count, count, count}, 1);
}

unsigned blocks_for(int64_t items, int64_t per_block) { return static_cast<unsigned>(ceil_div(items, per_block)); }

template <typename T, Activation kActivation, bool kGated, int kShape>
void launch_shape(const ActivationParams& p, GpuStream stream) {
  constexpr PacketShape shape = kPacketShapes[kShape];
  constexpr int64_t kCount = kPacketSize<T>;
  const auto map = map_of_packets(p, kCount);
  packet_kernel<T, kActivation, kGated, shape.threads, shape.packets>
      <<<blocks_for(map.rows, shape.threads * shape.packets), shape.threads, 0, stream>>>(
          static_cast<const uint4*>(p.gate), static_cast<const uint4*>(p.value), static_cast<uint4*>(p.out),
          static_cast<uint32_t>(map.rows), p.round_activation, Places(map, {kCount, kCount, kCount}));
}

#if defined(DIFFKERN_BENCH)
template <typename T, Activation kActivation, bool kGated, int... kShapes>
void launch_chosen(const ActivationParams& p, std::integer_sequence<int, kShapes...>, GpuStream stream) {
  const char* chosen = std::getenv("DIFFKERN_ACTIVATION_SHAPE");
  const int index = chosen != nullptr ? std::atoi(chosen) : kGated ? kGatedShape : kPlainShape;
  ((index == kShapes ? launch_shape<T, kActivation, kGated, kShapes>(p, stream) : void()), ...);
}
#endif

template <typename T, Activation kActivation, bool kGated>
void launch_packets(const ActivationParams& p, GpuStream stream) {
#if defined(DIFFKERN_BENCH)
  launch_chosen<T, kActivation, kGated>(p, std::make_integer_sequence<int, std::size(kPacketShapes)>{}, stream);
#else
  launch_shape<T, kActivation, kGated, kGated ? kGatedShape : kPlainShape>(p, stream);
#endif
}

template <typename T, bool kGated>
void launch_packets(const ActivationParams& p, GpuStream stream) {
  switch (p.activation) {
    case Activation::kGelu: return launch_packets<T, Activation::kGelu, kGated>(p, stream);
    case Activation::kGeluTanh: return launch_packets<T, Activation::kGeluTanh, kGated>(p, stream);
    case Activation::kSilu: return launch_packets<T, Activation::kSilu, kGated>(p, stream);
    case Activation::kQuickGelu: return launch_packets<T, Activation::kQuickGelu, kGated>(p, stream);
    case Activation::kNone: return;
  }
}

template <typename T>
void launch_packets(const ActivationParams& p, GpuStream stream) {
  p.value != nullptr ? launch_packets<T, true>(p, stream) : launch_packets<T, false>(p, stream);
}

}  // namespace

int activation_gpu(const ActivationParams& p, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  if (!in_packets(p)) {
    element_kernel<<<blocks_for(p.size * p.runs.rows, kThreads * kElements), kThreads, 0, stream>>>(p);
  } else if (p.out_dtype == Dtype::kFloat16) {
    launch_packets<Half>(p, stream);
  } else if (p.out_dtype == Dtype::kBFloat16) {
    launch_packets<BFloat16>(p, stream);
  } else {
    launch_packets<float>(p, stream);
  }
  return last_launch_error();
}

}  // namespace diffkern
