#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "flatshard/device/cuda_scope.h"
#include "flatshard/exchange/backend.h"
#include "flatshard/exchange/narrow_rows_kernel.h"

namespace flatshard::detail {

void cuda_copy_narrow_rows(const NarrowRows& rows, void* here, bool gathers) {
  const CudaDeviceScope scope(rows.runs.device());
  C10_CUDA_CHECK(kernels::copy_narrow_rows(
      {.windows = rows.windows.const_data_ptr<std::int64_t>(),
       .runs = rows.runs.const_data_ptr<std::int32_t>(),
       .here = static_cast<std::uint32_t*>(here),
       .in_window = rows.in_window,
       .num_rows = rows.num_rows,
       .num_ranks = static_cast<int>(rows.windows.numel()),
       .num_runs = static_cast<int>(rows.runs.size(1) - 1),
       .words = static_cast<int>(rows.row_nbytes / 4)},
      gathers,
      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace flatshard::detail
