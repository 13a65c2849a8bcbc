#pragma once

#include "flatshard/graphs/region_graph.h"
#include "flatshard/graphs/unit_slots.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flatshard {

/// The work of regions in the step that runs, eagerly: their graphs are made
/// from it.
///
/// The order of forwards and backwards becomes the order of the recordings.
/// Inputs in memory that another region wrote, and outputs with a gradient from
/// only one region, will be the same static tensor in both graphs.
class StepWatch : public std::enable_shared_from_this<StepWatch> {
 public:
  struct Run {
    std::shared_ptr<RegionGraph> graph;
    bool backward = false;
    /// For interleaved microbatches: the unit's slots when it ran. Null: the
    /// step's slots.
    std::shared_ptr<UnitSlots> slots;
  };
  using CurrentSlots =
      std::function<std::shared_ptr<UnitSlots>(const Unit& unit)>;

  /// Called for each run from now on.
  void set_current_slots(CurrentSlots slots) {
    current_slots_ = std::move(slots);
  }

  /// A forward of the region starts: `graph` records `call`.
  /// @param call  without its inputs, because they are found here.
  void forward_begins(
      const std::shared_ptr<RegionGraph>& graph,
      RegionGraph::Call call,
      const nn::TensorList& inputs);
  /// And ends. Backwards through `outputs` are watched until `stop`.
  void forward_ended(
      const std::shared_ptr<RegionGraph>& graph,
      const nn::TensorList& inputs,
      const nn::TensorList& outputs);

  /// Returns the forwards and backwards, each once, in the order of the step.
  const std::vector<Run>& order() const { return order_; }
  /// Returns the single consumer of each output, the source of its gradient.
  std::vector<RegionGraph::Consumer> consumers_of(
      const std::shared_ptr<RegionGraph>& graph) const;

  /// Called when another step starts.
  void forget();
  void stop() { stopped_ = true; }
  void start() { stopped_ = false; }

 private:
  struct Source {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::shared_ptr<RegionGraph> graph;
    std::size_t output = 0;
  };
  struct Producer {
    WeakNodePtr node;  ///< its address may be reused
    std::shared_ptr<RegionGraph> graph;
    std::size_t output = 0;
  };

  RegionGraph::Input describe(const at::Tensor& input) const;
  void ran(const std::shared_ptr<RegionGraph>& graph, bool backward);

  CurrentSlots current_slots_;
  bool stopped_ = false;
  std::vector<Run> order_;
  std::unordered_map<const void*, Source> sources_;  ///< by address
  /// The region that made an output, by autograd's node and its output.
  std::map<std::pair<const void*, std::uint32_t>, Producer> producers_;
};

}  // namespace flatshard
