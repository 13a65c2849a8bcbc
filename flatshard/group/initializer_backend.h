#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/core/init_spec.h"
#include "flatshard/layout/rectangle.h"

#include <cstdint>

// The link-time choice: initializer_cuda.cpp or initializer_no_cuda.cpp.
namespace flatshard::detail {

inline bool draws_cuda(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

/// Draws the elements of a box on its GPU. Queues on the current stream.
///
/// @param out   [n] contiguous, on a GPU, of a dtype that `draws_cuda`.
/// @param key   of Philox.
/// @param spec  normal or uniform.
/// @param runs  the box in the unsharded parameter.
void draw_cuda(
    const at::Tensor& out,
    std::uint64_t key,
    const InitSpec& spec,
    const FlatRuns& runs);

}  // namespace flatshard::detail
