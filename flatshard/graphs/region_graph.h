#pragma once

#include "flatshard/autograd/autograd_node.h"
#include "flatshard/device/graph.h"
#include "flatshard/graphs/graph_uses.h"
#include "flatshard/graphs/plane_places.h"
#include "flatshard/graphs/target_sink.h"
#include "flatshard/nn/region.h"
#include "flatshard/unit/unit.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace flatshard {

class Runtime;

/// The owner of a region's code.
struct RegionOwner {
  /// Null: a program in another language, without recomputed regions.
  nn::Module* module = nullptr;
  /// The contexts of the layers that may request a WgradSink.
  std::vector<nn::ModuleContextPtr> contexts;
  /// The generators of these layers in addition to the default ones.
  std::vector<at::Generator> generators;
};

/// One region of a unit in one gradient mode: its forward and its backward as
/// graphs, and the memory that these read and write.
///
/// The kernels of a graph have fixed addresses: of static inputs, outputs and
/// saved tensors, stored here, and of the unit's parameters and gradients, with
/// places in the plan of slots. Both are compared before each replay, and no
/// memory in use is overwritten. The caller runs a forward eagerly that cannot
/// be replayed. A backward runs the recorded autograd graph kernel by kernel
/// then.
class RegionGraph : public std::enable_shared_from_this<RegionGraph> {
 public:
  /// One input, as the last eager call had it.
  struct Input {
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    at::TensorOptions options;
    bool requires_grad = false;
    /// The region that wrote its memory, or null: in a graph they share it.
    std::shared_ptr<RegionGraph> source;
    std::size_t source_output = 0;
    /// The region whose output it is for autograd, or null.
    std::shared_ptr<RegionGraph> producer;
    std::size_t producer_output = 0;
  };
  struct Call {
    nn::RegionFn fn;
    nn::TensorList constants;
    bool recompute = false;
    bool preserve_rng = false;    ///< it draws the same numbers then
    bool keep_attention = false;  ///< see nn::RecomputeOptions
    /// The forward ran within a backward, with the weights unsharded for it.
    bool in_backward = false;
    bool in_second_run = false;  ///< see nn::in_second_run
    std::vector<Input> inputs;
  };
  /// The only region that consumes an output; null: another consumer.
  struct Consumer {
    std::shared_ptr<RegionGraph> region;
    std::size_t input = 0;
  };
  /// Misses. Another capture fixes the first two, because it copies inputs from
  /// elsewhere.
  static constexpr const char* kOtherInput = "an input comes from elsewhere";
  static constexpr const char* kOtherGradient =
      "the gradient of an output comes from elsewhere";
  static constexpr const char* kInUse =
      "what it or a later region wrote before is still in use";
  /// Called at each backward: null for a replay, else the reason why it was
  /// none.
  using OnBackward =
      std::function<void(const RegionGraph& region, const char* miss)>;

  struct Options {
    std::string name;
    RegionOwner owner;
    std::weak_ptr<Runtime> runtime;   ///< gives weights, receives gradients
    std::shared_ptr<GraphUses> uses;  ///< of all graphs of the pool
    bool with_grad = false;           ///< a backward follows its forward
    OnBackward on_backward;
  };
  /// @param unit  outlives this.
  RegionGraph(Unit& unit, Options options);
  ~RegionGraph();

  /// "attn of unit layers.3".
  const std::string& name() const { return name_; }
  Unit& unit() const { return unit_; }
  bool with_grad() const { return with_grad_; }
  /// Sets the call that the next capture records.
  void learn(Call call) { call_ = std::move(call); }
  const Call& call() const { return call_; }

  // Capture, in the order of a step, while the unit's parameters point at where
  // they will be.

  /// @param planes  of a unit with FP8 weights, else null.
  void capture_forward(
      GraphPool& pool,
      std::shared_ptr<PlanePlaces> planes = nullptr);
  /// @param consumers  one per output.
  /// @param targets    where gradients of parameters will go.
  void capture_backward(
      GraphPool& pool,
      const std::vector<Consumer>& consumers,
      TargetSink& targets,
      std::shared_ptr<PlanePlaces> planes = nullptr);
  /// Audits the graph that was captured last, forward or backward, before its
  /// parameters point elsewhere.
  /// @param targets  as for `capture_backward`.
  GraphAudit audit(const TargetSink& targets) const;
  bool captured() const { return captured_; }
  std::size_t num_outputs() const { return outputs_.size(); }
  /// Frees the memory. A later backward is an error.
  void drop();

  /// Returns why a call with `inputs` cannot be a replay; null: it can.
  const char* miss(const nn::TensorList& inputs);
  /// Queues the forward on the current stream. Only after `miss` returned null.
  nn::TensorList replay(const nn::TensorList& inputs);

 private:
  struct Open;
  struct ReplayFunction;
  class ParameterScope;

  nn::TensorList run_forward();
  nn::TensorList grads_of_inputs(TargetSink& sink);
  nn::TensorList differentiate(const nn::TensorList& grads, TargetSink& sink);
  nn::TensorList outputs_of_replay(
      const nn::TensorList& inputs,
      const std::shared_ptr<void>& use);
  nn::TensorList backward(Open& open, const nn::TensorList& grads);
  const char* miss_of_backward(
      const nn::TensorList& grads,
      const std::vector<std::optional<nn::WgradTarget>>& targets);
  /// The entry of FP8 weights without a single address is null.
  std::vector<const void*> parameter_addresses() const;
  /// Compute waits for them; false: they are elsewhere.
  bool planes_are_there(const std::shared_ptr<PlanePlaces>& planes) const;
  /// Returns the number of parameters that the recorded autograd graph reaches.
  std::size_t num_used() const;

  std::string name_;
  RegionOwner owner_;
  Unit& unit_;
  std::weak_ptr<Runtime> runtime_;
  std::shared_ptr<GraphUses> uses_;
  bool with_grad_;
  OnBackward on_backward_;
  Call call_;
  bool captured_ = false;

  std::unique_ptr<DeviceGraph> forward_;
  std::int64_t forward_number_ = 0;
  nn::TensorList inputs_;  ///< static; leaves of the recorded autograd graph
  /// For each input, the region whose output it is, where the two share memory;
  /// else null.
  std::vector<std::shared_ptr<RegionGraph>> chained_;
  nn::TensorList live_;     ///< outputs with the recorded autograd graph
  nn::TensorList outputs_;  ///< static
  std::vector<int> aliased_input_;  ///< whose memory an output is, or -1
  std::vector<bool> is_constant_;   ///< an output that no gradient flows to
  /// Results that the forward of a recomputed region keeps for its backward, in
  /// memory of the pool. Both graphs address them there.
  nn::KeptTensors kept_;
  std::vector<const void*> forward_addresses_;
  std::shared_ptr<PlanePlaces> forward_planes_;
  /// Accumulators of the recorded graph, by parameter; null: not used.
  std::vector<NodePtr> accumulators_;

  std::unique_ptr<DeviceGraph> backward_;
  std::int64_t backward_number_ = 0;
  nn::TensorList grad_outputs_;  ///< static; undefined: needs none
  /// For each output, the region whose input's gradient it is, where the two
  /// share memory. That region owns this one by its `chained_`.
  std::vector<std::weak_ptr<RegionGraph>> chained_grads_;
  std::vector<const void*> backward_addresses_;
  std::shared_ptr<PlanePlaces> backward_planes_;
  /// Parameters whose gradients a backward writes: which, where, and whether it
  /// adds to what was there.
  struct Written {
    std::size_t parameter = 0;
    const void* data = nullptr;
    bool accumulate = false;
  };
  std::vector<Written> written_;

  /// Inputs that once had memory from elsewhere, by number.
  std::set<std::size_t> copied_inputs_;
  std::set<std::size_t> copied_grads_;

  std::int64_t num_forwards_ = 0;
  std::weak_ptr<void> waits_;        ///< for the backward of the last forward
  std::weak_ptr<void> forward_use_;  ///< what the last one wrote
  std::weak_ptr<void> backward_use_;
};

}  // namespace flatshard
