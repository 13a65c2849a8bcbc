#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/device/float_dtype.h"
#include "flatshard/float8/flat_run.h"
#include "flatshard/float8/formats.h"
#include "flatshard/optim/parameter_values.h"
#include "flatshard/optim/state_format.h"
#include "flatshard/optim/stochastic_rounding.h"
#include "flatshard/optim/update_step.h"

namespace flatshard::kernels {

/// See PlaneWriter.
struct Float8Pointers {
  const float8::FlatRun* runs = nullptr;
  int num_runs = 0;
  float* amax = nullptr;
  std::uint8_t* data = nullptr;
  std::uint8_t* scales = nullptr;
  float8::Rounding rounding = float8::Rounding::up;
};

/// See StateTensors.
struct StatePointers {
  float* float32 = nullptr;
  void* bfloat16 = nullptr;
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
};

/// Device pointers of one FlatUpdate. All of them are 16-byte aligned: flat
/// shards are multiples of 16 elements.
struct FlatUpdatePointers {
  void* main = nullptr;
  FloatDtype main_dtype = FloatDtype::float32;
  void* compute = nullptr;  ///< null: none
  FloatDtype compute_dtype = FloatDtype::float32;
  const void* grad = nullptr;
  FloatDtype grad_dtype = FloatDtype::float32;
  float* state0 = nullptr;
  float* state1 = nullptr;
  const float* grad_scale = nullptr;
  std::int64_t numel = 0;
  UpdateRow row;  ///< of all elements when num_ranges is 0
  const UpdateRange* ranges = nullptr;
  const UpdateRow* rows = nullptr;
  int num_ranges = 0;
  Float8Pointers float8;

  // AdamW: see FlatUpdate. Without state ranges, exp_avg and exp_avg_sq are
  // float32.
  const StateRange* state_ranges = nullptr;
  int num_state_ranges = 0;
  StatePointers exp_avg;
  StatePointers exp_avg_sq;
  const RoundingRange* rounding_ranges = nullptr;
  int num_rounding_ranges = 0;
  std::uint64_t rounding_step = 0;
};

/// float32 states and main weights.
void flat_update(
    Algorithm algorithm,
    const FlatUpdatePointers& pointers,
    cudaStream_t stream);
/// AdamW with states in any format, main weights in float32 or bfloat16. A warp
/// has a block of kStateBlock elements: it reads and writes each byte once.
/// Writes no FP8.
void adamw_states(const FlatUpdatePointers& pointers, cudaStream_t stream);

/// Arguments of muon_direction. Pointers may have any alignment.
struct MuonDirection {
  const void* grad = nullptr;
  bool is_bfloat16 = false;  ///< `grad`; otherwise float32
  const float* grad_scale = nullptr;
  float* buffer = nullptr;
  void* direction = nullptr;  ///< bfloat16
  float momentum = 0;
  float rest = 1;  ///< 1 - momentum
  bool nesterov = true;
  std::int64_t numel = 0;
};
void muon_direction(const MuonDirection& args, cudaStream_t stream);

/// Arguments of muon_apply.
struct MuonApply {
  float* main = nullptr;
  void* compute = nullptr;  ///< bfloat16, or null
  const void* direction = nullptr;
  float keep = 1;
  float step = 0;
  std::int64_t numel = 0;
};
void muon_apply(const MuonApply& args, cudaStream_t stream);

/// Copies the elements below the diagonal of a [rows, rows] bfloat16 matrix to
/// their mirrored places.
/// @param rows  a multiple of 64.
void mirror_lower(void* matrix, int rows, cudaStream_t stream);

}  // namespace flatshard::kernels
