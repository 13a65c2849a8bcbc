#include "flatshard/core/error.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/flat_update_kernels.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace flatshard {
namespace {

kernels::Dtype dtype_of(const at::Tensor& t) {
  if (!t.defined()) {
    return kernels::Dtype::none;
  }
  switch (t.scalar_type()) {
    case at::kFloat:
      return kernels::Dtype::float32;
    case at::kBFloat16:
      return kernels::Dtype::bfloat16;
    case at::kHalf:
      return kernels::Dtype::float16;
    default:
      FLATSHARD_THROW(
          config,
          "expected float32, bfloat16 or float16 in an optimizer on CUDA, "
          "got {}",
          c10::toString(t.scalar_type()));
  }
}

float* floats(const at::Tensor& t) {
  return t.defined() ? t.data_ptr<float>() : nullptr;
}

std::uint8_t* bytes(const at::Tensor& t) {
  return t.defined() ? static_cast<std::uint8_t*>(t.data_ptr()) : nullptr;
}

kernels::FlatUpdatePointers pointers_of(const FlatUpdate& u) {
  FLATSHARD_CHECK(
      u.main.scalar_type() == at::kFloat,
      config,
      "expected precision.main_params = float32 on CUDA, got {}",
      c10::toString(u.main.scalar_type()));
  FLATSHARD_CHECK(
      u.main.numel() % 4 == 0,
      internal,
      "expected a shard of a multiple of 4 elements, got {}",
      u.main.numel());
  kernels::FlatUpdatePointers p;
  p.main = u.main.data_ptr<float>();
  p.compute = u.compute.defined() ? u.compute.data_ptr() : nullptr;
  p.compute_dtype = dtype_of(u.compute);
  p.grad = u.grad.data_ptr();
  p.grad_dtype = dtype_of(u.grad);
  p.state0 = floats(u.state0);
  p.state1 = floats(u.state1);
  p.grad_scale = floats(u.grad_scale);
  p.numel = u.main.numel();
  if (u.ranges.empty()) {
    p.row = u.rows.front();
  } else {
    FLATSHARD_CHECK(
        u.device_ranges.defined() && u.device_rows.defined(),
        internal,
        "expected the {} ranges and {} rows of an update on its device",
        u.ranges.size(),
        u.rows.size());
    p.ranges = reinterpret_cast<const UpdateRange*>(bytes(u.device_ranges));
    p.rows = reinterpret_cast<const UpdateRow*>(bytes(u.device_rows));
    p.num_ranges = static_cast<int>(u.ranges.size());
  }
  const Float8Outputs& f = u.float8;
  if (f.wanted() && !f.runs.empty()) {
    p.float8 = {
        .runs = reinterpret_cast<const float8::FlatRun*>(bytes(f.device_runs)),
        .num_runs = static_cast<int>(f.runs.size()),
        .amax = floats(f.amax),
        .data = bytes(f.data),
        .scales = bytes(f.scales),
        .rounding = f.rounding};
  }
  return p;
}

// The caller may give them back before this stream has read them.
void keep_until_read(const FlatUpdate& u, c10::cuda::CUDAStream stream) {
  for (const at::Tensor& t : {u.grad, u.grad_scale}) {
    if (t.defined()) {
      c10::cuda::CUDACachingAllocator::recordStream(
          t.storage().data_ptr(),
          stream);
    }
  }
}

}  // namespace

void adamw_update_cuda(const FlatUpdate& u) {
  const c10::cuda::CUDAGuard guard(u.main.device());
  kernels::adamw(pointers_of(u), c10::cuda::getCurrentCUDAStream());
  check_kernel_launch();
  keep_until_read(u, c10::cuda::getCurrentCUDAStream());
}

void sgd_update_cuda(const FlatUpdate& u) {
  const c10::cuda::CUDAGuard guard(u.main.device());
  kernels::sgd(pointers_of(u), c10::cuda::getCurrentCUDAStream());
  check_kernel_launch();
  keep_until_read(u, c10::cuda::getCurrentCUDAStream());
}

}  // namespace flatshard
