#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/local_range.h"
#include "flatshard/layout/placement.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// One flat tensor with a layout, a dtype, a device and placements: this rank's
/// part of a group of tensors on a mesh.
///
/// The local tensor is 1-D. Without sharded axes it is the full flat space in
/// its order. Else it is, for each segment of the layout, the rank's part of
/// that segment, one after the other.
///
/// A value: copies share the local tensor.
class FlatBuffer {
 public:
  FlatBuffer() = default;

  /// Allocates the local part, uninitialised, on the mesh's device.
  /// @throws Error{usage} when the placements fit neither mesh nor layout.
  FlatBuffer(
      std::shared_ptr<const FlatLayout> layout,
      std::shared_ptr<Mesh> mesh,
      Placements placements,
      at::ScalarType dtype);

  /// Wraps memory that exists, such as a slot of an arena.
  /// @param local  [local_numel] contiguous. On another device than the mesh's
  ///   only transitions without communication work.
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
  at::Device device() const { return local_.device(); }
  /// 0 when it is not defined.
  std::int64_t nbytes() const {
    return defined() ? static_cast<std::int64_t>(local_.nbytes()) : 0;
  }
  /// Returns which parts of the flat space this rank stores, one range per
  /// segment.
  const std::vector<LocalRange>& local_ranges() const { return ranges_; }

  /// Returns the number of elements per rank with these placements.
  static std::int64_t local_numel(
      const FlatLayout& layout,
      const Mesh& mesh,
      const Placements& placements);

  /// Returns this rank's part of tensor `i`, as runs of the local tensor.
  std::vector<Piece> local_pieces(std::int64_t i) const;
  /// Tensor `i` with its shape: a view, for buffers with all elements (no axis
  /// larger than 1 is sharded).
  at::Tensor view(std::int64_t i) const;

  /// This buffer with other placements. Runs its collectives at once in the
  /// calling context, so call it inside Stream::submit of the stream meant.
  /// Any number of axes may change; axes that change alike do so in one launch
  /// over their flattened group. plan_transition lists the steps.
  ///
  /// | from      | to        | what                                         |
  /// |-----------|-----------|----------------------------------------------|
  /// | Shard     | Replicate | all-gather; in place when this rank's slice  |
  /// |           |           | of `out` is the source (one segment)         |
  /// | Partial   | Replicate | all-reduce; in place when `out` is the source|
  /// | Partial   | Shard     | reduce-scatter; `out` must not overlap       |
  /// | Replicate | Shard     | local slice; a view without `out` when it is |
  /// |           |           | one range                                    |
  /// | Replicate | Partial(avg) | relabel                                   |
  /// | same      | same      | itself, or a copy into `out`                 |
  ///
  /// The source keeps its values unless `out` shares its memory. One step, or a
  /// reduce-scatter followed by an all-reduce, allocates no temporary memory
  /// (the Gloo backend's own staging aside). Other chains do between steps.
  ///
  /// @param purpose  whose communicators carry it.
  /// @param out  null: allocates. Else same mesh, layout, dtype, device and the
  ///   target placements; overwritten.
  /// @throws Error{usage} for other transitions, naming both placements, and
  ///   for an `out` that does not fit or overlaps otherwise.
  FlatBuffer redistribute(
      const Placements& to,
      Purpose purpose,
      const FlatBuffer* out = nullptr) const;

  /// E.g. "FlatBuffer [Replicate, Shard] on {outer: 2, dp: 4}, BFloat16 cpu,
  /// 64 of 256 elements".
  std::string to_string() const;

 private:
  void check_out(const Placements& to, const FlatBuffer& out) const;
  bool may_share_memory(const Placements& to, const FlatBuffer& out) const;
  FlatBuffer make_result(const Placements& to, bool may_share) const;
  /// Returns the part of this buffer that `part` describes; nothing when it is
  /// not contiguous.
  std::optional<at::Tensor> slice_view(
      const std::vector<LocalRange>& part) const;

  std::shared_ptr<const FlatLayout> layout_;
  std::shared_ptr<Mesh> mesh_;
  Placements placements_;
  at::Tensor local_;
  std::vector<LocalRange> ranges_;
};

}  // namespace flatshard
