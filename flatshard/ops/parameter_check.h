#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/core/error.h"

#include <string>
#include <utility>

namespace flatshard::nn {

/// A layer's parameter cannot be used as the layer was called. It keeps the
/// parameter, so that a caller with its full name can name it.
class ParameterMismatch : public Error {
 public:
  ParameterMismatch(std::string message, at::Tensor parameter)
      : Error(ErrorCode::usage, std::move(message)),
        parameter_(std::move(parameter)) {}

  const at::Tensor& parameter() const { return parameter_; }

 private:
  at::Tensor parameter_;
};

/// @throws ParameterMismatch always, with the remedy.
/// @param name  of the parameter, in `module`.
[[noreturn]] void refuse_without_memory(
    const std::string& name,
    const std::string& module,
    const at::Tensor& parameter);

/// The weight of `layer` has memory, unless x has none either.
/// @throws ParameterMismatch
inline void check_has_memory(
    const char* layer,
    const at::Tensor& x,
    const at::Tensor& weight) {
  if (weight.is_meta() && !x.is_meta()) [[unlikely]] {
    refuse_without_memory("weight", layer, weight);
  }
}

/// The matmul of x and the weight has one dtype, or autocast makes it so.
/// @throws ParameterMismatch
void check_same_dtype(
    const char* layer,
    const at::Tensor& x,
    const at::Tensor& weight);

}  // namespace flatshard::nn
