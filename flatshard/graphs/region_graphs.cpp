#include "flatshard/graphs/region_graphs.h"

#include "flatshard/autograd/autograd_task.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/graphs/module_modes.h"
#include "flatshard/graphs/step_watch.h"
#include "flatshard/nn/module_tree.h"
#include "flatshard/nn/second_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace flatshard {

RegionGraphs::RegionGraphs(
    const std::vector<std::unique_ptr<Unit>>& units,
    at::Device device,
    GraphOptions options,
    std::weak_ptr<Runtime> runtime)
    : units_(units),
      device_(device),
      runtime_(std::move(runtime)),
      life_(std::move(options)),
      watch_(std::make_shared<StepWatch>()) {
  for (const auto& unit : units_) {
    auto& regions = unit_regions_.emplace_back(
        new UnitRegions{.slots = UnitSlots(*unit, device_)});
    if (unit->module() == nullptr) {
      continue;
    }
    regions->modules = nn::modules_below(*unit->module());
    for (const nn::Module* module : regions->modules) {
      unit_of_module_[module] = unit->id();  // children's units come later
    }
  }
}

RegionGraphs::~RegionGraphs() = default;

void RegionGraphs::slot_acquired(
    const Unit& unit,
    const SlotKey& key,
    const Slot& slot) {
  if (trains_ || key.role != SlotRole::forward_weights) {
    unit_regions_[unit.id()]->slots.acquired(key, slot);
  }
}

void RegionGraphs::parameters_pointed(Unit& unit, const SlotView& slot) {
  unit_regions_[unit.id()]->slots.pointed(slot);
}

std::shared_ptr<void> RegionGraphs::interleave_microbatches() {
  FLATSHARD_CHECK(
      !life_.options().regions.contains("block"),
      config,
      "GraphOptions::regions (cuda_graph.modules) with microbatches that "
      "interleave: expected parts of blocks (attn, moe_router, mlp), got "
      "block, and blocks run in pieces there");
  for (const auto& unit : units_) {
    FLATSHARD_CHECK(
        !unit->weights().has_planes_on_request(),
        config,
        "GraphOptions::enabled (cuda_graph.impl) with FP8 weights (unit {}) "
        "and microbatches that interleave: the planes of each are at other "
        "addresses; leave one of the three out",
        unit->name());
  }
  reset();
  ++num_interleaving_;
  watch_->set_current_slots([this](const Unit& unit) {
    return std::make_shared<UnitSlots>(
        unit_regions_[unit.id()]->slots.current());
  });
  return {nullptr, [self = weak_from_this()](void*) {
            if (const auto graphs = self.lock()) {
              graphs->end_interleaving();
            }
          }};
}

void RegionGraphs::end_interleaving() {
  if (--num_interleaving_ > 0) {
    return;
  }
  watch_->set_current_slots({});
  microbatch_ = 0;
  reset();
}

void RegionGraphs::slots_planned(
    const SlotPlan& /*plan*/,
    const std::vector<SlotLifetime>& /*lifetimes*/) {
  reset();
}

void RegionGraphs::reset() {
  for (const auto& [owner, regions] : regions_) {
    for (const auto& region : regions) {
      for (const auto& [microbatch, graphs] : region->graphs) {
        for (const auto& graph : graphs) {
          graph->drop();
        }
      }
      region->failure.clear();
      region->obstructed = false;
    }
  }
  pool_.reset();
  life_.restart();
  watch_->start();
  forget_step();
}

GraphStats RegionGraphs::stats() const {
  GraphStats stats = life_.counts();
  stats.nbytes = pool_ ? pool_->nbytes() : 0;
  return stats;
}

void RegionGraphs::forget_step() {
  watch_->forget();
  for (const auto& unit : unit_regions_) {
    unit->slots.forget();
  }
}

void RegionGraphs::root_forward_begins(bool weights_changed, bool at_rest) {
  trains_ = at::GradMode::is_enabled() || nn::in_checkpointed_forward();
  weights_changed_ |= weights_changed;
  if (trains_ && std::exchange(weights_changed_, false)) {
    step_begins(at_rest);
  }
}

void RegionGraphs::step_begins(bool at_rest) {
  life_.step_begins();
  if (life_.is(GraphPhase::outdated) && at_rest) {
    reset();
    life_.restart(life_.options().warmup_steps);  // this step is watched
    return;
  }
  if (life_.replays()) {
    return;
  }
  if (life_.is_warm() && !watch_->order().empty() && at_rest) {
    capture_all();
    watch_->stop();
  }
  forget_step();
}

// -- a call ------------------------------------------------------------------

RegionGraphs::UnitRegions* RegionGraphs::unit_of(nn::Module& owner) {
  const auto found = unit_of_module_.find(&owner);
  return found == unit_of_module_.end() ? nullptr
                                        : unit_regions_[found->second].get();
}

RegionOwner RegionGraphs::owner_of(nn::Module* module, const UnitRegions& unit)
    const {
  RegionOwner owner{.module = module};
  if (module == nullptr && program_.context) {
    owner.contexts.push_back(program_.context);
  }
  for (const nn::Module* layer : unit.modules) {
    owner.contexts.push_back(layer->context());
  }
  owner.generators = nn::own_generators(unit.modules);
  return owner;
}

RegionGraphs::Region& RegionGraphs::region_of(
    nn::Module* owner,
    const char* name,
    UnitRegions& unit) {
  const void* const key =
      owner != nullptr ? static_cast<const void*>(owner) : &unit.unit();
  auto& regions = regions_[key];
  for (const auto& region : regions) {
    if (region->name == name || std::strcmp(region->name, name) == 0) {
      return *region;
    }
  }
  auto& region = *regions.emplace_back(std::make_unique<Region>());
  region.name = name;
  if (owner != nullptr) {
    unit.owners.push_back(owner);
  }
  return region;
}

RegionGraphs::Region::Graphs& RegionGraphs::graphs_of(
    Region& region,
    nn::Module* owner,
    const UnitRegions& unit) {
  const auto [found, is_new] = region.graphs.try_emplace(microbatch_);
  Region::Graphs& graphs = found->second;
  for (const bool with_grad : {false, true}) {
    if (!is_new) {
      break;
    }
    const auto on_backward =
        [this](const RegionGraph& graph, const char* miss) {
          if (miss == nullptr) {
            ++life_.counts().backward_replays;
            return;
          }
          if (miss == RegionGraph::kOtherGradient) {
            life_.outdate();
          }
          life_.fallback(graph.name(), miss);
        };
    graphs[with_grad] = std::make_shared<RegionGraph>(
        unit.unit(),
        RegionGraph::Options{
            .name = fmt::format(
                "region {} of unit {}",
                region.name,
                unit.unit().name()),
            .owner = owner_of(owner, unit),
            .runtime = runtime_,
            .uses = uses_,
            .with_grad = with_grad,
            .on_backward = on_backward});
    place_of_graph_[graphs[with_grad].get()] = {&region, microbatch_};
  }
  return graphs;
}

// Why the region cannot be part of a graph now; empty: it can.
std::string RegionGraphs::obstacle(const UnitRegions& unit) {
  for (nn::Module* module : unit.modules) {
    if (module->has_forward_hooks() && module != unit.unit().module() &&
        std::find(unit.owners.begin(), unit.owners.end(), module) ==
            unit.owners.end()) {
      return fmt::format("{} inside it has forward hooks", module->name());
    }
  }
  return {};
}

nn::TensorList RegionGraphs::run(
    nn::Module& owner,
    const char* name,
    nn::RegionFn fn,
    const nn::TensorList& inputs,
    const nn::RegionOptions& options) {
  const bool with_grad = at::GradMode::is_enabled();
  const bool trains = with_grad || nn::in_checkpointed_forward();
  UnitRegions* unit = nullptr;
  if (trains && !life_.is(GraphPhase::capturing) &&
      life_.options().regions.contains(name)) {
    unit = unit_of(owner);
  }
  if (unit == nullptr) {  // an evaluation, among others
    return nn::run_region(owner, std::move(fn), inputs, options);
  }
  Region& region = region_of(&owner, name, *unit);
  const auto& graph = graphs_of(region, &owner, *unit)[with_grad];
  if (life_.replays()) {
    std::string reason = obstacle(*unit);
    if (reason.empty() && !region.training.empty() &&
        !has_modes(unit->modules, region.training)) {
      reason = "a module of the unit changed between train() and eval()";
    }
    if (auto outputs = try_replay(region, *graph, inputs, std::move(reason))) {
      return *std::move(outputs);
    }
    return nn::run_region(owner, std::move(fn), inputs, options);
  }
  if (region.failure.empty() && obstacle(*unit).empty()) {
    region.training = modes_of(unit->modules);
    learn(graph, fn, inputs, options);
    nn::TensorList outputs =
        nn::run_region(owner, std::move(fn), inputs, options);
    watch_->forward_ended(graph, inputs, outputs);
    return outputs;
  }
  return nn::run_region(owner, std::move(fn), inputs, options);
}

std::optional<nn::TensorList> RegionGraphs::try_replay(
    Region& region,
    RegionGraph& graph,
    const nn::TensorList& inputs,
    std::string reason) {
  if (!region.failure.empty()) {
    reason = region.failure;
  }
  if (reason.empty()) {
    const char* miss = graph.miss(inputs);
    if (miss == nullptr) {
      ++life_.counts().forward_replays;
      return graph.replay(inputs);
    }
    // The obstacle of the step that would have been watched is gone.
    if (miss == RegionGraph::kOtherInput ||
        (!graph.captured() && std::exchange(region.obstructed, false))) {
      life_.outdate();
    }
    reason = miss;
  }
  life_.fallback(graph.name(), reason);
  return std::nullopt;
}

// -- units without a module --------------------------------------------------

RegionGraphs::UnitOutcome RegionGraphs::run_unit(const UnitForward& forward) {
  if (!at::GradMode::is_enabled() || life_.is(GraphPhase::capturing)) {
    return {};
  }
  UnitRegions& unit = *unit_regions_.at(forward.unit);
  Region& region = region_of(nullptr, "block", unit);
  const auto& graph = graphs_of(region, nullptr, unit)[true];
  if (life_.replays()) {
    return {
        .outputs = try_replay(
            region,
            *graph,
            forward.inputs,
            forward.obstacle.empty() ? forward.difference : forward.obstacle)};
  }
  if (!forward.obstacle.empty()) {
    region.obstructed = true;
    if (life_.is_warm()) {
      life_.fallback(graph->name(), forward.obstacle);
    }
    return {};
  }
  learn(graph, forward.fn, forward.inputs, {.constants = forward.constants});
  return {.watched = true};
}

void RegionGraphs::unit_ran(
    UnitId unit,
    const nn::TensorList& inputs,
    const nn::TensorList& outputs) {
  UnitRegions& regions = *unit_regions_.at(unit);
  Region& region = region_of(nullptr, "block", regions);
  watch_->forward_ended(
      graphs_of(region, nullptr, regions)[true],
      inputs,
      outputs);
}

// -- learning ----------------------------------------------------------------

void RegionGraphs::learn(
    const std::shared_ptr<RegionGraph>& graph,
    const nn::RegionFn& fn,
    const nn::TensorList& inputs,
    const nn::RegionOptions& options) {
  watch_->forward_begins(
      graph,
      {.fn = fn,
       .constants = options.constants,
       .recompute = options.recompute.has_value(),
       .preserve_rng = options.recompute && options.recompute->preserve_rng,
       .keep_attention = options.recompute && options.recompute->keep_attention,
       .in_backward = autograd_task::current_id() >= 0,
       .in_second_run = nn::in_second_run()},
      inputs);
}

}  // namespace flatshard
