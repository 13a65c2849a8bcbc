#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/comm/sum_rows_kernel.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/float_dtype_of.h"

namespace flatshard::detail {
void cuda_sum_rows(
    const at::Tensor& out,
    const at::Tensor& rows,
    int rank,
    const at::Tensor& own,
    double scale) {
  const CudaDeviceScope scope(out.device());
  C10_CUDA_CHECK(kernels::sum_rows(
      rows.const_data_ptr(),
      rows.stride(0),
      static_cast<int>(rows.size(0)),
      rank,
      own.const_data_ptr(),
      out.mutable_data_ptr(),
      out.numel(),
      static_cast<float>(scale),
      float_dtype_of(out.scalar_type()),
      c10::cuda::getCurrentCUDAStream()));
}

bool cuda_adds(const at::Tensor& into, const at::Tensor& from) {
  return into.is_cuda() && from.is_cuda() && into.is_contiguous() &&
         from.is_contiguous() && into.numel() == from.numel() &&
         into.scalar_type() == at::kFloat &&
         find_float_dtype(from.scalar_type());
}

void cuda_add_scaled(
    const at::Tensor& into,
    const at::Tensor& from,
    double scale,
    bool add) {
  const CudaDeviceScope scope(into.device());
  C10_CUDA_CHECK(kernels::add_scaled(
      into.mutable_data_ptr<float>(),
      from.const_data_ptr(),
      into.numel(),
      static_cast<float>(scale),
      add,
      float_dtype_of(from.scalar_type()),
      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace flatshard::detail
