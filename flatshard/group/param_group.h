#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/peer_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/core/init_spec.h"
#include "flatshard/device/stream.h"
#include "flatshard/group/initializer.h"
#include "flatshard/group/named_shard.h"
#include "flatshard/group/parameter_placement.h"
#include "flatshard/group/precision.h"
#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/strategy.h"

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// One parameter on its way into a group.
struct GroupParameter {
  std::vector<std::string> names;   ///< the main name first
  std::vector<std::int64_t> shape;  ///< of this rank's tensor
  Granularity granularity;
  InitSpec init;
  /// Values to start from, the same on every rank; undefined: `init` draws.
  at::Tensor values;
  std::map<std::string, std::string> attributes;
  /// No module has it any more: checkpoints leave it out.
  bool dropped = false;
  /// Of a larger tensor; absent: the parameter is whole.
  std::optional<TensorSlice> slice = std::nullopt;

  /// Of the larger tensor, where the parameter is a part of one.
  std::vector<std::int64_t> whole_shape() const;
  /// Where the parameter's elements begin in it, flattened.
  std::int64_t first_element() const;
};

struct ParamGroupOptions {
  std::string name;  ///< for messages, e.g. the unit's
  Strategy strategy;
  Precision precision;
  GradScaling scaling = GradScaling::mean;
  /// Gradients are divided by this as well: for experts, the number of slices.
  /// A narrow gradient is divided in Precision::reduce.
  double grad_divisor = 1;
  /// The mesh of the whole model, of which the group's may be a part: norms,
  /// checkpoints and exports count over it. Null: the group's own.
  std::shared_ptr<Mesh> model_mesh = nullptr;
  bool trainable = true;
  /// The gradient of a step's only reduction stays in Precision::reduce, which
  /// holds what came over the wire exactly; a second one widens it to
  /// main_grads first. For optimizers that read any dtype, as Flatshard's do.
  bool narrow_grads = false;
  /// false: main weights are cast into the gathered slot before each gather and
  /// nothing of compute's dtype rests in between. Saves its bytes and costs a
  /// pass over the main weights per gather. Only where all of these are: main
  /// weights of another dtype, and weights cut like the optimizer's (ZeRO-3);
  /// elsewhere it has no effect.
  bool keep_compute_weights = true;
  /// Compute weights lie where the other ranks can read them, so that a gather
  /// can be copies: see Gather::copies. Needs all ranks on one host. Where
  /// weights rest whole it has no effect.
  bool peers_read_weights = false;
  /// Main weights and reduced gradients rest in host memory, and so does what
  /// optimizers keep beside them; updates run on the CPU. Compute weights that
  /// are kept stay on the device; without them each gather begins with a copy
  /// of this rank's main weights. Needs no communication of the host's own.
  bool offload = false;
  /// With offload: that host memory is pinned, so copies run beside kernels.
  bool pin_memory = true;
  LayoutOptions layout;
};

/// The parameters of one unit that share dtype, trainability, mesh and
/// strategy. Owns their flat buffers:
///
/// | buffer  | dtype       | placement | holds                              |
/// |---------|-------------|-----------|------------------------------------|
/// | main    | main_params | optimizer | what the optimizer updates         |
/// | compute | compute     | parameter | what is gathered for the kernels;  |
/// |         |             |           | see keep_compute_weights           |
/// | grad    | main_grads* | optimizer | the step's reduced gradient (lazy) |
/// | inner   | main_grads  | gradient  | not yet reduced over outer axes    |
/// | local   | main_grads  | partial   | not yet reduced at all             |
///
/// inner is HSDP's and HFSDP's, local that of ZeRO-0/1 and no_sync; both are
/// lazy too. Lazy: from the first reduction of a step to zero_grad, so that the
/// memory serves activations in between. *: see
/// ParamGroupOptions::narrow_grads.
///
/// A frozen group has no main weights and no gradients. When main and compute
/// have one dtype they share memory. With ParamGroupOptions::offload main
/// (a frozen group's too, in compute's dtype) and grad are in host memory and
/// main shares none.
class ParamGroup {
 public:
  ParamGroup(
      std::vector<GroupParameter> parameters,
      std::shared_ptr<Mesh> mesh,
      ParamGroupOptions options,
      const Initializer& initializer);
  /// A copy would share the memory and not what is known of it.
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const ParamGroupOptions& options() const { return options_; }
  const FlatLayout& layout() const { return *layout_; }
  const std::vector<GroupParameter>& parameters() const { return parameters_; }
  const std::shared_ptr<Mesh>& mesh() const { return mesh_; }
  /// The whole model's.
  const std::shared_ptr<Mesh>& model_mesh() const { return model_mesh_; }
  /// Communicates through `mesh` from now on, which has the axes of the one
  /// before (Mesh::same_as). While no gather and no reduction runs.
  void use_mesh(std::shared_ptr<Mesh> mesh);
  bool trainable() const { return options_.trainable; }
  /// For messages.
  void set_name(std::string name) { options_.name = std::move(name); }
  /// The main name first. The layout keeps the names it was built with.
  void set_names(std::int64_t parameter, std::vector<std::string> names);
  /// Gradients are summed and divided by `divisor` instead of the number of
  /// ranks, from the next reduction on. Equal on all ranks.
  /// @throws Error{config} when divisor <= 0.
  void set_divisor(double divisor);
  /// Called in the reduce stream with each reduced gradient: [shard] like main,
  /// in the dtype of the reduction, not yet divided by a divisor or added to
  /// those of microbatches before. What it changes in place is the gradient;
  /// what it throws is an error of the reduction.
  using ReducedHook = std::function<void(const at::Tensor& reduced)>;
  /// From the next backward on; an empty function for none.
  void set_reduced_hook(ReducedHook hook) { reduced_hook_ = std::move(hook); }
  /// Of a parameter, e.g. {"weight_decay", "none"}; optimizers read them when
  /// they are made.
  void
  set_attribute(std::int64_t parameter, std::string key, std::string value);
  /// From now on checkpoints know nothing of the parameter. It keeps its place.
  void drop(std::int64_t parameter) {
    parameters_.at(parameter).dropped = true;
  }

  // Weights ------------------------------------------------------------------

  /// [shard] main weights; frozen groups: the compute weights.
  const FlatBuffer& main() const { return main_; }
  /// The same on the mesh's device: a copy, queued on the current stream, where
  /// main is in host memory. Who overwrites main calls prepare_write first.
  FlatBuffer main_on_device() const;
  /// [shard] the slice of the compute weights that belongs to `main`; the
  /// optimizer writes it together with main. Undefined when main is that slice
  /// or when there is none.
  at::Tensor compute_shard() const;
  /// Not defined when compute weights are not kept.
  const FlatBuffer& compute() const { return compute_; }

  /// True when compute weights rest whole on every rank.
  bool resident() const { return resident_; }
  /// True when the ranks hold pieces that a change of the weights has to spread
  /// (ZeRO-1/2, HFSDP).
  bool has_refresh() const { return has_refresh_; }

  /// How one gather runs: decided on the host, carried out later on the gather
  /// stream.
  struct Gather {
    /// No gather since the last change of the weights: wait_for_weights.
    bool is_first = false;
    /// First spread the optimizer's slices to `compute`. Collective.
    bool refresh = false;
    /// By copies of what the peers hold; else an all-gather, a collective.
    bool copies = false;
    /// Before the copies: the peers have written theirs. Collective.
    bool fence = false;
  };
  /// Call it once per gather and then carry that out: what it plans for a
  /// change of the weights it does not plan again.
  /// @param copies  where the peers can read; equal on all ranks.
  Gather plan_gather(bool copies = false);
  /// A gather that was planned may not have been carried out.
  void mark_stale() { gathered_ = fenced_ = 0; }
  /// Carries it out. Inside Stream::submit.
  /// @param out  [layout.numel()] compute dtype, the whole weights. Resident
  ///   groups do not use it: theirs are in `compute`.
  void gather(const at::Tensor& out, const Gather& gather);

  /// Later work of the current stream may overwrite the weights: no peer copies
  /// them any more. Reductions say so by themselves; this is a fence where
  /// there was none since the last copies (an evaluation before the optimizer's
  /// step). Optimizers and loaders call it; who else writes weights that peers
  /// read does, too, on all ranks.
  void prepare_write();
  /// The weights changed: call after writing main and compute shards on the
  /// current stream, or on `stream`.
  void mark_weights_changed();
  void mark_weights_changed(Stream& stream);
  /// Later work of `stream` sees what was written before the last change.
  void wait_for_weights(Stream& stream) const { written_.wait(stream); }
  /// Rises with every change of the weights.
  std::int64_t generation() const { return generation_; }
  /// When somebody else wrote main (in place, through a tensor operation),
  /// casts it to the compute shard and says so. On the current stream.
  bool adopt_foreign_writes();
  /// Somebody else wrote main in a way that no tensor's version shows.
  void mark_written() { main_version_ = main_.local()._version() - 1; }
  /// main -> compute shard, and says so. On the current stream.
  void cast_main_to_compute();
  /// The same without saying so. For optimizers that only write main.
  void update_compute();
  /// Blocks until main, in host memory, may be overwritten.
  void wait_for_uploads() const { uploaded_.synchronize(); }

  // Gradients ----------------------------------------------------------------

  /// How a reduction of one microbatch begins: decided on the host, carried
  /// out later on the reduce stream.
  struct Reduction {
    bool collective = true;
    bool add_local = false;
    bool add_inner = false;
    bool add_grad = false;
    bool to_inner = false;
    bool widen = false;  ///< grad from narrow_ first
  };
  /// Allocates what is missing, on the current stream: later work of the reduce
  /// stream waits for it, and it waits for the reductions before zero_grad.
  Reduction plan_reduction(bool collective, bool is_last);
  /// Carries it out. Collective; inside Stream::submit.
  /// @param slot  [layout.numel()] reduce dtype, this rank's gradient; padding
  ///   is zero. Overwritten.
  void reduce(const at::Tensor& slot, const Reduction& reduction);

  /// This rank has a gradient of some parameter, not only zeros, for the
  /// reductions from here on.
  void mark_contributed() { contributes_ = true; }
  /// The last reduction to grad() had one from this rank.
  bool contributed() const { return contributed_; }

  /// A reduced gradient is there since the last zero_grad.
  bool has_grad() const { return has_grad_ && !(lent_ && lent_->expired()); }
  /// Microbatches were accumulated but not reduced over all axes.
  bool has_unreduced_grad() const { return has_local_ || has_inner_; }
  /// [shard] like main, in main_grads, or in the dtype of the reduction when it
  /// is narrow. Undefined from zero_grad to the next reduction.
  /// @throws Error{internal} while it is lent.
  const FlatBuffer& grad() const;
  /// Leaves the gradient to those who hold `grad().local()` already: it is gone
  /// when the last of them drops it. Between steps, when users see gradients as
  /// tensors of theirs. A gradient in host memory stays, since pinning it anew
  /// takes longer than a step.
  void lend_grad();
  /// Takes back what is left of it: before a reduction and before grad().
  void reclaim_grad();
  /// Forgets all gradients and gives their memory back. The current stream has
  /// waited for the reductions (it has at the end of a backward).
  void zero_grad();
  /// The same for the reduced gradient only: what was accumulated without a
  /// reduction joins the next one.
  void forget_grad();
  /// Multiplies gradients (reduced and not) by `factor`. On the current stream.
  void scale_gradients(double factor);
  /// The ranks of the model's mesh that hold the same elements of `main`: how
  /// many they are, and which of them this one is.
  struct Replicas {
    std::int64_t index = 0;
    std::int64_t count = 1;
  };
  Replicas replicas() const;

  // Views --------------------------------------------------------------------

  /// What this rank owns of each parameter, in `main`.
  std::vector<NamedShard> main_shards() const;
  /// The same runs of another flat tensor of main's size, e.g. an optimizer
  /// state or the gradient.
  std::vector<NamedShard> shards_of(const at::Tensor& flat) const;

  struct Bytes {
    std::int64_t main = 0, compute = 0, grad = 0, inner = 0, local = 0;
  };
  Bytes nbytes() const;

 private:
  /// What this group's tensors go through in every step.
  enum class Way { gather, to_inner, inner_to_final, to_final, count };
  /// Planned at its first use, on the stream that runs it.
  const Redistribution& way(Way which) const;

  void check_slices() const;
  void allocate_weights();
  void unshard(const at::Tensor& out) const;
  void initialize(const Initializer& initializer);
  void allocate(
      FlatBuffer& buffer,
      const Placements& placements,
      at::ScalarType dtype,
      bool on_host = false);
  void download_grad(const at::Tensor& reduced, bool add);
  bool can_stay_narrow() const;
  void check_not_lent() const;
  Placements partial_everywhere() const;
  Placements final_gradient() const;

  std::vector<GroupParameter> parameters_;
  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<Mesh> model_mesh_;
  ParamGroupOptions options_;
  std::shared_ptr<const FlatLayout> layout_;
  mutable std::
      array<std::optional<Redistribution>, static_cast<std::size_t>(Way::count)>
          ways_;
  bool resident_ = true;
  bool has_refresh_ = false;
  bool main_is_compute_ = false;

  std::unique_ptr<PeerBuffer> peers_;  ///< owns compute_, where there is one
  FlatBuffer compute_;
  FlatBuffer compute_shard_;  ///< optimizer placement; mostly a view
  FlatBuffer main_;
  std::uint32_t main_version_ = 0;
  std::int64_t generation_ = 1;
  std::int64_t gathered_ = 0;  ///< up to which generation
  std::int64_t fenced_ = 0;
  bool copied_ = false;  ///< by peers, and no reduction since
  Event written_;
  mutable Event uploaded_;  ///< offload: main was read from host memory

  FlatBuffer grad_;
  FlatBuffer host_grad_;  ///< offload: its memory between steps
  FlatBuffer narrow_;     ///< what grad_ was before it was widened
  FlatBuffer inner_;
  FlatBuffer local_;
  /// grad_'s tensor while that is lent.
  std::optional<
      c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>>
      lent_;
  bool has_grad_ = false;
  bool has_inner_ = false;
  bool has_local_ = false;
  bool contributes_ = false;
  bool contributed_ = false;
  ReducedHook reduced_hook_;
};

}  // namespace flatshard
