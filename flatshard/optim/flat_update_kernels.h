#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/float8/flat_run.h"
#include "flatshard/float8/formats.h"
#include "flatshard/optim/update_step.h"

namespace flatshard::kernels {

/// See Float8Outputs.
struct Float8Pointers {
  const float8::FlatRun* runs = nullptr;
  int num_runs = 0;
  float* amax = nullptr;
  std::uint8_t* data = nullptr;
  std::uint8_t* scales = nullptr;
  float8::Rounding rounding = float8::Rounding::up;
};

enum class Dtype { none, float32, bfloat16, float16 };

/// Device pointers of one FlatUpdate. All of them are 16-byte aligned: flat
/// shards are multiples of 16 elements.
struct FlatUpdatePointers {
  float* main = nullptr;
  void* compute = nullptr;
  Dtype compute_dtype = Dtype::none;
  const void* grad = nullptr;
  Dtype grad_dtype = Dtype::float32;
  float* state0 = nullptr;
  float* state1 = nullptr;
  const float* grad_scale = nullptr;
  std::int64_t numel = 0;
  UpdateRow row;  ///< of all elements when num_ranges is 0
  const UpdateRange* ranges = nullptr;
  const UpdateRow* rows = nullptr;
  int num_ranges = 0;
  Float8Pointers float8;
};

void adamw(const FlatUpdatePointers& pointers, cudaStream_t stream);
void sgd(const FlatUpdatePointers& pointers, cudaStream_t stream);

}  // namespace flatshard::kernels
