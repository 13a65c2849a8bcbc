#pragma once

#include "flatshard/moe/kernels/moe_kernels.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard {

// Rows of a few bytes, such as a routing weight each, between where they are
// computed and the windows of the ranks that routed them. For rows this small,
// copying each run is slower than a kernel that finds each row.

constexpr std::int64_t kMaxNarrowNbytes = 16;

/// Returns whether rows of this size are such. They are aligned to 4 bytes.
inline bool are_narrow(std::int64_t row_nbytes, std::int64_t element_nbytes) {
  return row_nbytes > 0 && row_nbytes <= kMaxNarrowNbytes &&
         element_nbytes % 4 == 0;
}

/// Copies them, on the current stream of a GPU.
void copy_narrow_rows(
    const nn::kernels::CopyNarrowRows& rows,
    at::Device device);

}  // namespace flatshard
