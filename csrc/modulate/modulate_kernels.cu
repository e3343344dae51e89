// CUDA and HIP kernels for modulated norms and gated residuals.
//
//  row kernel:  contiguous aligned rows of one dtype (modulate_row_kernel.h). The fast path.
//  loop kernel: everything else (modulate_loop_kernel.h).
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
#include "modulate_loop_kernel.h"
#include "modulate_row_kernel.h"

namespace diffkern {
namespace {

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
  counts[kOut] = counts[kNew] = counts[kX] = counts[kResidual] = packet_count(dtype);
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
