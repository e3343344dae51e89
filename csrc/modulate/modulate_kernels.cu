// CUDA and HIP kernels for modulated norms and gated residuals.
//
//  row kernel:  contiguous aligned rows of one dtype, modulated in that dtype or in float32. Everything is read
//               once and kept in registers. The fast path.
//  loop kernel: any dtypes, alignment, element strides, size and activation; a norm reads its row again, from
//               the caches.
//
// Inputs and outputs pass the first-level cache by; it is left to modulation rows, which many rows share.
#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

#include "../common/gpu_vector.h"
#include "modulate.h"
#include "modulate_config.h"

namespace diffkern {
namespace {

using Offsets = LeadingOffsets<kMappedOperands>;

template <int kCount>
__device__ __forceinline__ void activate(GateActivation activation, float* gate) {
  if (activation == GateActivation::kTanh) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) gate[j] = tanhf(gate[j]);
  } else if (activation == GateActivation::kSigmoid) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) gate[j] = 1.0f / (1.0f + expf(-gate[j]));
  }
}

// What a row's sums say: the normalised value is (v - mean) * factor + rest. What rounding left out of the mean
// comes to light as the mean of v - mean; without it the whole row would be shifted.
struct Normaliser {
  float mean;
  float factor;
  float rest;

  __device__ __forceinline__ float operator()(float value) const { return fmaf(value - mean, factor, rest); }
};

__device__ __forceinline__ Normaliser no_norm() { return {0.0f, 1.0f, -0.0f}; }  // keeps the sign of a zero

// The steps between a row's values and its Normaliser. `sum` adds up a float, or two in one go, over the threads
// of the row; `fold` calls its argument with every value that this thread holds.
template <typename Sum, typename Fold>
__device__ __forceinline__ Normaliser normaliser_of(const ModulateParams& p, Sum&& sum, Fold&& fold) {
  if (p.norm == NormKind::kRms) {
    float squares = 0.0f;
    fold([&](float value) { squares += value * value; });
    return {0.0f, rsqrtf(sum(squares) * p.inverse_size + p.eps), -0.0f};
  }
  float plain = 0.0f;
  fold([&](float value) { plain += value; });
  const float mean = sum(plain) * p.inverse_size;
  float2 sums{0.0f, 0.0f};
  fold([&](float value) {
    const float centred = value - mean;
    sums.x += centred;
    sums.y += centred * centred;
  });
  sums = sum(sums);
  const float rest = sums.x * p.inverse_size;
  const float factor = rsqrtf((sums.y - rest * sums.x) * p.inverse_size + p.eps);
  return {mean, factor, -rest * factor};
}

// --- row kernel ----------------------------------------------------------------------------------------

// Where the row number `row` of the innermost loop and iteration `outer` of all others begins. Unlike locate, this
// divides only where there are more than two loops.
__device__ __forceinline__ Offsets locate_nested(const LeadingMap<kMappedOperands>& map, int64_t row, unsigned outer) {
  Offsets offsets;
#pragma unroll
  for (int operand = 0; operand < kMappedOperands; ++operand) offsets.of[operand] = row * map.strides[operand][0];
#pragma unroll
  for (int dim = 1; dim < kMaxLeadingDims; ++dim) {
    if (dim < map.dims) {
      int64_t index = outer;
      if (dim + 1 < map.dims) {
        const unsigned size = static_cast<unsigned>(map.sizes[dim]);
        index = outer % size;
        outer /= size;
      }
#pragma unroll
      for (int operand = 0; operand < kMappedOperands; ++operand) {
        offsets.of[operand] += index * map.strides[operand][dim];
      }
    }
  }
  return offsets;
}

// gate * x, in x.
template <bool kRoundEach, typename M, int kCount>
__device__ __forceinline__ void apply_gate(const float* gate, float* x) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    x[j] = exact_mul(gate[j], x[j]);
    if (kRoundEach) x[j] = rounded<M>(x[j]);
  }
}

// values * (offset + scale), in values.
template <bool kRoundEach, typename M, int kCount>
__device__ __forceinline__ void apply_scale(const float* scale, float offset, float* values) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    float factor = exact_add(scale[j], offset);
    if (kRoundEach) factor = rounded<M>(factor);
    values[j] = exact_mul(values[j], factor);
    if (kRoundEach) values[j] = rounded<M>(values[j]);
  }
}

// A row per kLanes threads, several rows per block; kLanes 0: a row per block. blockIdx.y counts the loops around
// the innermost one. x, the residual and the outputs are T; gate, scale and shift are M, which is T or float32.
// What a chain of torch ops rounds to M last of all is rounded to T at once, which comes to the same.
template <typename T, typename M, bool kGated, int kLanes, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) row_kernel(const ModulateParams p) {
  constexpr int kCount = kPacketSize<T>;
  __shared__ float2 pairs[kMaxWaves];
  __shared__ float singles[kMaxWaves];

  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const int64_t row = kLanes == 0 ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool inside = kLanes == 0 || row < p.map.sizes[0];
  const unsigned lanes = kLanes == 0 ? blockDim.x : kLanes;
  const unsigned packets = inside ? static_cast<unsigned>(p.size / kCount) : 0;
  const Offsets at = locate_nested(p.map, row, blockIdx.y);
  const bool has_gate = p.gate.data != nullptr;
  const bool has_scale = p.scale.data != nullptr;
  const bool has_shift = p.shift.data != nullptr;
  const auto each_packet = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const unsigned packet = threadIdx.x + i * lanes;
      if (packet < packets) body(i, packet);
    }
  };

  const uint4* const x = packets_of<T>(p.x.data, at.of[kX]);
  uint4 held[kPackets];
  if constexpr (kGated) {
    const uint4* const residual = packets_of<T>(p.residual.data, at.of[kResidual]);
    const uint4* const gate = packets_of<M>(p.gate.data, at.of[kGate]);
    uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(p.new_residual) + at.of[kOut]);
    uint4 residuals[kPackets];
    Raw<T, M> gates[kPackets];
    each_packet([&](int i, unsigned packet) {
      held[i] = load_once(x + packet);
      residuals[i] = load_once(residual + packet);
      if (has_gate) gates[i].load(gate, packet);
    });
    each_packet([&](int i, unsigned packet) {
      float values[kCount], others[kCount];
      unpack<T>(held[i], values);
      if (has_gate) {
        gates[i].unpack_to(others);
        if (p.round_each) {
          apply_gate<true, M, kCount>(others, values);
        } else {
          apply_gate<false, M, kCount>(others, values);
        }
      }
      unpack<T>(residuals[i], others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_add(others[j], values[j]);
      held[i] = pack_packet<T>(values);
      to[packet] = held[i];
    });
    if (p.out == nullptr) return;
  } else {
    each_packet([&](int i, unsigned packet) { held[i] = load_once(x + packet); });
  }

  // Before the sums, so that these loads are in flight while the threads wait for each other.
  const uint4* const scale = packets_of<M>(p.scale.data, at.of[kScale]);
  const uint4* const shift = packets_of<M>(p.shift.data, at.of[kShift]);
  Raw<T, M> scales[kPackets];
  Raw<T, M> shifts[kPackets];
  each_packet([&](int i, unsigned packet) {
    if (has_scale) scales[i].load(scale, packet);
    if (has_shift) shifts[i].load(shift, packet);
  });

  Normaliser normalise = no_norm();
  if (p.norm != NormKind::kNone) {
    const auto sum = [&](auto value) {
      if constexpr (kLanes != 0) {
        return group_sum<kLanes>(value);
      } else if constexpr (std::is_same_v<decltype(value), float2>) {
        return block_sum(value, pairs);
      } else {
        return block_sum(value, singles);
      }
    };
    normalise = normaliser_of(p, sum, [&](auto&& add) {
      each_packet([&](int i, unsigned) {
        float values[kCount];
        forget_unpacked(held[i]);
        unpack<T>(held[i], values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) add(values[j]);
      });
    });
  }

  uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(p.out) + at.of[kOut]);
  each_packet([&](int i, unsigned packet) {
    float values[kCount], others[kCount];
    forget_unpacked(held[i]);
    unpack<T>(held[i], values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = normalise(values[j]);
    if (p.weight.data != nullptr) {
      load_elements<kCount>(p.weight.data, p.weight.dtype, packet * kCount, others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], others[j]);
    }
    if (p.bias.data != nullptr) {
      load_elements<kCount>(p.bias.data, p.bias.dtype, packet * kCount, others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
    }
    if (has_scale) scales[i].unpack_to(others);
    if (p.round_each) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = rounded<T>(values[j]);
      if (has_scale) apply_scale<true, M, kCount>(others, p.scale_offset, values);
    } else if (has_scale) {
      apply_scale<false, M, kCount>(others, p.scale_offset, values);
    }
    if (has_shift) {
      shifts[i].unpack_to(others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
    }
    to[packet] = pack_packet<T>(values);
  });
}

// --- loop kernel ---------------------------------------------------------------------------------------

// kCount elements of a row, from the one numbered `at` on.
template <int kCount>
__device__ __forceinline__ void load_operand(const Operand& operand, int64_t row, int64_t at, float* to) {
  if (kCount == 1 || operand.aligned) {
    load_elements<kCount>(operand.data, operand.dtype, row + at * operand.stride, to);
  } else {
#pragma unroll 1
    for (int j = 0; j < kCount; ++j) {
      float element;
      load_elements<1>(operand.data, operand.dtype, row + (at + j) * operand.stride, &element);
      // Not to[j]: an index known only at run time would move the array to local memory.
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = i == j ? element : to[i];
    }
  }
}

template <int kCount>
__device__ __forceinline__ void round_to(Dtype dtype, float* values) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = rounded_to(dtype, values[j]);
}

// A part of x, or of the new residual, which is also stored.
template <int kCount>
__device__ __forceinline__ void load_input(const ModulateParams& p, const Offsets& row, int64_t at, float* values) {
  load_operand<kCount>(p.x, row.of[kX], at, values);
  if (p.residual.data == nullptr) return;
  float others[kCount];
  if (p.gate.data != nullptr) {
    load_operand<kCount>(p.gate, row.of[kGate], at, others);
    activate<kCount>(p.activation, others);
    round_to<kCount>(p.gate_round, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_mul(others[j], values[j]);
    round_to<kCount>(p.gated_round, values);
  }
  load_operand<kCount>(p.residual, row.of[kResidual], at, others);
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = exact_add(others[j], values[j]);
  round_to<kCount>(p.sum_round, values);
  store_elements<kCount>(values, p.new_residual, p.new_dtype, row.of[kOut] + at);
  round_to<kCount>(p.new_dtype, values);
}

// Modulates a normalised part of a row, and stores it.
template <int kCount>
__device__ __forceinline__ void finish(const ModulateParams& p, const Offsets& row, int64_t at, float* values) {
  float others[kCount];
  if (p.weight.data != nullptr) {
    load_operand<kCount>(p.weight, 0, at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], others[j]);
  }
  if (p.bias.data != nullptr) {
    load_operand<kCount>(p.bias, 0, at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
  }
  round_to<kCount>(p.norm_round, values);
  if (p.scale.data != nullptr) {
    load_operand<kCount>(p.scale, row.of[kScale], at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) others[j] = exact_add(others[j], p.scale_offset);
    round_to<kCount>(p.scale_round, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], others[j]);
    round_to<kCount>(p.product_round, values);
  }
  if (p.shift.data != nullptr) {
    load_operand<kCount>(p.shift, row.of[kShift], at, others);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
    round_to<kCount>(p.modulated_round, values);
  }
  store_elements<kCount>(values, p.out, p.out_dtype, row.of[kOut] + at);
}

constexpr int kLoopLanes = 32;
constexpr int kLoopThreads = 256;

// A row per block, or, where blockDim.y > 1, per kLoopLanes threads. kCount elements at a time.
template <int kCount>
__global__ void __launch_bounds__(kLoopThreads) loop_kernel(const ModulateParams p) {
  __shared__ float2 pairs[kMaxWaves];
  __shared__ float singles[kMaxWaves];
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kCount;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kCount;

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.map.rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int64_t size = row < p.map.rows ? p.size : 0;
    const Offsets offsets = locate(p.map, row < p.map.rows ? row : first);

    if (p.out == nullptr || p.norm == NormKind::kNone) {
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_input<kCount>(p, offsets, at, values);
        if (p.out != nullptr) finish<kCount>(p, offsets, at, values);
      }
      continue;
    }

    const auto sum = [&](auto value) {
      if constexpr (std::is_same_v<decltype(value), float2>) {
        return blockDim.y > 1 ? group_sum<kLoopLanes>(value) : block_sum(value, pairs);
      } else {
        return blockDim.y > 1 ? group_sum<kLoopLanes>(value) : block_sum(value, singles);
      }
    };
    // From the second pass on the new residual, of which each thread reads what it wrote, is there to be read.
    const bool gated = p.residual.data != nullptr;
    const Operand input = gated ? Operand{p.new_residual, p.new_dtype, 1, true} : p.x;
    const int64_t input_row = gated ? offsets.of[kOut] : offsets.of[kX];
    bool stored = !gated;
    const auto load = [&](int64_t at, float* values) {
      if (stored) {
        load_operand<kCount>(input, input_row, at, values);
      } else {
        load_input<kCount>(p, offsets, at, values);
      }
    };
    const auto fold = [&](auto&& add) {
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load(at, values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) add(values[j]);
      }
      stored = true;
    };
    const Normaliser normalise = normaliser_of(p, sum, fold);
    for (int64_t at = begin; at < size; at += step) {
      float values[kCount];
      load(at, values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = normalise(values[j]);
      finish<kCount>(p, offsets, at, values);
    }
    if (blockDim.y == 1) __syncthreads();  // before the partial sums are used again
  }
}

// --- launches ------------------------------------------------------------------------------------------

constexpr int64_t kMaxBlocks = 0x7fffffff;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

unsigned blocks_for(int64_t rows, int64_t rows_per_block) {
  return static_cast<unsigned>(std::min(kMaxBlocks, ceil_div(rows, rows_per_block)));
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPacketBytes == 0; }

// Whether all rows of an operand begin at a multiple of 16 bytes and are contiguous. Without a map: one row.
bool aligned_rows(const Operand& operand, const LeadingMap<kMappedOperands>& map, int index) {
  if (operand.stride != 1 || !aligned(operand.data)) return false;
  const int64_t packet = kPacketBytes / bytes_of(operand.dtype);
  for (int dim = 0; index >= 0 && dim < map.dims; ++dim) {
    if (map.strides[index][dim] % packet != 0) return false;
  }
  return true;
}

void find_alignment(ModulateParams* p) {
  const auto mark = [&](Operand* operand, int index) {
    operand->aligned = operand->data != nullptr && aligned_rows(*operand, p->map, index);
  };
  mark(&p->x, kX);
  mark(&p->residual, kResidual);
  mark(&p->gate, kGate);
  mark(&p->scale, kScale);
  mark(&p->shift, kShift);
  mark(&p->weight, -1);
  mark(&p->bias, -1);
}

bool usable(const Operand& operand) { return operand.data == nullptr || operand.aligned; }

// Whether x, residual and outputs can be walked in steps of `count` elements.
bool vectorisable(const ModulateParams& p, int64_t count) {
  return p.size % count == 0 && p.x.aligned && usable(p.residual) && aligned(p.new_residual) && aligned(p.out);
}

// The dtype that all modulation tensors of the call have, kNone where they differ; that of x where there are none.
Dtype modulation_dtype(const ModulateParams& p) {
  Dtype found = Dtype::kNone;
  for (const Operand* operand : {&p.gate, &p.scale, &p.shift}) {
    if (operand->data == nullptr) continue;
    if (found != Dtype::kNone && operand->dtype != found) return Dtype::kNone;
    found = operand->dtype;
  }
  return found == Dtype::kNone ? p.x.dtype : found;
}

// Whether the row kernel has code for the dtypes and layouts of a call.
bool regular(const ModulateParams& p, Dtype modulation) {
  const Dtype dtype = p.x.dtype;
  if (modulation != dtype && modulation != Dtype::kFloat32) return false;
  if (p.residual.data != nullptr && (p.residual.dtype != dtype || p.new_dtype != dtype)) return false;
  if (p.out != nullptr && p.out_dtype != dtype) return false;
  // The code for it, once per element that a thread holds, would cost the others their registers.
  if (p.activation != GateActivation::kNone) return false;
  // Only scalar tensors make a chain of torch ops round elsewhere than the row kernel does.
  if (p.round_each) {
    if (p.gate.data != nullptr && p.gated_round != modulation) return false;
    if (p.scale.data != nullptr && p.product_round != modulation) return false;
    if (p.shift.data != nullptr && p.modulated_round != modulation) return false;
  }
  constexpr int64_t kMaxOuterBlocks = 65535;
  if (p.map.sizes[0] > kMaxBlocks || p.map.rows / p.map.sizes[0] > kMaxOuterBlocks) return false;
  return vectorisable(p, kPacketBytes / bytes_of(dtype)) && usable(p.gate) && usable(p.scale) && usable(p.shift) &&
         usable(p.weight) && usable(p.bias);
}

constexpr int kConfigCount = static_cast<int>(std::size(kModulateConfigs));

// The first configuration that holds the row, or -1.
int choose_config(int64_t row_packets) {
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_MODULATE_CONFIG")) return std::atoi(chosen);
#endif
  for (int index = 0; index < kConfigCount; ++index) {
    if (kModulateConfigs[index].fits(row_packets)) return index;
  }
  return -1;
}

template <typename T, typename M, int kIndex>
bool launch_row_kernel(const ModulateParams& p, int index, int64_t row_packets, GpuStream stream) {
  if (index != kIndex) return false;
  constexpr RowConfig config = kModulateConfigs[kIndex];
  dim3 block;
  if constexpr (config.lanes == 0) {
    block = dim3(static_cast<unsigned>(ceil_div(ceil_div(row_packets, config.packets), kWaveMultiple) * kWaveMultiple));
  } else {
    block = dim3(config.lanes, config.threads / config.lanes);
  }
  const int64_t inner = p.map.sizes[0];
  const dim3 grid(static_cast<unsigned>(ceil_div(inner, block.y)), static_cast<unsigned>(p.map.rows / inner));
  if (p.residual.data != nullptr) {
    row_kernel<T, M, true, config.lanes, config.packets, config.threads><<<grid, block, 0, stream>>>(p);
  } else {
    row_kernel<T, M, false, config.lanes, config.packets, config.threads><<<grid, block, 0, stream>>>(p);
  }
  return true;
}

template <typename T, typename M, int... kIndices>
bool launch_row_kernel(const ModulateParams& p, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  const int64_t row_packets = p.size / kPacketSize<T>;
  const int index = choose_config(row_packets);
  return (launch_row_kernel<T, M, kIndices>(p, index, row_packets, stream) || ...);
}

// False if no configuration holds the row.
template <typename T>
bool launch_row_kernel(const ModulateParams& p, Dtype modulation, GpuStream stream) {
  constexpr auto kIndices = std::make_integer_sequence<int, kConfigCount>{};
  if (modulation == Dtype::kFloat32) return launch_row_kernel<T, float>(p, kIndices, stream);
  return launch_row_kernel<T, T>(p, kIndices, stream);
}

template <int kCount>
void launch_loop_kernel(const ModulateParams& p, GpuStream stream) {
  const int64_t items_per_thread = p.norm == NormKind::kNone ? 1 : 4;  // or more, in a loop
  const int64_t wanted = ceil_div(ceil_div(p.size, kCount), items_per_thread);
  dim3 block(kLoopLanes, kLoopThreads / kLoopLanes);
  if (wanted > kLoopLanes) {
    block = dim3(static_cast<unsigned>(std::min<int64_t>(kLoopThreads, ceil_div(wanted, kWaveMultiple) * kWaveMultiple)));
  }
  loop_kernel<kCount><<<blocks_for(p.map.rows, block.y), block, 0, stream>>>(p);
}

bool launch_row_kernel(const ModulateParams& p, GpuStream stream) {
  const Dtype modulation = modulation_dtype(p);
  if (!regular(p, modulation)) return false;
  switch (p.x.dtype) {
    case Dtype::kFloat16: return launch_row_kernel<Half>(p, modulation, stream);
    case Dtype::kBFloat16: return launch_row_kernel<BFloat16>(p, modulation, stream);
    default: return launch_row_kernel<float>(p, modulation, stream);
  }
}

}  // namespace

int modulate_gpu(const ModulateParams& params, void* stream_pointer) {
  const GpuStream stream = static_cast<GpuStream>(stream_pointer);
  constexpr int kLoopCount = 8;
  ModulateParams p = params;
  find_alignment(&p);
  if (!launch_row_kernel(p, stream)) {
    if (vectorisable(p, kLoopCount)) {
      launch_loop_kernel<kLoopCount>(p, stream);
    } else {
      launch_loop_kernel<1>(p, stream);
    }
  }
  return last_launch_error();
}

}  // namespace diffkern
