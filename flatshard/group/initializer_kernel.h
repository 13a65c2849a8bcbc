#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/core/init_spec.h"
#include "flatshard/device/float_dtype.h"

namespace flatshard::kernels {

/// The elements of a box: runs of a flattened parameter, one after the other.
struct DrawnRuns {
  const std::int64_t* begins = nullptr;  ///< [size] on the GPU; null: one run
  std::int64_t begin = 0;                ///< of one run
  std::int64_t numel = 0;                ///< of each run
  std::int64_t size = 1;
};

/// Draws the values of runs, block i of Philox for elements 4 i to 4 i + 3.
/// @param out  [runs.size * runs.numel] on the GPU.
cudaError_t draw_runs(
    void* out,
    FloatDtype dtype,
    std::uint64_t key,
    const InitSpec& spec,
    const DrawnRuns& runs,
    cudaStream_t stream);

}  // namespace flatshard::kernels
