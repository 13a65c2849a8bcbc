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

}  // namespace flatshard::nn::cuda
