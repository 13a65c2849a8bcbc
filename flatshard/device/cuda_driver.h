#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace flatshard::detail {

using StreamBatchMemOp = PFN_cuStreamBatchMemOp_v11070;

/// cuStreamBatchMemOp, found at run time: the program also runs where there is
/// no driver. Null: there is none.
inline StreamBatchMemOp find_stream_batch_mem_op() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kVersion = 12000;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuStreamBatchMemOp",
      &function,
      kVersion,
      cudaEnableDefault,
      &found);
  (void)cudaGetLastError();
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<StreamBatchMemOp>(function)
             : nullptr;
}

}  // namespace flatshard::detail
