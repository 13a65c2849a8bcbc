#include "flatshard/optim/muon/muon_cuda.h"

#include "flatshard/device/kernel_launch.h"
#include "flatshard/device/memory.h"
#include "flatshard/float8/cublaslt_product.h"
#include "flatshard/optim/optim_kernels.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace flatshard {

void muon_direction_cuda(
    const at::Tensor& grad,
    const at::Tensor& grad_scale,
    const at::Tensor& buffer,
    const at::Tensor& direction,
    double momentum,
    bool nesterov) {
  const c10::cuda::CUDAGuard guard(buffer.device());
  kernels::muon_direction(
      {.grad = grad.const_data_ptr(),
       .is_bfloat16 = grad.scalar_type() == at::kBFloat16,
       .grad_scale =
           grad_scale.defined() ? grad_scale.const_data_ptr<float>() : nullptr,
       .buffer = buffer.mutable_data_ptr<float>(),
       .direction = direction.mutable_data_ptr(),
       .momentum = static_cast<float>(momentum),
       .rest = static_cast<float>(1 - momentum),
       .nesterov = nesterov,
       .numel = buffer.numel()},
      c10::cuda::getCurrentCUDAStream());
  check_kernel_launch();
  keep_for_current_stream(grad);
  if (grad_scale.defined()) {
    keep_for_current_stream(grad_scale);
  }
}

void muon_apply_cuda(
    const at::Tensor& main,
    const at::Tensor& compute,
    const at::Tensor& direction,
    double decay,
    double step) {
  const c10::cuda::CUDAGuard guard(main.device());
  kernels::muon_apply(
      {.main = main.mutable_data_ptr<float>(),
       .compute = compute.defined() ? compute.mutable_data_ptr() : nullptr,
       .direction = direction.const_data_ptr(),
       .keep = static_cast<float>(1 - decay),
       .step = static_cast<float>(step),
       .numel = main.numel()},
      c10::cuda::getCurrentCUDAStream());
  check_kernel_launch();
}

void add_matmul_cuda(
    const at::Tensor& out,
    const at::Tensor& left,
    const at::Tensor& x,
    double beta) {
  using namespace float8::cuda;
  const c10::cuda::CUDAGuard guard(x.device());
  // `left` is symmetric, so the matmul is also x^T left.
  const bool is_transposed = x.stride(0) == 1;
  const bool is_done = run_product({
      .a = {.data = is_transposed ? x.t() : left, .scales = {}},
      .b = {.data = is_transposed ? left : x, .scales = {}},
      .out = is_transposed ? out.t() : out,
      .c = is_transposed ? x.t() : x,
      .beta = static_cast<float>(beta),
      .by_columns = !is_transposed,
      .takes_first = true,  // replicas of a shard repeat the work
  });
  if (!is_done) {
    at::Tensor to = out;
    at::addmm_out(to, x, left, x, beta);
  }
}

void mirror_lower_cuda(const at::Tensor& matrix) {
  const c10::cuda::CUDAGuard guard(matrix.device());
  kernels::mirror_lower(
      matrix.mutable_data_ptr(),
      static_cast<int>(matrix.size(0)),
      c10::cuda::getCurrentCUDAStream());
  check_kernel_launch();
}

}  // namespace flatshard
