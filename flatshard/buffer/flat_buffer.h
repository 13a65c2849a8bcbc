#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/comm/mesh.h"
#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/local_range.h"
#include "flatshard/layout/placement.h"

#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// One flat tensor with a layout, a dtype, a device and placements: this
/// rank's part of a group of tensors that lives on a mesh.
///
/// A value: copies share the local tensor.
class FlatBuffer {
 public:
  FlatBuffer() = default;

  /// Allocates the local part, uninitialised, on the mesh's device.
  FlatBuffer(
      std::shared_ptr<const FlatLayout> layout,
      std::shared_ptr<Mesh> mesh,
      Placements placements,
      at::ScalarType dtype);

  /// Takes memory that exists.
  /// @param local  [local_numel] contiguous, on the mesh's device.
  static FlatBuffer wrap(
      at::Tensor local,
      std::shared_ptr<const FlatLayout> layout,
      std::shared_ptr<Mesh> mesh,
      Placements placements);

  bool defined() const { return local_.defined(); }
  const at::Tensor& local() const { return local_; }
  const Placements& placements() const { return placements_; }
  const FlatLayout& layout() const { return *layout_; }
  const std::shared_ptr<const FlatLayout>& layout_ptr() const {
    return layout_;
  }
  const std::shared_ptr<Mesh>& mesh() const { return mesh_; }
  at::ScalarType dtype() const { return local_.scalar_type(); }
  std::int64_t nbytes() const { return local_.nbytes(); }

  /// The elements that one rank holds with these placements.
  static std::int64_t local_numel(
      const FlatLayout& layout, const Mesh& mesh, const Placements& placements);

  /// What this rank holds of tensor `i`, as runs of the local tensor.
  std::vector<Piece> local_pieces(std::int64_t i) const;
  /// Tensor `i` with its shape: a view, for buffers that hold everything
  /// (no axis larger than 1 is sharded).
  at::Tensor view(std::int64_t i) const;

  /// This buffer with other placements. Runs its collectives at once in the
  /// calling context, so call it inside Stream::submit of the stream meant.
  /// Any number of axes may change.
  ///
  /// | from      | to        | what                                         |
  /// |-----------|-----------|----------------------------------------------|
  /// | Shard     | Replicate | all-gather; in place when this rank's slice   |
  /// |           |           | of `out` is the source                       |
  /// | Partial   | Replicate | all-reduce; in place when `out` is the source|
  /// | Partial   | Shard     | reduce-scatter; `out` must not overlap       |
  /// | Replicate | Shard     | local slice; a view without `out` when it is |
  /// |           |           | one range                                    |
  /// | Replicate | Partial(avg) | relabel                                   |
  /// | same      | same      | itself, or a copy into `out`                 |
  ///
  /// @param out  null: allocates. Else same mesh, layout, dtype and the target
  ///   placements; overwritten.
  /// @throws Error{usage} for other transitions, naming both placements, and
  ///   for an `out` that does not fit.
  FlatBuffer redistribute(
      const Placements& to,
      Purpose purpose,
      const FlatBuffer* out = nullptr) const;

 private:
  std::shared_ptr<const FlatLayout> layout_;
  std::shared_ptr<Mesh> mesh_;
  Placements placements_;
  at::Tensor local_;
};

}  // namespace flatshard
