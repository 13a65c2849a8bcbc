#pragma once

#include "flatshard/exchange/narrow_rows.h"

namespace flatshard::detail {

// cuda_narrow_rows.cpp or no_cuda.cpp, chosen at link time.

/// See NarrowRows. @param here  written when it gathers, else read.
void cuda_copy_narrow_rows(const NarrowRows& rows, void* here, bool gathers);

}  // namespace flatshard::detail
