#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "flatshard/device/float_dtype.h"

namespace flatshard {

/// Returns what kernels call `dtype`; nothing for a dtype that they do not
/// support.
std::optional<kernels::FloatDtype> find_float_dtype(at::ScalarType dtype);

/// The same. @throws Error{internal} for a dtype that they do not support.
kernels::FloatDtype float_dtype_of(at::ScalarType dtype);

}  // namespace flatshard
