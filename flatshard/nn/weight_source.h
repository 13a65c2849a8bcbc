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

/// The encoding of a weight without values in its dtype, and the weight as one
/// of its matmuls reads it. FP8 is the only kind of encoding, and only the two
/// ends of a WeightSource depend on that: layers and the group's Codec.
using WeightRecipe = float8::Recipe;
using EncodedWeight = float8::WeightOperand;

/// Gives layers the planes of encoded weights. Layers request the plane for
/// each matmul again and keep nothing, because it may be all-gathered for this
/// one matmul.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// Returns the recipe that `parameter` (same TensorImpl as the module's) is
  /// stored in; absent: the tensor's dtype.
  virtual std::optional<WeightRecipe> recipe(
      const at::Tensor& parameter) const = 0;
  /// Returns the plane that `use` reads, for kernels on the current stream;
  /// absent: the tensor itself is read.
  /// @throws Error{usage} outside a forward or backward of its unit.
  virtual std::optional<EncodedWeight> plane(
      const at::Tensor& parameter,
      PlaneUse use) = 0;
};

}  // namespace flatshard::nn
