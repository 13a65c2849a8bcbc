#include "flatshard/optim/muon_cuda.h"

#include "flatshard/device/kernel_launch.h"
#include "flatshard/device/memory.h"
#include "flatshard/float8/cublaslt.h"
#include "flatshard/optim/muon_kernels.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
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
  // cuBLASLt's matrices have columns in memory. For it, a contiguous x is x^T,
  // and the matmul is x^T left^T. `left` is symmetric.
  const bool is_transposed = x.stride(0) == 1;
  const std::int64_t rows = x.size(0);
  const std::int64_t columns = x.size(1);
  const MatmulDesc desc = make_desc();
  const MatrixLayout square = make_layout(CUDA_R_16BF, rows, rows, rows);
  const MatrixLayout wide =
      is_transposed ? make_layout(CUDA_R_16BF, rows, columns, rows)
                    : make_layout(CUDA_R_16BF, columns, rows, columns);
  const at::Tensor& a = is_transposed ? left : x;
  const at::Tensor& b = is_transposed ? x : left;
  const cublasLtMatrixLayout_t layout_a = (is_transposed ? square : wide).get();
  const cublasLtMatrixLayout_t layout_b = (is_transposed ? wide : square).get();
  const Preference preference = make_preference();
  set(preference,
      CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      at::cuda::getCUDABlasLtWorkspaceSize());
  constexpr std::uint32_t kAlignment = 16;
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(preference, attribute, kAlignment);
  }
  cublasLtMatmulHeuristicResult_t found;
  int num = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      at::cuda::getCurrentCUDABlasLtHandle(),
      desc.get(),
      layout_a,
      layout_b,
      wide.get(),
      wide.get(),
      preference.get(),
      1,
      &found,
      &num);
  const auto is_aligned = [](const at::Tensor& t) {
    return reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % kAlignment ==
           0;
  };
  if (status != CUBLAS_STATUS_SUCCESS || num == 0 || !is_aligned(x) ||
      !is_aligned(out)) {
    at::Tensor to = out;
    at::addmm_out(to, x, left, x, beta);
    return;
  }
  const float one = 1.0F;
  const auto factor = static_cast<float>(beta);
  check_cublas(
      cublasLtMatmul(
          at::cuda::getCurrentCUDABlasLtHandle(),
          desc.get(),
          &one,
          a.const_data_ptr(),
          layout_a,
          b.const_data_ptr(),
          layout_b,
          &factor,
          x.const_data_ptr(),
          wide.get(),
          out.mutable_data_ptr(),
          wide.get(),
          &found.algo,
          at::cuda::getCUDABlasLtWorkspace(),
          at::cuda::getCUDABlasLtWorkspaceSize(),
          c10::cuda::getCurrentCUDAStream()),
      "a matmul");
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
