#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace flatshard::detail {

/// Returns a driver function, found at run time: the program also runs without
/// a driver. Null: there is no driver, or it is older than `version` (12040 is
/// CUDA 12.4). `version` also selects the form of the function.
template <class Pointer>
Pointer find_driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      name,
      &function,
      version,
      cudaEnableDefault,
      &found);
  (void)cudaGetLastError();
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Pointer>(function)
             : nullptr;
}

using StreamBatchMemOp = PFN_cuStreamBatchMemOp_v11070;

inline StreamBatchMemOp find_stream_batch_mem_op() {
  return find_driver_function<StreamBatchMemOp>("cuStreamBatchMemOp", 12000);
}

}  // namespace flatshard::detail
