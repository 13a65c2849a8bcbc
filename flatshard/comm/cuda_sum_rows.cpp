#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/comm/sum_rows_kernel.h"
#include "flatshard/core/error.h"
#include "flatshard/device/cuda_scope.h"

namespace flatshard::detail {
namespace {

kernels::RowDtype row_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::RowDtype::float32;
    case at::kBFloat16:
      return kernels::RowDtype::bfloat16;
    case at::kHalf:
      return kernels::RowDtype::float16;
    default:
      FLATSHARD_THROW(
          internal,
          "expected rows of float32, bfloat16 or float16, got {}",
          c10::toString(dtype));
  }
}

}  // namespace

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
      row_dtype(out.scalar_type()),
      c10::cuda::getCurrentCUDAStream()));
}

bool cuda_adds(const at::Tensor& into, const at::Tensor& from) {
  const at::ScalarType dtype = from.scalar_type();
  return into.is_cuda() && from.is_cuda() && into.is_contiguous() &&
         from.is_contiguous() && into.numel() == from.numel() &&
         into.scalar_type() == at::kFloat &&
         (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
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
      row_dtype(from.scalar_type()),
      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace flatshard::detail
