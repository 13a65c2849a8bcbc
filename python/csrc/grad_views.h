#pragma once

#include "python/csrc/bind.h"
#include "python/csrc/py_unit.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace flatshard::python {

/// The gradients of one unit as its shards show them: each `.grad` is a DTensor
/// over this rank's rows of the group's gradient.
///
/// Users may drop a `.grad`, replace it or keep it, as they may with any. So
/// between a backward and the next one the memory belongs to the `.grad`s, and
/// is freed with the last of a group (zero_grad()).
///
/// Called with the GIL, between two backwards or while one starts or ends.
class GradViews {
 public:
  /// @param shards  of the unit's parameters, in their order.
  /// @param beside  called with a shard and [rows, ...] of its gradient; makes
  ///   the DTensor to show.
  /// @param rows_of  called with a shard and a gradient that a user gave it;
  ///   returns [rows, ...] of that. May be a collective.
  GradViews(
      std::shared_ptr<PyUnit> unit,
      std::vector<at::Tensor> shards,
      py::object beside,
      py::object rows_of);

  /// Gives the groups their gradients for a reader: the values of the `.grad`s,
  /// whatever owns these; none where no `.grad` is left.
  /// @return  the parameters without a `.grad` in groups that have a gradient,
  ///   where it is zero.
  std::vector<std::size_t> take();
  /// The groups own their gradients again, for a reduction to add to. Those
  /// that users dropped or replaced since the last one are zeros.
  void reclaim();
  /// reclaim(), and which gradients there will be is not known yet.
  void begin_backward();
  /// Gives each shard its gradient, or adds it in place to the tensor that a
  /// user put there, and frees it; then calls the hooks that show_reduced
  /// left. After a backward.
  void show();
  /// The unit's gradients were reduced in a backward that continues: shows them
  /// and calls the hooks, on the current stream. Gradients that this rank did
  /// not have wait for show(): only then it is known whether others had one.
  void show_reduced();
  /// Lets only the `.grad`s keep the gradients from here on.
  void release();
  /// No shard has a gradient any more. Tensors that users put into `.grad` stay
  /// there, with zeros.
  void drop();

 private:
  using Indices = std::vector<std::size_t>;
  using WeakTensor =
      c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  /// The gradient that show_one made.
  struct Shown {
    WeakTensor tensor{at::Tensor().getIntrusivePtr()};
    WeakStorage memory{c10::intrusive_ptr<c10::StorageImpl>()};
  };

  const at::Tensor& grad_of(std::size_t parameter) const {
    return shards_[parameter].grad();
  }
  /// Returns whether it was not frozen since it was sharded, or was unfrozen
  /// again.
  bool is_trained(std::size_t parameter) const {
    return shards_[parameter].requires_grad();
  }
  /// Passes the gradient of this backward to hooks of register_hook, before it
  /// is added to others.
  void run_tensor_hooks(std::size_t parameter);
  /// `.grad` is what show_one made.
  bool is_own(std::size_t parameter) const;
  /// It is not, and somebody has what show_one made, or a view of it: the
  /// values have to stay.
  bool is_kept_by_user(std::size_t parameter) const;
  void show_one(std::size_t parameter);
  /// Every `.grad` of the group is the user's from here on.
  void leave_to_user(std::size_t group);
  /// Returns whether some rank had a gradient of it for this backward's
  /// reduction.
  bool is_used(std::size_t parameter) const;
  /// Does nothing where no rank had one and it has no `.grad`.
  void show_parameter(std::size_t parameter);
  void run_hooks(std::size_t parameter);
  void end_backward();
  at::Tensor users_rows(std::size_t parameter) const;
  std::shared_ptr<PyUnit> unit_;
  std::vector<at::Tensor> shards_;
  py::object beside_;
  py::object rows_of_;
  std::vector<Indices> members_;  ///< of each group; none of frozen ones
  std::vector<Shown> shown_;
  /// The stage of a group in the backward that runs.
  enum class Stage { waits, reduced, shown };
  struct Progress {
    Stage stage = Stage::waits;
    Indices late;     ///< shown: but for these
    at::Tensor flat;  ///< what they are part of, if any
  };
  std::vector<Progress> progress_;  ///< of each group
};

}  // namespace flatshard::python
