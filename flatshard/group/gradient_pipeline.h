#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/group/group_options.h"
#include "flatshard/group/reduced_gradient.h"

namespace flatshard {

/// The gradient of a ParamGroup on its way from the slots of a step's
/// microbatches to what the optimizer reads. It waits in up to three places:
///
/// | place   | dtype       | placement | holds                              |
/// |---------|-------------|-----------|------------------------------------|
/// | local   | main_grads  | partial   | not yet reduced at all             |
/// | inner   | main_grads  | gradient  | not yet reduced over outer axes    |
/// | reduced | main_grads* | optimizer | the step's gradient                |
///
/// local belongs to ZeRO-0/1 and no_sync, inner to HSDP and HFSDP. Each has
/// memory from the first reduction into it to zero(), so that the memory serves
/// activations in between. *: see ParamGroupOptions::grads_in_reduce_dtype.
/// With ParamGroupOptions::offload the reduced one is in host memory.
class GradientPipeline {
 public:
  /// @param context  outlives this.
  explicit GradientPipeline(const GroupContext& context)
      : context_(context), reduced_(context) {}
  GradientPipeline(const GradientPipeline&) = delete;
  GradientPipeline& operator=(const GradientPipeline&) = delete;

  /// A sum that gradients are added to before the reduction is planned.
  struct OpenSum {
    at::Tensor flat;   ///< [layout.numel()] float32
    bool add = false;  ///< else it is uninitialized
  };
  /// Returns the sum that the next reduction adds to, if all it does with a
  /// gradient in the slot is to add it there: without a collective, a hook, a
  /// division or another dtype. Allocates like plan.
  /// @param collective, is_last  of the next plan.
  /// @param may_allocate  false: nullopt if the sum does not exist yet.
  std::optional<OpenSum>
  open_sum(bool collective, bool is_last, bool may_allocate = true);
  /// A reduction of this step writes the part of parameter `index` to the sum,
  /// so only reductions may: with several microbatches in flight, compute does
  /// not wait for them.
  void mark_reduced_to_sum(std::int64_t index) {
    insert(reduced_to_sum_, index);
  }
  bool is_reduced_to_sum(std::int64_t index) const {
    return contains(reduced_to_sum_, index);
  }
  /// The gradient of parameter `index` was added to the open sum. The next
  /// reduction does not read its part of the slot, or adds it as well.
  void mark_summed(std::int64_t index, bool is_in_slot) {
    (is_in_slot ? summed_and_in_slot_ : summed_).push_back(index);
  }
  /// No reduction follows: drops a sum that is not complete.
  void close_sum();

  /// How far a reduction of one microbatch brings the gradient.
  enum class Path {
    local,  ///< nowhere: added up on this rank, without a collective
    inner,  ///< over the inner axes, where it waits for the step's last one
    rest,   ///< over all axes
    outer,  ///< over all axes, the outer one last and by reduce_outer
    /// The same without an inner axis and without waiting gradients:
    /// reduce_outer reads the slot itself.
    outer_of_slot,
  };

  /// Decided on the host, carried out later on the reduce stream.
  struct Reduction {
    Path path = Path::rest;
    /// Gradients of earlier microbatches that wait, and are added to.
    struct Adds {
      bool local = false;
      bool inner = false;
      bool reduced = false;
    };
    Adds adds;
    bool widen = false;  ///< convert the existing gradient from the reduce
                         ///< dtype first
    /// The parts of the slot to add, where some gradients are in the sum
    /// already; empty: all of it.
    struct Part {
      FlatRange range;
      bool add = false;
    };
    std::vector<Part> parts;
    /// The redistributions to run, in this order; null: none. Kept here.
    const Redistribution* inner = nullptr;    ///< to what waits in between
    const Redistribution* outside = nullptr;  ///< over all but the outer axis
    const Redistribution* last = nullptr;     ///< for reduce_outer, if by_outer

    /// reduce_outer ends it.
    bool by_outer() const {
      return path == Path::outer || path == Path::outer_of_slot;
    }
    /// Returns whether the optimizer's gradient is complete afterwards.
    bool is_complete() const {
      return path != Path::local && path != Path::inner;
    }
    /// Returns the communicators of reduce_inner, and of reduce_outer.
    std::vector<Communicator*> inner_groups() const;
    std::vector<Communicator*> outer_groups() const;
  };
  /// Allocates what is missing, on the current stream: later work of the reduce
  /// stream waits for it, and it waits for the reductions before zero().
  Reduction plan(bool collective, bool is_last);
  /// Carries it out, except for the outer axis where Reduction::by_outer is
  /// set. Collective; inside Stream::submit, on the reduce stream.
  /// @param slot  [layout.numel()] reduce dtype, this rank's gradient; padding
  ///   is zero. Overwritten; see Path::outer_of_slot.
  /// @return  the input of reduce_outer; undefined where nothing is to do.
  at::Tensor reduce_inner(const at::Tensor& slot, const Reduction& reduction);
  /// Does the rest, over the outer axis of HSDP and HFSDP, often a slower
  /// network. On a separate stream and communicator it does not delay the inner
  /// axes' next reduction. Collective; inside Stream::submit.
  void reduce_outer(const at::Tensor& inner, const Reduction& reduction);
  /// Returns whether the outer axis is reduced apart from the inner ones, in
  /// all groups of a model alike: a communicator has one stream.
  bool has_outer_stage() const {
    return context_.plan.storage.has_outer_stage();
  }
  /// Both, on one stream.
  void reduce(const at::Tensor& slot, const Reduction& reduction) {
    reduce_outer(reduce_inner(slot, reduction), reduction);
  }

  /// Called in the reduce stream with each reduced gradient: [shard] like main,
  /// in the dtype of the reduction, not yet divided by a divisor or added to
  /// earlier microbatches'. The tensor as changed in place is the gradient. An
  /// exception is an error of the reduction.
  using Hook = std::function<void(const at::Tensor& reduced)>;
  /// Takes effect from the next backward on; an empty function for none.
  void set_hook(Hook hook) { hook_ = std::move(hook); }

  /// This rank has a gradient of parameter `index` of the layout, not only
  /// zeros, for the reductions from here on.
  void mark_contributed(std::int64_t index) { insert(contributes_, index); }
  /// Returns whether a reduction since forget_contributions() had one of some
  /// parameter.
  bool contributed() const { return !contributed_.empty(); }
  /// The same of parameter `index`: from this rank, or from another one that
  /// mark_others_contributed named.
  bool contributed(std::int64_t index) const {
    return contains(contributed_, index);
  }
  /// Marks that another rank had one for such a reduction.
  void mark_others_contributed(std::int64_t index) {
    insert(contributed_, index);
  }
  /// Called before a backward.
  void forget_contributions() { contributed_.clear(); }

  /// Returns the gradient for the optimizer.
  ReducedGradient& reduced() { return reduced_; }
  const ReducedGradient& reduced() const { return reduced_; }
  /// Returns whether microbatches were accumulated but not reduced over all
  /// axes.
  bool has_unreduced() const { return local_.is_filled || inner_.is_filled; }

  /// Drops all gradients and frees their memory. The current stream has waited
  /// for the reductions (it has at the end of a backward).
  void zero();
  /// Multiplies gradients (reduced and not) by `factor`. On the current stream.
  void scale(double factor);

  /// The mesh, or how gradients are divided, is another one now.
  void replan();

  // Graphs of steps use this: a replay repeats the device's work, but not the
  // host work.

  /// Indices of parameters, each with a 1; empty without any.
  using IndexSet = std::vector<std::uint8_t>;
  /// The results of a step.
  struct Contents {
    /// The memory of local, inner and reduced, and of reduced before it was
    /// widened; undefined if not allocated.
    std::array<at::Tensor, 4> tensors;
    bool local_is_filled = false;
    bool inner_is_filled = false;
    bool has_reduced = false;
    IndexSet contributed;
  };
  /// Returns whether no gradient exists, as after zero().
  bool is_empty() const;
  /// Hands out the existing gradients; then it is as after zero().
  Contents take();
  /// Replaces the reductions of a step. Nothing was there.
  void put(const Contents& contents);
  bool has_hook() const { return static_cast<bool>(hook_); }

  struct Bytes {
    std::int64_t reduced = 0, inner = 0, local = 0;
  };
  Bytes nbytes() const;

 private:
  /// The buffers where gradients of microbatches are summed.
  struct Sum {
    FlatBuffer buffer;
    bool is_filled = false;
  };
  /// The ranks over which it is reduced so far.
  enum class Stage {
    unreduced,  ///< none: only this rank's gradient
    inner,      ///< what waits between microbatches
    outside,    ///< all but the outer axis
    rest,       ///< all
  };

  static bool contains(const IndexSet& indices, std::int64_t index) {
    return index < std::ssize(indices) && indices[index] != 0;
  }
  static void insert(IndexSet& indices, std::int64_t index) {
    if (index >= std::ssize(indices)) {
      indices.resize(index + 1);
    }
    indices[index] = 1;
  }

  void allocate(
      FlatBuffer& buffer,
      const Placements& placements,
      at::ScalarType dtype) const;
  Placements placements_at(Stage stage) const;
  /// Planned at its first use.
  const Redistribution* redistribution(Stage from, Stage to);
  void add_to_reduced(at::Tensor reduced, bool add);
  void finish(const at::Tensor& source, const Reduction& r);
  const Placements& at_rest() const;  ///< Shard or Replicate, never Partial
  /// Returns Reduction::parts of a sum that is added to if `add`.
  std::vector<Reduction::Part> take_parts(bool add);

  const GroupContext& context_;
  Sum local_;
  Sum inner_;
  ReducedGradient reduced_;
  IndexSet contributes_;
  IndexSet contributed_;
  IndexSet reduced_to_sum_;
  std::vector<std::int64_t> summed_;
  std::vector<std::int64_t> summed_and_in_slot_;
  /// Arguments of open_sum since the last plan.
  struct Opened {
    bool collective = false;
    bool is_last = false;
    bool operator==(const Opened&) const = default;
  };
  std::optional<Opened> opened_;
  /// Of the open sum, if that is the reduced gradient.
  std::optional<ReducedGradient::Space> space_;
  Hook hook_;
  std::map<std::pair<Stage, Stage>, Redistribution> redistributions_;
};

}  // namespace flatshard
