#pragma once

#include "flatshard/nn/wgrad.h"
#include "flatshard/runtime/runtime.h"
#include "python/csrc/shared_rows.h"

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace flatshard::python {

// Linear layers with FP8 weights as operators of torch. torch.compile keeps
// them as they are:
//
//   flatshard::float8_linear(x, weight, bias) -> y
//   flatshard::float8_linear_backward(grad, x, weight, needs_input) -> dx
//
// Their `weight` has no values: its planes belong to the Runtime that has it.
// The second writes the gradient of the weight where it is reduced, or adds it
// there. Its results do not show that, so Python registers it as an effect.

/// The FP8 weights of a runtime, as the operators find them: by their storages,
/// since autograd and compilers pass other tensors over these.
class Float8Weights {
 public:
  /// @param context  has the runtime as its WgradSink and WeightSource.
  /// @param rows  what their inputs become.
  Float8Weights(
      const Runtime& runtime,
      const nn::ModuleContextPtr& context,
      const std::shared_ptr<SharedRows>& rows);
  ~Float8Weights();
  Float8Weights(const Float8Weights&) = delete;
  Float8Weights& operator=(const Float8Weights&) = delete;

  bool empty() const { return storages_.empty(); }

 private:
  std::vector<const c10::StorageImpl*> storages_;
};

/// Runs flatshard::float8_linear for a caller whose tensors show writes by
/// their versions (tensors of compiled code do not): layers with the same
/// input quantize it once.
at::Tensor float8_linear_sharing(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias);

}  // namespace flatshard::python
