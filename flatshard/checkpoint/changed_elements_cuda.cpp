#include "flatshard/checkpoint/changed_elements.h"
#include "flatshard/checkpoint/changed_elements_kernels.h"
#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/float_dtype_of.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/device/memory.h"

#include <ATen/ATen.h>

namespace flatshard::detail {
namespace {

std::uint32_t* words(const at::Tensor& marks) {
  return reinterpret_cast<std::uint32_t*>(
      marks.mutable_data_ptr<std::int32_t>());
}

std::uint16_t* shorts(const at::Tensor& offsets) {
  return reinterpret_cast<std::uint16_t*>(
      offsets.mutable_data_ptr<std::int16_t>());
}

}  // namespace

bool cuda_compares(const at::Tensor& now, const at::Tensor& copy) {
  return now.is_cuda() && find_float_dtype(now.scalar_type()) &&
         find_float_dtype(copy.scalar_type());
}

ChangedElements cuda_compare_elements(
    const at::Tensor& now,
    const at::Tensor& copy,
    const at::Tensor& earlier,
    const at::Tensor& borders) {
  FLATSHARD_CHECK(
      now.is_contiguous() && copy.is_contiguous() && borders.is_contiguous() &&
          now.device() == copy.device() && now.device() == borders.device() &&
          now.numel() == copy.numel(),
      internal,
      "expected contiguous tensors of one size on one GPU, got {} and {}",
      now.toString(),
      copy.toString());
  const CudaDeviceScope scope(now.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const std::int64_t tiles =
      ceil_div<std::int64_t>(now.numel(), kernels::kTileElements);
  const auto empty = [&](std::int64_t numel, at::ScalarType dtype) {
    return at::empty({numel}, now.options().dtype(dtype));
  };
  ChangedElements changed{.copy = copy};
  keep_for_current_stream(copy);
  if (earlier.defined()) {
    keep_for_current_stream(earlier);
  }
  changed.marks = earlier.defined()
                      ? earlier
                      : empty(tiles * kernels::kTileWords, at::kInt);
  changed.values = empty(tiles * kernels::kTileStored, copy.scalar_type());
  changed.offsets = empty(tiles * kernels::kTileStored, at::kShort);
  const at::Tensor counts = empty(tiles, at::kLong);
  kernels::compare_elements(
      {.now = now.const_data_ptr(),
       .copy = copy.mutable_data_ptr(),
       .numel = now.numel(),
       .now_dtype = float_dtype_of(now.scalar_type()),
       .copy_dtype = float_dtype_of(copy.scalar_type()),
       .adds = earlier.defined(),
       .marks = words(changed.marks),
       .counts = counts.mutable_data_ptr<std::int64_t>(),
       .values = changed.values.mutable_data_ptr(),
       .offsets = shorts(changed.offsets)},
      stream);
  check_kernel_launch();
  changed.ends = counts.cumsum(0);
  const at::Tensor num_before = at::empty_like(borders);
  kernels::count_elements(
      words(changed.marks),
      changed.ends.const_data_ptr<std::int64_t>(),
      borders.const_data_ptr<std::int64_t>(),
      num_before.mutable_data_ptr<std::int64_t>(),
      borders.numel(),
      stream);
  check_kernel_launch();
  changed.num_before = at::empty(
      borders.sizes(),
      at::TensorOptions(at::kLong).pinned_memory(true));
  changed.num_before.copy_(num_before, /*non_blocking=*/true);
  changed.counted.record(*current_stream(now.device()));
  return changed;
}

void cuda_list_elements(
    const ChangedElements& changed,
    const ElementRun& run,
    const at::Tensor& indices,
    const at::Tensor& values) {
  FLATSHARD_CHECK(
      indices.is_contiguous() && values.is_contiguous() &&
          values.scalar_type() == changed.copy.scalar_type() &&
          (indices.scalar_type() == at::kInt ||
           indices.scalar_type() == at::kLong),
      internal,
      "expected contiguous indices of int32 or int64, got {}, and values like "
      "the copy, got {}",
      indices.toString(),
      values.toString());
  const CudaDeviceScope scope(changed.copy.device());
  for (const at::Tensor* read :
       {&changed.copy,
        &changed.marks,
        &changed.ends,
        &changed.values,
        &changed.offsets}) {
    keep_for_current_stream(*read);
  }
  kernels::list_elements(
      {.copy = changed.copy.const_data_ptr(),
       .marks = words(changed.marks),
       .ends = changed.ends.const_data_ptr<std::int64_t>(),
       .values = changed.values.const_data_ptr(),
       .offsets = shorts(changed.offsets),
       .nbytes = static_cast<int>(changed.copy.element_size()),
       .begin = run.begin,
       .end = run.end,
       .num_before = run.num_before,
       .shift = run.shift,
       .out_indices = indices.mutable_data_ptr(),
       .wide = indices.scalar_type() == at::kLong,
       .out_values = values.mutable_data_ptr()},
      c10::cuda::getCurrentCUDAStream());
  check_kernel_launch();
}

}  // namespace flatshard::detail
