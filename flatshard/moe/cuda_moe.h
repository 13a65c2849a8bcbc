#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/core/error.h"
#include "flatshard/moe/kernels/moe_kernels.h"

#include <cstdint>

/// CUDA kernels of Mixture of Experts. The launches are built twice:
/// cuda_moe.cpp with CUDA, no_cuda_moe.cpp without (they throw).
namespace flatshard::nn::cuda {

/// Launches a kernel on the current stream of `device`. Its pointers must be on
/// that device.
/// @throws Error{config} for more experts or groups than it supports.
void launch(const kernels::MoeKernel& kernel, at::Device device);

/// Grouped matmul of torch; 2-D and 3-D operands as in torch._grouped_mm.
/// @param out  overwritten, except for rows after the last end.
void grouped_mm(
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& ends,
    at::Tensor& out);

/// Returns whether this build has the next two for the GPU and the sizes of
/// weights [experts, out, in].
bool has_grouped_products(at::Device device, at::IntArrayRef sizes);

/// y[r] = x[r] W[e]^T, or x[r] W[e] with `is_in_out`. All are contiguous.
/// @param y  bfloat16 [rows, out]; rows after the last end are not written.
void grouped_rows(
    const at::Tensor& y,
    const at::Tensor& x,
    const at::Tensor& weight,
    bool is_in_out,
    const at::Tensor& ends);

/// grad[e] = g_e^T x_e, or added to it, in one kernel. Bitwise reproducible.
/// @param grad  float32, or bfloat16 without `accumulate`: [experts, out, in];
///   zeros for experts without rows.
/// @param g, x  bfloat16 [rows, out] and [rows, in]
void grouped_weight_gradient(
    const at::Tensor& grad,
    bool accumulate,
    const at::Tensor& g,
    const at::Tensor& x,
    const at::Tensor& ends);

/// Returns the dtype of rows.
/// @throws Error{internal} for rows that the kernels do not support.
inline kernels::Dtype dtype_of(const at::Tensor& rows) {
  FLATSHARD_CHECK(
      rows.is_cuda() && rows.is_contiguous() &&
          (rows.scalar_type() == at::kFloat ||
           rows.scalar_type() == at::kBFloat16),
      internal,
      "expected a contiguous float32 or bfloat16 CUDA tensor, got {}",
      rows.toString());
  return rows.scalar_type() == at::kFloat ? kernels::Dtype::f32
                                          : kernels::Dtype::bf16;
}

/// Returns the elements of such rows; null for an undefined tensor.
inline void* rows_in(const at::Tensor& rows) {
  return rows.defined() ? (dtype_of(rows), rows.data_ptr()) : nullptr;
}

/// Returns the elements of a tensor; null for an undefined one.
template <class T>
T* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<T>() : nullptr;
}

}  // namespace flatshard::nn::cuda
