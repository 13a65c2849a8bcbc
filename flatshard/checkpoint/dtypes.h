#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace flatshard {

/// safetensors' name of a dtype.
/// @throws Error{usage} for another one.
std::string safetensors_dtype(at::ScalarType dtype);

/// Returns the inverse for weights. @param what  for the message.
/// @throws Error{format} naming `what` if it is not a floating-point dtype.
at::ScalarType scalar_type(std::string_view dtype, std::string_view what);

}  // namespace flatshard
