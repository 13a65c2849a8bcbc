#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/float_dtype_of.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/group/initializer_backend.h"
#include "flatshard/group/initializer_kernel.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

namespace flatshard::detail {
namespace {

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
      float_dtype_of(out.scalar_type()),
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
