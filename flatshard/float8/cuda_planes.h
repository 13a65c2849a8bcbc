#pragma once

#include <functional>

#include "flatshard/float8/grid.h"
#include "flatshard/float8/kernels/float8_kernels.h"

// Planes in the form of kernels, also for other folders whose values are
// computed where they are quantized. Exists with CUDA only.
namespace flatshard::float8::cuda {

/// Returns null for a plane that is not requested.
kernels::PlanePointers pointers_of(const PlaneView* view);

/// Kernels that find largest magnitudes: into one zero; into a zero for each
/// row and each column, where one pointer may be null.
struct AmaxKernels {
  std::function<void(float* all)> all;
  std::function<void(float* rows, float* columns)> rows_and_columns;
};

/// Sets the missing amax of tensorwise and rowwise planes, from the values
/// themselves.
/// @return memory to keep until the kernel that reads it is queued.
at::Tensor find_amax(
    std::int64_t rows,
    std::int64_t columns,
    at::Device device,
    const AmaxKernels& find,
    kernels::Quantize& args);

}  // namespace flatshard::float8::cuda
