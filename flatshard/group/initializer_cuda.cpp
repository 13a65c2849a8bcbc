#include "flatshard/core/error.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/group/initializer_backend.h"
#include "flatshard/group/initializer_kernel.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

namespace flatshard::detail {
namespace {

kernels::DrawDtype dtype_of(const at::Tensor& out) {
  switch (out.scalar_type()) {
    case at::kFloat:
      return kernels::DrawDtype::float32;
    case at::kBFloat16:
      return kernels::DrawDtype::bfloat16;
    case at::kHalf:
      return kernels::DrawDtype::float16;
    default:
      FLATSHARD_THROW(
          internal,
          "expected weights of float32, bfloat16 or float16, got {}",
          c10::toString(out.scalar_type()));
  }
}

/// Returns the first element of each run, on the device.
at::Tensor begins_of(const FlatRuns& runs, at::Device device) {
  const at::Tensor begins = at::empty({runs.size()}, at::kLong);
  auto* const values = begins.data_ptr<std::int64_t>();
  for (std::int64_t run = 0; run < runs.size(); ++run) {
    values[run] = runs.begin(run);
  }
  return begins.to(device);
}

}  // namespace

void draw_cuda(
    const at::Tensor& out,
    std::uint64_t key,
    const InitSpec& spec,
    const FlatRuns& runs) {
  const CudaDeviceScope scope(out.device());
  const bool is_one = runs.size() == 1;
  const at::Tensor begins =
      is_one ? at::Tensor() : begins_of(runs, out.device());
  kernels::draw_runs(
      out.mutable_data_ptr(),
      dtype_of(out),
      key,
      spec,
      {.begins = is_one ? nullptr : begins.const_data_ptr<std::int64_t>(),
       .begin = runs.begin(0),
       .numel = runs.numel(),
       .size = runs.size()},
      c10::cuda::getCurrentCUDAStream());
  check_kernel_launch();
}

}  // namespace flatshard::detail
