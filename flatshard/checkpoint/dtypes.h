#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace flatshard {

/// safetensors' name of a dtype that weights and optimizer states have.
/// @throws Error{usage} for another one.
std::string safetensors_dtype(at::ScalarType dtype);

/// The inverse. @param what  for the message.
/// @throws Error{format} naming `what` and the dtypes that are known.
at::ScalarType scalar_type(std::string_view dtype, std::string_view what);

}  // namespace flatshard
