// CUDA and HIP kernels for modulated norms and gated residuals.
//
//  row kernel:  contiguous aligned rows of one dtype, modulated in that dtype or in float32. Everything is read
//               once and kept in registers. The fast path.
//  loop kernel: any dtypes, alignment, element strides, size and activation; a norm reads its row again, from
//               the caches.
//
// Inputs and outputs pass the first-level cache by; it is left to modulation rows, which many rows share.
#include <algorithm>
#include <array>
#include <iterator>
#include <type_traits>
#include <utility>

#if defined(DIFFKERN_BENCH)
#include <cstdlib>
#endif

#include "../common/gpu_rows8.h"
#include "../common/gpu_vector.h"
#include "../common/packet_map.h"
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
// Params: ModulateParams or RowParams.
template <typename Params, typename Sum, typename Fold>
__device__ __forceinline__ Normaliser normaliser_of(const Params& p, Sum&& sum, Fold&& fold) {
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

// ModulateParams as the row kernel reads them: rows and what they are made of counted in packets.
struct RowParams {
  const uint4* x;
  const uint4* residual;
  const uint4* gate;
  const uint4* scale;
  const uint4* shift;
  Operand weight;
  Operand bias;
  uint4* new_residual;
  uint4* out;
  uint8_t* rows8;
  float* row_scales;
  uint32_t rows;
  uint32_t packets;  // of a row
  float inverse_size;
  float eps;
  float scale_offset;
  NormKind norm;
  int round_each;
  PacketMap<kMappedOperands> map;
};

// gate * x, in x.
template <bool kRoundEach, typename M, int kCount>
__device__ __forceinline__ void apply_gate(const float* gate, float* x) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = exact_mul(gate[j], x[j]);
  if (kRoundEach) round_values<M, kCount>(x);
}

// values * (offset + scale), in values; scale is used up.
template <bool kRoundEach, typename M, int kCount>
__device__ __forceinline__ void apply_scale(float* scale, float offset, float* values) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) scale[j] = exact_add(scale[j], offset);
  if (kRoundEach) round_values<M, kCount>(scale);
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = exact_mul(values[j], scale[j]);
  if (kRoundEach) round_values<M, kCount>(values);
}

// A row per kLanes threads, several rows per block; kLanes 0: a row per block. x, the residual and the outputs are T;
// gate, scale and shift are M, which is T or float32. What a chain of torch ops rounds to M last of all is rounded to T
// at once, which comes to the same. With kRows8 the modulated norm is written in 8 bits.
template <typename T, typename M, bool kGated, bool kRows8, int kLanes, int kPackets, int kThreads>
__global__ void __launch_bounds__(kThreads) row_kernel(const RowParams p) {
  constexpr int kCount = kPacketSize<T>;
  constexpr int kWords = Raw<T, M>::kWords;
  constexpr int kWaves = kPowerOfTwo<kThreads / kWaveSize>;
  __shared__ float2 pairs[kWaves];
  __shared__ float singles[kWaves];

  // All threads go through all steps, since shuffles need whole waves; those past the end touch no memory.
  const uint32_t row = kLanes == 0 ? blockIdx.x : blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned lanes = kLanes == 0 ? blockDim.x : kLanes;
  const unsigned packets = kLanes == 0 || row < p.rows ? p.packets : 0;
  const auto at = p.map.locate(row);
  const auto each_packet = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const unsigned packet = threadIdx.x + i * lanes;
      if (packet < packets) body(i, packet);
    }
  };

  uint4 held[kPackets];
  if constexpr (kGated) {
    uint4 residuals[kPackets];
    Raw<T, M> gates[kPackets];
    each_packet([&](int i, unsigned packet) {
      held[i] = load_once(p.x + (at.of[kX] + packet));
      residuals[i] = load_once(p.residual + (at.of[kResidual] + packet));
      if (p.gate != nullptr) gates[i].load(p.gate + (at.of[kGate] + packet * kWords), 0);
    });
    each_packet([&](int i, unsigned packet) {
      float values[kCount], others[kCount];
      unpack<T>(held[i], values);
      if (p.gate != nullptr) {
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
      p.new_residual[at.of[kOut] + packet] = held[i];
    });
    if (!kRows8 && p.out == nullptr) return;
  } else {
    each_packet([&](int i, unsigned packet) { held[i] = load_once(p.x + (at.of[kX] + packet)); });
  }

  // Before the sums, so that these loads are in flight while the threads wait for each other.
  Raw<T, M> scales[kPackets];
  Raw<T, M> shifts[kPackets];
  each_packet([&](int i, unsigned packet) {
    if (p.scale != nullptr) scales[i].load(p.scale + (at.of[kScale] + packet * kWords), 0);
    if (p.shift != nullptr) shifts[i].load(p.shift + (at.of[kShift] + packet * kWords), 0);
  });

  Normaliser normalise = no_norm();
  if (p.norm != NormKind::kNone) {
    const auto sum = [&](auto value) {
      if constexpr (kLanes != 0) {
        return group_sum<kLanes>(value);
      } else if constexpr (std::is_same_v<decltype(value), float2>) {
        return block_sum<kWaves>(value, pairs);
      } else {
        return block_sum<kWaves>(value, singles);
      }
    };
    normalise = normaliser_of(p, sum, [&](auto&& add) {
      each_packet([&](int i, unsigned) {
        float values[kCount];
        optimization_barrier(held[i]);
        unpack<T>(held[i], values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) add(values[j]);
      });
    });
  }

  const auto modulate = [&](int i, unsigned packet, float* values) {
    float others[kCount];
    optimization_barrier(held[i]);
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
    if (p.round_each) round_values<T, kCount>(values);
    if (p.scale != nullptr) {
      scales[i].unpack_to(others);
      if (p.round_each) {
        apply_scale<true, M, kCount>(others, p.scale_offset, values);
      } else {
        apply_scale<false, M, kCount>(others, p.scale_offset, values);
      }
    }
    if (p.shift != nullptr) {
      shifts[i].unpack_to(others);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = exact_add(values[j], others[j]);
    }
  };
  if constexpr (kRows8) {
#if !DIFFKERN_HIP
    __shared__ float peaks[kWaves];
    float values[kPackets][kCount];
    float peak = 0.0f;
    each_packet([&](int i, unsigned packet) {
      modulate(i, packet, values[i]);
      peak = peak_of<kCount>(values[i], peak);
    });
    if constexpr (kLanes != 0) {
      peak = group_max<kLanes>(peak);
    } else {
      peak = block_max<kWaves>(peak, peaks);
    }
    const RowScale scale = row_scale(peak);
    each_packet([&](int i, unsigned packet) {
      const auto index = static_cast<int64_t>(at.of[kOut]) + packet;
      store_rows8<kCount>(values[i], scale.factor, p.rows8 + index * kCount);
    });
    if (threadIdx.x == 0 && row < p.rows) p.row_scales[row] = scale.scale;
#endif
  } else {
    each_packet([&](int i, unsigned packet) {
      float values[kCount];
      modulate(i, packet, values);
      p.out[at.of[kOut] + packet] = pack_packet<T>(values);
    });
  }
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

// Modulates a normalised part of a row.
template <int kCount>
__device__ __forceinline__ void modulate(const ModulateParams& p, const Offsets& row, int64_t at, float* values) {
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
}

// The same, and stores it.
template <int kCount>
__device__ __forceinline__ void finish(const ModulateParams& p, const Offsets& row, int64_t at, float* values) {
  modulate<kCount>(p, row, at, values);
  store_elements<kCount>(values, p.out, p.out_dtype, row.of[kOut] + at);
}

constexpr int kLoopLanes = 32;
constexpr int kLoopThreads = 256;

// A row per block, or, where blockDim.y > 1, per kLoopLanes threads. kCount elements at a time.
template <int kCount, bool kRows8>
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

    if (!kRows8 && (p.out == nullptr || p.norm == NormKind::kNone)) {
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
    Normaliser normalise = no_norm();
    if (!kRows8 || p.norm != NormKind::kNone) {
      normalise = normaliser_of(p, sum, fold);
    } else if (gated) {
      fold([](float) {});  // which stores the new residual
    }
    const auto load_normalised = [&](int64_t at, float* values) {
      load(at, values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = normalise(values[j]);
    };
    if constexpr (kRows8) {
#if !DIFFKERN_HIP
      __shared__ float peaks[kMaxWaves];
      float peak = 0.0f;
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_normalised(at, values);
        modulate<kCount>(p, offsets, at, values);
        peak = peak_of<kCount>(values, peak);
      }
      peak = blockDim.y > 1 ? group_max<kLoopLanes>(peak) : block_max(peak, peaks);
      const RowScale scale = row_scale(peak);
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_normalised(at, values);
        modulate<kCount>(p, offsets, at, values);
        store_rows8<kCount>(values, scale.factor, p.rows8 + offsets.of[kOut] + at);
      }
      if (threadIdx.x == 0 && row < p.map.rows) p.row_scales[row] = scale.scale;
#endif
    } else {
      for (int64_t at = begin; at < size; at += step) {
        float values[kCount];
        load_normalised(at, values);
        finish<kCount>(p, offsets, at, values);
      }
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

int64_t packet_count(Dtype dtype) { return kPacketBytes / bytes_of(dtype); }

// Whether all rows of an operand begin at a multiple of 16 bytes and are contiguous. Without a map: one row.
bool aligned_rows(const Operand& operand, const LeadingMap<kMappedOperands>& map, int index) {
  if (operand.stride != 1 || !aligned(operand.data)) return false;
  const int64_t packet = packet_count(operand.dtype);
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

// Elements in a packet of each operand.
std::array<int64_t, kMappedOperands> packet_counts(Dtype dtype, Dtype modulation) {
  std::array<int64_t, kMappedOperands> counts;
  counts[kOut] = counts[kX] = counts[kResidual] = packet_count(dtype);
  counts[kGate] = counts[kScale] = counts[kShift] = packet_count(modulation);
  return counts;
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
  if (!vectorisable(p, packet_count(dtype)) || !usable(p.gate) || !usable(p.scale) || !usable(p.shift)) return false;
  if (!usable(p.weight) || !usable(p.bias)) return false;
  return PacketMap<kMappedOperands>::holds(p.map, packet_counts(dtype, modulation), p.size / packet_count(modulation));
}

RowParams row_params(const ModulateParams& p, Dtype modulation) {
  const auto packets_at = [](const void* data) { return static_cast<const uint4*>(data); };
  return {packets_at(p.x.data),
          packets_at(p.residual.data),
          packets_at(p.gate.data),
          packets_at(p.scale.data),
          packets_at(p.shift.data),
          p.weight,
          p.bias,
          static_cast<uint4*>(p.new_residual),
          static_cast<uint4*>(p.out),
          p.rows8,
          p.row_scales,
          static_cast<uint32_t>(p.map.rows),
          static_cast<uint32_t>(p.size / packet_count(p.x.dtype)),
          p.inverse_size,
          p.eps,
          p.scale_offset,
          p.norm,
          p.round_each,
          PacketMap<kMappedOperands>(p.map, packet_counts(p.x.dtype, modulation))};
}

constexpr int kConfigCount = static_cast<int>(std::size(kModulateConfigs));

// The first configuration that holds the row, or -1.
int choose_config(const RowParams& p) {
#if defined(DIFFKERN_BENCH)
  if (const char* chosen = std::getenv("DIFFKERN_MODULATE_CONFIG")) return std::atoi(chosen);
#endif
  const bool many = static_cast<int64_t>(p.rows) * p.packets > kFewPackets;
  for (int index = 0; index < kConfigCount; ++index) {
    if (many && index == kFewRowsConfig) continue;
    if (kModulateConfigs[index].fits(p.packets)) return index;
  }
  return -1;
}

template <typename T, typename M, bool kRows8, int kIndex>
bool launch_row_kernel(const RowParams& p, int index, bool gated, GpuStream stream) {
  if (index != kIndex) return false;
  constexpr RowConfig config = kModulateConfigs[kIndex];
  dim3 block;
  if constexpr (config.lanes == 0) {
    block = dim3(static_cast<unsigned>(ceil_div(ceil_div(p.packets, config.packets), kWaveMultiple) * kWaveMultiple));
  } else {
    block = dim3(config.lanes, config.threads / config.lanes);
  }
  const unsigned blocks = blocks_for(p.rows, block.y);
  if (gated) {
    row_kernel<T, M, true, kRows8, config.lanes, config.packets, config.threads><<<blocks, block, 0, stream>>>(p);
  } else {
    row_kernel<T, M, false, kRows8, config.lanes, config.packets, config.threads><<<blocks, block, 0, stream>>>(p);
  }
  return true;
}

template <typename T, typename M, bool kRows8, int... kIndices>
bool launch_row_kernel(const RowParams& p, bool gated, std::integer_sequence<int, kIndices...>, GpuStream stream) {
  const int index = choose_config(p);
  return (launch_row_kernel<T, M, kRows8, kIndices>(p, index, gated, stream) || ...);
}

// False if no configuration holds the row.
template <typename T, bool kRows8>
bool launch_row_kernel(const ModulateParams& p, Dtype modulation, GpuStream stream) {
  constexpr auto kIndices = std::make_integer_sequence<int, kConfigCount>{};
  const RowParams params = row_params(p, modulation);
  const bool gated = p.residual.data != nullptr;
  if (modulation == Dtype::kFloat32) return launch_row_kernel<T, float, kRows8>(params, gated, kIndices, stream);
  return launch_row_kernel<T, T, kRows8>(params, gated, kIndices, stream);
}

template <int kCount, bool kRows8>
void launch_loop_kernel(const ModulateParams& p, GpuStream stream) {
  const int64_t items_per_thread = p.norm == NormKind::kNone ? 1 : 4;  // or more, in a loop
  const int64_t wanted = ceil_div(ceil_div(p.size, kCount), items_per_thread);
  dim3 block(kLoopLanes, kLoopThreads / kLoopLanes);
  if (wanted > kLoopLanes) {
    block = dim3(static_cast<unsigned>(std::min<int64_t>(kLoopThreads, ceil_div(wanted, kWaveMultiple) * kWaveMultiple)));
  }
  loop_kernel<kCount, kRows8><<<blocks_for(p.map.rows, block.y), block, 0, stream>>>(p);
}

bool launch_row_kernel(const ModulateParams& p, GpuStream stream) {
  const Dtype modulation = modulation_dtype(p);
  if (!regular(p, modulation)) return false;
#if !DIFFKERN_HIP
  // Products of rows of 8 bits give bfloat16, and so that is what is made into such rows.
  if (p.rows8 != nullptr) {
    return p.x.dtype == Dtype::kBFloat16 && launch_row_kernel<BFloat16, true>(p, modulation, stream);
  }
#endif
  switch (p.x.dtype) {
    case Dtype::kFloat16: return launch_row_kernel<Half, false>(p, modulation, stream);
    case Dtype::kBFloat16: return launch_row_kernel<BFloat16, false>(p, modulation, stream);
    default: return launch_row_kernel<float, false>(p, modulation, stream);
  }
}

template <int kCount>
void launch_loop_kernel(const ModulateParams& p, GpuStream stream) {
#if !DIFFKERN_HIP
  if (p.rows8 != nullptr) return launch_loop_kernel<kCount, true>(p, stream);
#endif
  launch_loop_kernel<kCount, false>(p, stream);
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
