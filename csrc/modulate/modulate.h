// Modulated norms and gated residuals over rows: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/dtypes.h"
#include "../common/leading_map.h"

namespace diffkern {

enum class NormKind : int32_t { kNone, kRms, kLayer };
enum class GateActivation : int32_t { kNone, kTanh, kSigmoid };

// The operands that have a map of their own from rows to memory.
enum MappedOperand : int { kOut, kNew, kX, kResidual, kGate, kScale, kShift, kMappedOperands };

// A tensor as the kernels read it.
struct Operand {
  const void* data;  // null if there is none
  Dtype dtype;
  int64_t stride;  // from one element of a row to the next; 0 where the row repeats one element
  bool aligned;    // whether rows can be read in packets of 16 bytes; the GPU's launch finds out
};

// new_residual = residual + act(gate) * x, where there is a residual, and
// out          = (norm(v) * weight + bias) * (scale_offset + scale) + shift, where there is an out or rows8,
// with v the new residual as it is written, or x. An operand that is not there leaves its step out.
//
// All in float32, products and sums one after the other. The *_round dtypes say where values are rounded on
// the way: a half dtype, or anything else for nowhere.
struct ModulateParams {
  Operand x;
  Operand residual;
  Operand gate;
  Operand scale;
  Operand shift;
  Operand weight;  // no map: the same for all rows
  Operand bias;
  void* new_residual;  // contiguous, by kNew
  void* out;           // its rows are contiguous, and each sample may have others around them
  uint8_t* rows8;     // out as rows of e4m3, in its place or beside it; on NVIDIA's GPUs
  float* row_scales;  // and the scale of each
  Dtype new_dtype;
  Dtype out_dtype;
  bool round_each;       // whether any of the following is set
  Dtype gate_round;      // act(gate)
  Dtype gated_round;     // its product with x
  Dtype sum_round;       // the sum with residual, before it is rounded to new_dtype
  Dtype norm_round;      // norm(v) * weight + bias
  Dtype scale_round;     // scale_offset + scale
  Dtype product_round;   // their product
  Dtype modulated_round; // the sum with shift, before it is rounded to out_dtype
  NormKind norm;
  GateActivation activation;
  float eps;
  float scale_offset;
  int64_t size;        // of a row
  float inverse_size;  // 1 / size
  LeadingMap<kMappedOperands> map;
};

// Computes the rows [begin, end) with the best instruction set of this CPU.
void modulate_cpu(const ModulateParams& params, int64_t begin, int64_t end);

// Enqueues all rows on a CUDA or HIP stream of the current device; returns the runtime's error code.
int modulate_gpu(const ModulateParams& params, void* stream);

}  // namespace diffkern
