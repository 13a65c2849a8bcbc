#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "flatshard/buffer/transition.h"
#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/local_range.h"
#include "flatshard/layout/placement.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// A change of placements, planned once and run for many tensors.
///
/// FlatBuffer::redistribute plans and checks for each call. A training step
/// repeats the same redistribution for every unit. It is planned when the unit
/// first needs it, so later the host only launches the collectives.
class Redistribution {
 public:
  /// Creates the communicators that it needs and the mesh lacks, so call it in
  /// the same order on all ranks.
  /// @param purpose  whose communicators carry it.
  /// @throws Error{usage} for a transition that plan_transition rejects.
  Redistribution(
      std::shared_ptr<const FlatLayout> layout,
      std::shared_ptr<Mesh> mesh,
      Placements from,
      const Placements& to,
      Purpose purpose);

  /// Returns this rank's number of elements before and after.
  std::int64_t from_numel() const { return from_.numel; }
  std::int64_t to_numel() const { return last().numel; }
  /// Otherwise the values stay where they are, or are a slice of them.
  bool communicates() const;
  /// Adds those that carry it to `groups`.
  void add_groups(std::vector<Communicator*>& groups) const;
  /// Returns whether every rank would only communicate with itself and keep all
  /// that it has.
  bool is_identity() const;

  /// Runs the collectives at once in the calling context, so call it inside
  /// Stream::submit of the stream meant.
  /// @param in  [from_numel] contiguous; keeps its values unless `out` shares
  ///   its memory.
  /// @param out  [to_numel] contiguous, of `in`'s dtype and device;
  ///   overwritten. FlatBuffer::redistribute defines which overlaps with `in`
  ///   are right, and nothing is checked here.
  void run(const at::Tensor& in, const at::Tensor& out) const;
  /// Does the same into new memory, and returns `in` itself when nothing
  /// changes.
  at::Tensor run(const at::Tensor& in) const;

 private:
  /// A rank's part of a tensor under some placements.
  struct LocalPart {
    std::int64_t numel = 0;
    std::vector<LocalRange> ranges;  ///< one per segment
  };
  struct Step {
    TransitionStep change;
    Communicator* group = nullptr;  ///< owned by the mesh; null: local
    LocalPart after;
  };

  LocalPart local_part_at(const Placements& placements) const;
  const LocalPart& last() const {
    return steps_.empty() ? from_ : steps_.back().after;
  }
  void run_step(
      const Step& step,
      const LocalPart& before,
      const at::Tensor& in,
      const at::Tensor& out) const;

  std::shared_ptr<const FlatLayout> layout_;
  std::shared_ptr<Mesh> mesh_;
  LocalPart from_;
  std::vector<Step> steps_;
  std::size_t first_final_ = 0;  ///< from here on steps write the last tensor
};

}  // namespace flatshard
