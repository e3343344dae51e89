// CUDA and HIP kernels for activations and gated units.
//
//  packet kernel:  runs of one dtype that all operands can be read and written in packets of 16 bytes.
//  element kernel: any dtypes, alignment and strides.
#include <iterator>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

#include "../common/gpu_activation.h"
#include "../common/gpu_vector.h"
#include "activation.h"

namespace diffkern {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // of a thread of the element kernel

// How the packet kernel is launched: threads of a block, and packets of a thread, all of whose loads are on their way
// before the first is used.
struct PacketShape {
  int threads;
  int packets;
};

#if defined(DIFFKERN_BENCH)
constexpr PacketShape kPacketShapes[] = {{128, 1}, {128, 2}, {128, 4}, {256, 1}, {256, 2}, {256, 4}, {512, 1}, {512, 2}};
#else
constexpr PacketShape kPacketShapes[] = {{128, 1}, {128, 2}};
#endif

// Division by what only the host knows, without the 20 instructions of one by the hardware. Holds for numbers and
// divisors below 2^31.
class Divisor {
 public:
  explicit Divisor(uint32_t value = 1) : value_(value), shift_(0) {
    while ((uint32_t{1} << shift_) < value) ++shift_;
    multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - value) << 32) / value + 1);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t number) const {
    return (__umulhi(number, multiplier_) + number) >> shift_;
  }
  __device__ __forceinline__ uint32_t value() const { return value_; }

 private:
  uint32_t value_;
  uint32_t shift_;
  uint32_t multiplier_;
};

// What the packet kernel divides by.
struct Divisors {
  Divisor per_run;  // packets of a run
  Divisor sizes[kMaxLeadingDims];

  explicit Divisors(const LeadingMap<kActivationOperands>& runs, int64_t per_run)
      : per_run(static_cast<uint32_t>(per_run)) {
    for (int dim = 0; dim < runs.dims; ++dim) sizes[dim] = Divisor(static_cast<uint32_t>(runs.sizes[dim]));
  }
};

__device__ __forceinline__ LeadingOffsets<kActivationOperands> locate(const LeadingMap<kActivationOperands>& runs,
                                                                      const Divisor* sizes, uint32_t row) {
  LeadingOffsets<kActivationOperands> offsets{};
  int dim = 0;
  const auto step = [&](uint32_t index) {
#pragma unroll
    for (int operand = 0; operand < kActivationOperands; ++operand) {
      offsets.of[operand] += index * runs.strides[operand][dim];
    }
  };
#pragma unroll 1
  for (; dim + 1 < runs.dims; ++dim) {
    const uint32_t quotient = sizes[dim].quotient(row);
    step(row - quotient * sizes[dim].value());
    row = quotient;
  }
  step(row);
  return offsets;
}

template <typename T, bool kGated, Activation kActivation, int kBlock, int kPackets>
__global__ void __launch_bounds__(kBlock) packet_kernel(const ActivationParams p, const Divisors divisors,
                                                        const uint32_t packets) {
  constexpr int kCount = kPacketSize<T>;
  const uint32_t first = blockIdx.x * (kBlock * kPackets) + threadIdx.x;

  uint4 gates[kPackets];
  uint4 factors[kGated ? kPackets : 1];
  int64_t outs[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const uint32_t index = first + i * kBlock;
    if (index >= packets) continue;
    const uint32_t row = divisors.per_run.quotient(index);
    const auto run = locate(p.runs, divisors.sizes, row);
    const int64_t at = static_cast<int64_t>(index - row * divisors.per_run.value()) * kCount;
    outs[i] = run.of[kOut] + at;
    gates[i] = load_once(static_cast<const T*>(p.gate) + run.of[kGate] + at);
    if constexpr (kGated) factors[i] = load_once(static_cast<const T*>(p.value) + run.of[kValue] + at);
  }
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (first + i * kBlock >= packets) continue;
    float values[kCount];
    unpack<T>(gates[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = activated<kActivation>(values[j]);
    if constexpr (kGated) {
      float factor[kCount];
      unpack<T>(factors[i], factor);
      if (p.round_activation) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[j] = rounded<T>(values[j]);
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] *= factor[j];
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + outs[i]) = pack_packet<T>(values);
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

bool in_packets(const ActivationParams& p) {
  if (p.gate_dtype != p.out_dtype || (p.value != nullptr && p.value_dtype != p.out_dtype)) return false;
  if (!aligned(p.gate) || !aligned(p.value) || !aligned(p.out)) return false;
  const int64_t count = kPacketBytes / bytes_of(p.out_dtype);
  // The bound leaves room for the threads past the end.
  if (p.size % count != 0 || p.size / count * p.runs.rows > INT32_MAX - (1 << 16)) return false;
  for (int operand = 0; operand < kActivationOperands; ++operand) {
    if (p.steps[operand] != 1) return false;
    for (int dim = 0; dim < p.runs.dims; ++dim) {
      if (p.runs.strides[operand][dim] % count != 0) return false;
    }
  }
  return true;
}

unsigned blocks_for(int64_t items, int64_t per_block) { return static_cast<unsigned>(ceil_div(items, per_block)); }

template <typename T, bool kGated, Activation kActivation, int kIndex>
void launch_shape(const ActivationParams& p, GpuStream stream) {
  constexpr PacketShape shape = kPacketShapes[kIndex];
  const int64_t per_run = p.size / kPacketSize<T>;
  const int64_t packets = per_run * p.runs.rows;
  packet_kernel<T, kGated, kActivation, shape.threads, shape.packets>
      <<<blocks_for(packets, shape.threads * shape.packets), shape.threads, 0, stream>>>(
          p, Divisors(p.runs, per_run), static_cast<uint32_t>(packets));
}

#if defined(DIFFKERN_BENCH)
template <typename T, bool kGated, Activation kActivation, int... kIndices>
void launch_chosen(const ActivationParams& p, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  const char* chosen = std::getenv("DIFFKERN_ACTIVATION_CONFIG");
  const int index = chosen != nullptr ? std::atoi(chosen) : 0;
  ((index == kIndices ? launch_shape<T, kGated, kActivation, kIndices>(p, stream) : void()), ...);
}
#endif

template <typename T, bool kGated, Activation kActivation>
void launch_activation(const ActivationParams& p, GpuStream stream) {
#if defined(DIFFKERN_BENCH)
  launch_chosen<T, kGated, kActivation>(p, std::make_integer_sequence<int, std::size(kPacketShapes)>{}, stream);
#else
  launch_shape<T, kGated, kActivation, kGated ? 0 : 0>(p, stream);
#endif
}

template <typename T, bool kGated>
void launch_packets(const ActivationParams& p, GpuStream stream) {
  switch (p.activation) {
    case Activation::kGelu: return launch_activation<T, kGated, Activation::kGelu>(p, stream);
    case Activation::kGeluTanh: return launch_activation<T, kGated, Activation::kGeluTanh>(p, stream);
    case Activation::kSilu: return launch_activation<T, kGated, Activation::kSilu>(p, stream);
    case Activation::kQuickGelu: return launch_activation<T, kGated, Activation::kQuickGelu>(p, stream);
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
