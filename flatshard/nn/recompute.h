#pragma once

#include "flatshard/nn/module.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace flatshard::nn {

struct RecomputeOptions {
  /// Replays random draws: of the default generators of the CPU and of the
  /// inputs' devices, and of each explicit generator below `owner`
  /// (Module::own_generators). Turn off for parts that draw nothing.
  bool preserve_rng = true;
  /// Keeps the result and the logsumexp of attention in addition to the inputs,
  /// so that the second run launches no attention kernel.
  bool keep_attention = false;
};

/// Results of the first run of a recomputed part that its second run reuses
/// instead of computing them again. Both runs ask for them in the same order.
class KeptTensors {
 public:
  /// While one exists, `keep_once` on this thread uses `kept`; null: it keeps
  /// nothing.
  class Scope {
   public:
    explicit Scope(KeptTensors* kept);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    KeptTensors* outer_;
  };

  /// The next run is a first one.
  void begin_first_run();
  /// The next run is a second one.
  /// @throws Error{usage} when the first run wrote into a kept result.
  void begin_second_run();
  /// Returns all tensors for another owner, in between two runs.
  /// @throws Error{usage} when the first run wrote into a kept result.
  TensorList take_tensors();
  void set_tensors(TensorList tensors);

 private:
  friend TensorList keep_once(
      const char* what,
      const std::function<TensorList()>& compute);

  struct Entry {
    const char* what;
    std::size_t num_tensors;
  };
  void check_unchanged() const;

  std::vector<Entry> entries_;
  TensorList tensors_;                   ///< of all entries
  std::vector<std::uint32_t> versions_;  ///< of the tensors when they were kept
  bool is_second_run_ = false;
  std::size_t next_entry_ = 0;
  std::size_t next_tensor_ = 0;
};

/// Returns the tensors of `compute()`. In a part that keeps them, the second
/// run returns what the first one computed. They may be undefined.
/// @param what  of the results, a literal.
/// @throws Error{usage} when the second run asks for something else.
TensorList keep_once(
    const char* what,
    const std::function<TensorList()>& compute);

/// Returns whether `keep_once` on this thread keeps results.
bool keeps_results();

using RecomputeFn = std::function<TensorList(const TensorList&)>;

/// Runs fn(inputs) without keeping its activations: only the inputs are kept
/// and what RecomputeOptions adds, and backward runs fn again and then backward
/// through it, in a separate (nested) graph task. Parameters that fn reads get
/// their gradients in that task.
///
/// Before the second run the listener of `owner` gets recompute_begin. fn's
/// captures must outlive the graph, and `owner` is kept alive. fn must return
/// the same shapes each time. Its outputs are differentiable tensors.
/// @throws Error{usage} when fn writes into its inputs; in backward under
/// create_graph or with an inputs= list: a nested backward supports neither.
/// Source: Chen et al., arXiv:1604.06174.
TensorList checkpoint(
    Module& owner,
    RecomputeFn fn,
    const TensorList& inputs,
    RecomputeOptions options = {});

/// Returns whether this thread is in the first run of a checkpointed part:
/// without gradient mode, but a backward will follow.
bool in_checkpointed_forward();

/// Returns the same for one tensor in and one out.
at::Tensor checkpoint(
    Module& owner,
    std::function<at::Tensor(const at::Tensor&)> fn,
    const at::Tensor& input,
    RecomputeOptions options = {});

}  // namespace flatshard::nn
