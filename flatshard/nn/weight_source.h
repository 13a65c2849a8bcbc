#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/float8/float8_matmul.h"

#include <optional>

namespace flatshard::nn {

/// Which matmul reads a weight [out, in].
enum class PlaneUse {
  fprop,  ///< x W^T, a sum over in: rows
  dgrad,  ///< dY W, a sum over out: columns
};

/// A weight in FP8, as one of its matmuls reads it.
struct Float8Weight {
  float8::Operand operand;  ///< fprop: [out, in]; dgrad: [in, out]
  bool emulate = false;     ///< float8::MatmulOptions::emulate
};

/// Gives layers the FP8 planes of weights that have no values in their dtype.
/// Layers request the plane for each matmul again and keep nothing, because it
/// may be all-gathered for this one matmul.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// Returns the recipe that `parameter` (same TensorImpl as the module's) is
  /// stored in; absent: the tensor's dtype.
  virtual std::optional<float8::Recipe> recipe(
      const at::Tensor& parameter) const = 0;
  /// Returns the plane that `use` reads, for kernels on the current stream;
  /// absent: the tensor itself is read.
  /// @throws Error{usage} outside a forward or backward of its unit.
  virtual std::optional<Float8Weight> plane(
      const at::Tensor& parameter,
      PlaneUse use) = 0;
};

}  // namespace flatshard::nn
