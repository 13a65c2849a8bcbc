#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flatshard::kernels {

/// See NarrowRows; pointers are of the device.
struct NarrowRowsArgs {
  const std::int64_t* windows;
  const std::int32_t* runs;
  std::uint32_t* here;
  std::int64_t in_window;
  std::int64_t num_rows;
  int num_ranks;
  int num_runs;
  int words;  ///< of 4 bytes, of a row
};

/// @param gathers  from the windows to `here`; false: the other way.
cudaError_t
copy_narrow_rows(const NarrowRowsArgs& args, bool gathers, cudaStream_t stream);

}  // namespace flatshard::kernels
