#include "flatshard/moe/cuda_moe.h"

namespace flatshard::nn::cuda {

void launch(const kernels::MoeKernel& /*kernel*/, at::Device /*device*/) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

void grouped_mm(
    const at::Tensor& /*a*/,
    const at::Tensor& /*b*/,
    const at::Tensor& /*ends*/,
    at::Tensor& /*out*/) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

bool has_grouped_products(at::Device /*device*/, at::IntArrayRef /*sizes*/) {
  return false;
}

void grouped_rows(
    const at::Tensor& /*y*/,
    const at::Tensor& /*x*/,
    const at::Tensor& /*weight*/,
    bool /*is_in_out*/,
    const at::Tensor& /*ends*/) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

void grouped_weight_gradient(
    const at::Tensor& /*grad*/,
    bool /*accumulate*/,
    const at::Tensor& /*g*/,
    const at::Tensor& /*x*/,
    const at::Tensor& /*ends*/) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

}  // namespace flatshard::nn::cuda
