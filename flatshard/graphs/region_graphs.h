#pragma once

#include "flatshard/device/graph.h"
#include "flatshard/graphs/graph_life.h"
#include "flatshard/graphs/region_graph.h"
#include "flatshard/graphs/step_watch.h"
#include "flatshard/graphs/unit_slots.h"
#include "flatshard/nn/region.h"
#include "flatshard/runtime/observer.h"

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace flatshard {

class Runtime;
struct RuntimeOptions;

/// @throws Error{config} that names an option incompatible with graphs.
void check_graph_options(
    const RuntimeOptions& options,
    at::Device device,
    const std::vector<std::unique_ptr<Unit>>& units);

/// The graphs of all regions of one model.
///
/// The first steps run eagerly and are watched: which regions run, on what
/// inputs, and the places of the unit's weights and gradients. Then all are
/// captured at once, between two steps, and replayed from then on. Capture
/// executes nothing, so weights need not be unsharded: parameters point at the
/// places that the plan of slots has for them.
class RegionGraphs : public nn::RegionRunner,
                     public SlotObserver,
                     public StepObserver,
                     public GradientObserver,
                     public std::enable_shared_from_this<RegionGraphs> {
 public:
  /// @param units  outlive this.
  /// @param runtime  provides weights, and receives gradients.
  RegionGraphs(
      const std::vector<std::unique_ptr<Unit>>& units,
      at::Device device,
      GraphOptions options,
      std::weak_ptr<Runtime> runtime);
  ~RegionGraphs() override;

  /// A forward of the root starts. After a change of the weights the first one
  /// in gradient mode starts another step, and captures when enough was seen.
  /// @param at_rest  no slot is in use and no backward is open.
  void root_forward_begins(bool weights_changed, bool at_rest) override;
  /// Graphs write gradients to slots. Eager steps before the captures, and
  /// after a resume, must not round them in another way.
  bool needs_slots() const override { return true; }
  /// Steps have several microbatches in flight at once, each with separate
  /// graphs, until the returned handle is destroyed; otherwise all share the
  /// same graphs. Drops all graphs, then and now.
  /// @throws Error{config} that names a kind of graph that does not support it.
  std::shared_ptr<void> interleave_microbatches();
  /// The microbatch whose regions run next; 0 unless they interleave.
  void set_microbatch(int microbatch) { microbatch_ = microbatch; }
  /// Drops all graphs and watches steps again.
  void reset();
  GraphStats stats() const;

  nn::TensorList run(
      nn::Module& owner,
      const char* name,
      nn::RegionFn fn,
      const nn::TensorList& inputs,
      const nn::RegionOptions& options) override;

  // Units without an nn::Module: the forward of each is one region, "block",
  // and its caller calls this first.

  struct UnitForward {
    UnitId unit = kNoUnit;
    /// The forward as a function of `inputs`. Captures call it, while the
    /// unit's parameters have their addresses and no values.
    nn::RegionFn fn;
    nn::TensorList inputs;     ///< defined
    nn::TensorList constants;  ///< as in nn::RegionOptions
    /// Why it cannot be part of a graph now; empty: it can.
    std::string obstacle;
    /// The difference from the last watched forward of this unit, except its
    /// inputs' shapes; empty: none.
    std::string difference;
  };
  struct UnitOutcome {
    std::optional<nn::TensorList> outputs;  ///< of a replay
    /// It was watched: run it, then report it by `unit_ran`.
    bool watched = false;
  };
  /// The caller runs it when there are no outputs.
  UnitOutcome run_unit(const UnitForward& forward);
  void unit_ran(
      UnitId unit,
      const nn::TensorList& inputs,
      const nn::TensorList& outputs);
  struct UnitProgram {
    /// Layers reach their WgradSink by it.
    nn::ModuleContextPtr context;
    /// Called around each capture of such a unit, of its forward or backward:
    /// its code runs next with the unit's parameters, or was run.
    std::function<void(const Unit& unit, bool captures)> around_capture;
  };
  /// Sets the program that runs these units. Before the first of them runs.
  void set_unit_program(UnitProgram program) { program_ = std::move(program); }

  void slot_acquired(const Unit& unit, const SlotKey& key, const Slot& slot)
      override;
  void parameters_pointed(Unit& unit, const SlotView& slot) override;
  void slots_planned(
      const SlotPlan& plan,
      const std::vector<SlotLifetime>& lifetimes) override;

 private:
  struct UnitRegions {
    UnitSlots slots;
    std::vector<nn::Module*> modules{};  ///< the unit's own and all below
    /// The modules among them that own a region that is captured: their hooks
    /// run outside.
    std::vector<const nn::Module*> owners{};
    std::map<int, TargetSink> targets{};  ///< by microbatch

    Unit& unit() const { return slots.unit(); }
  };

  struct Region {
    /// The graphs without and with gradients.
    using Graphs = std::array<std::shared_ptr<RegionGraph>, 2>;

    const char* name = nullptr;
    std::map<int, Graphs> graphs;  ///< by microbatch
    /// train() or eval() of the unit's modules, in the call that was watched.
    std::vector<bool> training;
    std::string failure;      ///< of a capture: eager for good
    bool obstructed = false;  ///< when it would have been watched
  };

  void end_interleaving();
  UnitRegions* unit_of(nn::Module& owner);
  /// @param owner  null: the unit has no module.
  Region& region_of(nn::Module* owner, const char* name, UnitRegions& unit);
  /// Returns the graphs of the microbatch that runs.
  Region::Graphs&
  graphs_of(Region& region, nn::Module* owner, const UnitRegions& unit);
  RegionOwner owner_of(nn::Module* owner, const UnitRegions& unit) const;
  /// Returns the result of a replay, or null after a fallback.
  /// @param reason  not to be one; empty: none so far.
  std::optional<nn::TensorList> try_replay(
      Region& region,
      RegionGraph& graph,
      const nn::TensorList& inputs,
      std::string reason);
  static std::string obstacle(const UnitRegions& unit);
  void step_begins(bool at_rest);
  void learn(
      const std::shared_ptr<RegionGraph>& graph,
      const nn::RegionFn& fn,
      const nn::TensorList& inputs,
      const nn::RegionOptions& options);
  void capture_all();
  void capture(const StepWatch::Run& run);
  void capture_backward(const StepWatch::Run& run);
  /// Returns the unit's when the run was watched.
  UnitSlots& slots_of(const StepWatch::Run& run);
  /// Returns where gradients of the run's microbatch go.
  TargetSink& targets_of(const StepWatch::Run& run);
  /// Returns null when the unit has no FP8 weights.
  static std::shared_ptr<PlanePlaces> places(
      const UnitSlots& slots,
      bool in_backward);
  /// A recording, while the unit's parameters point at where they will be in a
  /// forward or in a backward. Permanently eager if it fails.
  void attempt(
      const StepWatch::Run& run,
      bool in_backward,
      const std::function<void()>& record);
  void forget_step();
  void audit(const RegionGraph& graph, const TargetSink& targets);
  void give_up(RegionGraph& graph, const std::string& why);

  const std::vector<std::unique_ptr<Unit>>& units_;
  at::Device device_;
  std::weak_ptr<Runtime> runtime_;
  std::shared_ptr<GraphPool> pool_;
  std::shared_ptr<GraphUses> uses_ = std::make_shared<GraphUses>();
  std::vector<std::unique_ptr<UnitRegions>> unit_regions_;  ///< by UnitId
  std::unordered_map<const nn::Module*, UnitId> unit_of_module_;
  /// The key is the module that owns them, or the unit that has none.
  std::unordered_map<const void*, std::vector<std::unique_ptr<Region>>>
      regions_;
  struct Place {
    Region* region = nullptr;
    int microbatch = 0;
  };
  std::unordered_map<const RegionGraph*, Place> place_of_graph_;
  UnitProgram program_;
  int microbatch_ = 0;
  int num_interleaving_ = 0;
  GraphLife life_;
  // Evaluations in between belong to no step.
  bool trains_ = false;           ///< the root forward that runs, or ran last
  bool weights_changed_ = false;  ///< since the last step began
  std::shared_ptr<StepWatch> watch_;
};

}  // namespace flatshard
