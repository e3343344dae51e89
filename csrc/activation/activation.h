// Activations and gated units: what the torch binding asks of the CPU and of the GPU kernels.
#pragma once

#include "../common/activation.h"
#include "../common/dtypes.h"
#include "../common/leading_map.h"

namespace diffkern {

enum ActivationOperand : int { kOut, kGate, kValue, kActivationOperands };

// out = activation(gate), or value * activation(gate) where there is a value. All in float32, rounded once; with
// round_activation also between the activation and the product, to the dtype of gate.
struct ActivationParams {
  const void* gate;
  const void* value;  // or null
  void* out;
  Dtype gate_dtype;
  Dtype value_dtype;
  Dtype out_dtype;
  Activation activation;
  bool round_activation;
  int64_t size;                          // of a run: elements that are equally spaced in all operands
  int64_t steps[kActivationOperands];    // from one to the next
  LeadingMap<kActivationOperands> runs;  // where the runs begin
};

namespace {  // internal linkage: the same header is compiled for several instruction sets

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

// On the CPU runs are cut into pieces, so that one long run can be shared among threads.
constexpr int64_t kPieceSize = 8192;

inline int64_t pieces_of(const ActivationParams& params) { return params.runs.rows * ceil_div(params.size, kPieceSize); }

// Computes the pieces [begin, end) with the best instruction set of this CPU.
void activation_cpu(const ActivationParams& params, int64_t begin, int64_t end);

// Enqueues everything on a CUDA or HIP stream of the current device; returns the runtime's error code.
int activation_gpu(const ActivationParams& params, void* stream);

enum RowOperand : int { kRowOfOut, kRowOfX, kRowOfFront, kRowOperands };

// out = [front, activation(x)] in rows of e4m3, one after another, and the scale of each. In float32, rounded once.
struct ActivationRows8 {
  const void* x;
  const void* front;  // or null
  uint8_t* out;
  float* scales;
  Dtype dtype;
  Activation activation;         // kNone for x itself
  int64_t size;                  // of a row, the front counted
  int64_t front_size;            // 0 without one
  int64_t x_step;                // from one element to the next
  int64_t front_step;
  LeadingMap<kRowOperands> map;  // where the rows begin
};

// The same on a stream of NVIDIA's GPUs.
int activation_rows8_gpu(const ActivationRows8& params, void* stream);

// A gated unit, whose runs are the rows of its last dimension, and these rows once more in e4m3: of the numbers that
// were stored. All operands have one dtype; rows and scales lie one after another, as out does.
struct GluRows8 {
  ActivationParams glu;
  uint8_t* rows;
  float* scales;
};

int glu_rows8_gpu(const GluRows8& params, void* stream);

}  // namespace diffkern
