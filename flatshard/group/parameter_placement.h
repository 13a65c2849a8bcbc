#pragma once

#include "flatshard/layout/granularity.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/layout/tensor_slice.h"
#include "flatshard/mesh/mesh.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// The storage of one parameter. Unset values are the same as for the rest of
/// the model.
struct ParameterPlacement {
  /// The ranks that share the parameter: the model's mesh or a sub-mesh of it.
  /// Ranks that differ in the model's other axes have other slices. Without
  /// `slice` they have the same values, and the program has to keep them equal.
  /// Two ranks' slices never overlap unless they are the same.
  std::shared_ptr<Mesh> mesh;
  /// The strategy for the axes of `mesh`. Not set: the model's by its name, for
  /// these axes. For hsdp and its like the model's outer axis has to be one of
  /// several.
  std::optional<Strategy> strategy;
  std::optional<Granularity> granularity;
  /// See ParamGroupOptions::grad_divisor: for experts the number of slices,
  /// since each gets only its own ranks' tokens.
  std::optional<double> grad_divisor;
  /// The part of a larger tensor that this rank's parameter is. Initial values,
  /// checkpoints and exported weights belong to the larger one, so that they do
  /// not depend on how it was split.
  std::optional<TensorSlice> slice;

  /// Returns the placement of a parameter with another slice at each coordinate
  /// of `axes`. The ranks of the mesh's other axes share a slice. Gradients are
  /// the mean over these; the caller sets everything else.
  /// @throws Error{config} when there is no other axis.
  static ParameterPlacement cut_over(
      const Mesh& mesh,
      const std::vector<std::string>& axes,
      TensorSlice slice);
  /// Returns the placement of experts: each coordinate of `axis` has an equal
  /// part of the `whole` first indices, and a gradient that is the sum over the
  /// ranks of `axis`.
  /// @throws Error{config} when they do not divide.
  static ParameterPlacement
  along(const Mesh& mesh, const std::string& axis, std::int64_t whole);

  /// Returns this placement with unset values from `rest`. A strategy is for
  /// the axes of its mesh, so the strategy of `rest` is not used where `mesh`
  /// is set and differs.
  ParameterPlacement or_else(const ParameterPlacement& rest) const;
};

}  // namespace flatshard
