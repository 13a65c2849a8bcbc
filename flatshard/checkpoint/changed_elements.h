#pragma once

#include "flatshard/device/stream.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard {

/// The elements of a flat tensor that differ from a copy: what one comparison
/// found.
///
/// CUDA kernels compare float32, bfloat16 and float16 tensors with copies in
/// one of these dtypes. They use one bit for each element until `marks` is
/// freed, and up to 0.75 bytes for each element until this is destroyed. ATen
/// compares other tensors.
struct ChangedElements {
  at::Tensor copy;  ///< [n] with the new values
  /// The `earlier` of a later comparison with the same copy. ATen: [changed]
  /// int64 elements. Kernels: see kernels::CompareElements, as for the
  /// members below.
  at::Tensor marks;
  at::Tensor values;   ///< ATen: [changed]
  at::Tensor offsets;  ///< kernels only
  at::Tensor ends;     ///< kernels only
  /// int64 [borders] in host memory: the number of changed elements before each
  /// border. Valid after `counted`.
  at::Tensor num_before;
  Event counted;
};

/// Finds the elements of which the bits differ from a copy, in the dtype of the
/// copy, and writes their new values into the copy. Queues on the current
/// stream. Does not block the host if kernels compare.
///
/// @param now      [n] contiguous; not `copy`.
/// @param copy     [n] contiguous, on the same device; overwritten with `now`
///                 as at::Tensor::to converts it.
/// @param earlier  marks of an earlier comparison with this copy; these
///                 elements count as changed, too. May be undefined.
///                 Overwritten.
/// @param borders  int64 [borders] on the same device, each in 0..n.
ChangedElements compare_elements(
    const at::Tensor& now,
    const at::Tensor& copy,
    const at::Tensor& earlier,
    const at::Tensor& borders);

/// Elements of a flat tensor.
struct ElementRun {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t num_before = 0;  ///< changed elements before `begin`
  std::int64_t shift = 0;       ///< is added to each element's index
};
/// Writes the changed elements of a run in ascending order. Queues on the
/// current stream. The copy must still have the values of the comparison.
///
/// @param indices  int32 or int64 [changed elements of the run]
/// @param values   like `indices`, in the dtype of the copy
void list_elements(
    const ChangedElements& changed,
    const ElementRun& run,
    const at::Tensor& indices,
    const at::Tensor& values);

namespace detail {

// With CUDA: changed_elements_cuda.cpp.
bool cuda_compares(const at::Tensor& now, const at::Tensor& copy);
ChangedElements cuda_compare_elements(
    const at::Tensor& now,
    const at::Tensor& copy,
    const at::Tensor& earlier,
    const at::Tensor& borders);
void cuda_list_elements(
    const ChangedElements& changed,
    const ElementRun& run,
    const at::Tensor& indices,
    const at::Tensor& values);

}  // namespace detail
}  // namespace flatshard
