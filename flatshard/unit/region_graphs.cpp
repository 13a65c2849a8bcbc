#include "flatshard/unit/region_graphs.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/nn/module.h"
#include "flatshard/unit/autograd_task.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace flatshard {

/// One unit, and where its slots were in the step that runs.
struct RegionGraphs::UnitRegions {
  Unit* unit = nullptr;
  std::vector<nn::Module*> modules;  ///< the unit's own and all below
  /// Those of them that own a region that is captured: hooks of theirs run
  /// outside.
  std::vector<const nn::Module*> owners;
  SlotView forward;
  SlotView backward;
  SlotView gradients;
  bool moved = false;  ///< a slot had no place in the plan
  TargetSink targets;
};

struct RegionGraphs::Region {
  const char* name = nullptr;
  /// Without and with gradients.
  std::shared_ptr<RegionGraph> graphs[2];
  std::string failure;      ///< of a capture: eager for good
  bool obstructed = false;  ///< when it would have been watched
};

struct RegionGraphs::Source {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::shared_ptr<RegionGraph> graph;
  std::size_t output = 0;
};

struct RegionGraphs::Producer {
  WeakNodePtr node;  ///< another one may come to its address
  std::shared_ptr<RegionGraph> graph;
  std::size_t output = 0;
};

RegionGraphs::RegionGraphs(
    const std::vector<std::unique_ptr<Unit>>& units,
    at::Device device,
    GraphOptions options,
    std::weak_ptr<nn::WgradSink> sink)
    : units_(units),
      device_(device),
      options_(std::move(options)),
      sink_(std::move(sink)) {
  for (const auto& unit : units_) {
    auto& regions = unit_regions_.emplace_back(std::make_unique<UnitRegions>());
    regions->unit = unit.get();
    if (unit->module() == nullptr) {
      continue;
    }
    for (const auto& module : unit->module()->modules()) {
      if (auto* ours = dynamic_cast<nn::Module*>(module.get())) {
        regions->modules.push_back(ours);
        unit_of_module_[ours] = unit->id();  // children's units come later
      }
    }
  }
}

RegionGraphs::~RegionGraphs() = default;

void RegionGraphs::slot_acquired(
    const Unit& unit,
    const SlotKey& key,
    const Slot& slot) {
  UnitRegions& regions = *unit_regions_[unit.id()];
  regions.moved |= slot.offset < 0;
  const SlotView view{slot.data, slot.nbytes, device_};
  switch (key.role) {
    case SlotRole::forward_weights:
      regions.forward = view;
      break;
    case SlotRole::backward_weights:
      regions.backward = view;
      break;
    case SlotRole::gradients:
      regions.gradients = view;
      break;
  }
}

void RegionGraphs::slots_planned(
    const SlotPlan& /*plan*/,
    const std::vector<SlotLifetime>& /*lifetimes*/) {
  reset();
}

void RegionGraphs::reset() {
  for (const auto& [owner, regions] : regions_) {
    for (const auto& region : regions) {
      for (const auto& graph : region->graphs) {
        if (graph) {
          graph->drop();
        }
      }
      region->failure.clear();
      region->obstructed = false;
    }
  }
  pool_.reset();
  captured_ = again_ = false;
  num_steps_ = 0;
  began_ = false;
  forget_step();
}

GraphStats RegionGraphs::stats() const {
  GraphStats stats = stats_;
  stats.nbytes = pool_ ? pool_->nbytes() : 0;
  return stats;
}

void RegionGraphs::forget_step() {
  order_.clear();
  sources_.clear();
  producers_.clear();
  for (const auto& unit : unit_regions_) {
    unit->forward = unit->backward = unit->gradients = {};
    unit->moved = false;
  }
}

void RegionGraphs::step_begins(bool at_rest) {
  num_steps_ += std::exchange(began_, true) ? 1 : 0;
  if (captured_ && again_ && at_rest) {
    reset();
    began_ = true;
    num_steps_ = options_.warmup_steps - 1;  // one more to learn from
    return;
  }
  if (captured_) {
    return;
  }
  if (num_steps_ >= options_.warmup_steps && !order_.empty() && at_rest) {
    capture_all();
    captured_ = true;
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
  auto& found = owner.generators;
  for (const nn::Module* layer : unit.modules) {
    owner.contexts.push_back(layer->context());
    for (const at::Generator& generator : layer->own_generators()) {
      if (std::find(found.begin(), found.end(), generator) == found.end()) {
        found.push_back(generator);
      }
    }
  }
  return owner;
}

RegionGraphs::Region& RegionGraphs::region_of(
    nn::Module* owner,
    const char* name,
    UnitRegions& unit) {
  const void* const key =
      owner != nullptr ? static_cast<const void*>(owner) : unit.unit;
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
  for (const bool with_grad : {false, true}) {
    region.graphs[with_grad] = std::make_shared<RegionGraph>(
        fmt::format("region {} of unit {}", name, unit.unit->name()),
        owner_of(owner, unit),
        *unit.unit,
        sink_,
        uses_,
        with_grad,
        [this](const RegionGraph& graph, const char* miss) {
          if (miss == nullptr) {
            ++stats_.backward_replays;
          } else {
            again_ |= miss == RegionGraph::kOtherGradient;
            fallback(&graph, miss);
          }
        });
  }
  return region;
}

// Why the region cannot be part of a graph now; empty: it can.
std::string RegionGraphs::obstacle(const UnitRegions& unit) {
  for (nn::Module* module : unit.modules) {
    if (module->has_forward_hooks() && module != unit.unit->module() &&
        std::find(unit.owners.begin(), unit.owners.end(), module) ==
            unit.owners.end()) {
      return fmt::format("{} inside of it has forward hooks", module->name());
    }
  }
  return {};
}

void RegionGraphs::fallback(
    const RegionGraph* graph,
    const std::string& reason) {
  if (++stats_.fallbacks[reason] == 1) {
    log_warning(
        "{} runs eagerly and not as a CUDA graph: {} (logged once for each "
        "reason)",
        graph->name(),
        reason);
  }
  FLATSHARD_CHECK(
      !options_.miss_is_error,
      usage,
      "{} cannot be replayed as a CUDA graph: {}; mend that, or "
      "let it run eagerly (GraphOptions::miss_is_error = false, "
      "cuda_graph.on_miss = \"eager\")",
      graph->name(),
      reason);
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
  if (trains && !capturing_ && options_.regions.contains(name)) {
    unit = unit_of(owner);
  }
  if (unit == nullptr) {  // an evaluation, among others
    return nn::run_region(owner, std::move(fn), inputs, options);
  }
  Region& region = region_of(&owner, name, *unit);
  const auto& graph = region.graphs[with_grad];
  if (captured_) {
    if (auto outputs = try_replay(region, with_grad, inputs, obstacle(*unit))) {
      return *std::move(outputs);
    }
    return nn::run_region(owner, std::move(fn), inputs, options);
  }
  if (region.failure.empty() && obstacle(*unit).empty()) {
    learn(region, with_grad, fn, inputs, options);
    nn::TensorList outputs =
        nn::run_region(owner, std::move(fn), inputs, options);
    remember_outputs(graph, inputs, outputs);
    return outputs;
  }
  return nn::run_region(owner, std::move(fn), inputs, options);
}

std::optional<nn::TensorList> RegionGraphs::try_replay(
    Region& region,
    bool with_grad,
    const nn::TensorList& inputs,
    std::string reason) {
  RegionGraph& graph = *region.graphs[with_grad];
  if (!region.failure.empty()) {
    reason = region.failure;
  }
  if (reason.empty()) {
    const char* miss = graph.miss(inputs);
    if (miss == nullptr) {
      ++stats_.forward_replays;
      return graph.replay(inputs);
    }
    // What stood in the way when it would have been watched is gone.
    again_ |= miss == RegionGraph::kOtherInput ||
              (!graph.captured() && std::exchange(region.obstructed, false));
    reason = miss;
  }
  fallback(&graph, reason);
  return std::nullopt;
}

// -- units without a module --------------------------------------------------

RegionGraphs::UnitOutcome RegionGraphs::run_unit(const UnitForward& forward) {
  if (!at::GradMode::is_enabled() || capturing_) {
    return {};
  }
  UnitRegions& unit = *unit_regions_.at(forward.unit);
  Region& region = region_of(nullptr, "block", unit);
  if (captured_) {
    return {
        .outputs = try_replay(
            region,
            /*with_grad=*/true,
            forward.inputs,
            forward.obstacle.empty() ? forward.difference : forward.obstacle)};
  }
  if (!forward.obstacle.empty()) {
    region.obstructed = true;
    if (num_steps_ >= options_.warmup_steps) {
      fallback(region.graphs[true].get(), forward.obstacle);
    }
    return {};
  }
  learn(
      region,
      /*with_grad=*/true,
      forward.fn,
      forward.inputs,
      {.constants = forward.constants});
  return {.watched = true};
}

void RegionGraphs::unit_ran(
    UnitId unit,
    const nn::TensorList& inputs,
    const nn::TensorList& outputs) {
  const Region& region = region_of(nullptr, "block", *unit_regions_.at(unit));
  remember_outputs(region.graphs[true], inputs, outputs);
}

// -- learning ----------------------------------------------------------------

std::shared_ptr<RegionGraph> RegionGraphs::source_of(
    const at::Tensor& input,
    std::size_t& output) {
  const auto found = sources_.find(input.const_data_ptr());
  if (found == sources_.end()) {
    return nullptr;
  }
  const auto storage = found->second.storage.lock();
  if (storage.get() != input.storage().unsafeGetStorageImpl()) {
    return nullptr;  // other memory was there
  }
  output = found->second.output;
  return found->second.graph;
}

void RegionGraphs::learn(
    Region& region,
    bool with_grad,
    const nn::RegionFn& fn,
    const nn::TensorList& inputs,
    const nn::RegionOptions& options) {
  const auto& graph = region.graphs[with_grad];
  RegionGraph::Call call{
      .fn = fn,
      .constants = options.constants,
      .recompute = options.recompute.has_value(),
      .preserve_rng = options.recompute && options.recompute->preserve_rng,
      .in_backward = autograd_task::current_id() >= 0};
  for (const at::Tensor& input : inputs) {
    RegionGraph::Input in{
        .sizes = input.sizes().vec(),
        .strides = input.strides().vec(),
        .options = input.options(),
        .requires_grad = input.requires_grad()};
    in.source = source_of(input, in.source_output);
    if (input.grad_fn()) {
      const auto found =
          producers_.find({input.grad_fn().get(), input.output_nr()});
      if (found != producers_.end() &&
          found->second.node.lock() == input.grad_fn()) {
        in.producer = found->second.graph;
        in.producer_output = found->second.output;
      }
    }
    call.inputs.push_back(std::move(in));
  }
  graph->learn(std::move(call));
  ran(graph, /*backward=*/false);
}

void RegionGraphs::ran(
    const std::shared_ptr<RegionGraph>& graph,
    bool backward) {
  const bool again =
      std::any_of(order_.begin(), order_.end(), [&](const Run& run) {
        return run.graph == graph && run.backward == backward;
      });
  if (!again) {
    order_.push_back({graph, backward});
  }
}

void RegionGraphs::remember_outputs(
    const std::shared_ptr<RegionGraph>& graph,
    const nn::TensorList& inputs,
    const nn::TensorList& outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].grad_fn()) {
      // Its gradient comes just before the region's backward.
      outputs[i].register_hook(std::function<void(at::Tensor)>(
          [weak = weak_from_this(), graph](const at::Tensor&) {
            const auto self = weak.lock();
            if (self && !self->captured_) {
              self->ran(graph, /*backward=*/true);
            }
          }));
      producers_.insert_or_assign(
          {outputs[i].grad_fn().get(), outputs[i].output_nr()},
          Producer{outputs[i].grad_fn(), graph, i});
    }
    if (std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& in) {
          return in.const_data_ptr() == outputs[i].const_data_ptr();
        })) {
      continue;  // somebody else wrote it
    }
    sources_.insert_or_assign(
        outputs[i].const_data_ptr(),
        Source{
            c10::weak_intrusive_ptr<c10::StorageImpl>(
                c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
                    outputs[i].storage().unsafeGetStorageImpl())),
            graph,
            i});
  }
}

// -- capture -----------------------------------------------------------------

void RegionGraphs::point(Unit& unit, bool in_backward) {
  const UnitRegions& regions = *unit_regions_[unit.id()];
  const bool own = in_backward && static_cast<bool>(regions.backward);
  unit.point_at(own ? regions.backward : regions.forward);
  if (unit.module() == nullptr && program_.around_capture) {
    program_.around_capture(unit, true);
  }
}

void RegionGraphs::rest(Unit& unit) {
  if (unit.module() == nullptr && program_.around_capture) {
    program_.around_capture(unit, false);
  }
  unit.clear();
  unit.hide();
}

void RegionGraphs::capture_all() {
  capturing_ = true;
  const auto done = c10::make_scope_exit([&] { capturing_ = false; });
  pool_ = make_graph_pool(device_);
  pool_->make_room();
  for (const auto& regions : unit_regions_) {
    regions->targets = {};
    for (const UnitParameter& p : regions->unit->parameters()) {
      if (p.tensor.requires_grad() && regions->gradients) {
        regions->targets.add(
            p.tensor,
            {.grad = regions->unit->grad_view(regions->gradients, p)});
      }
    }
  }
  for (const auto& [graph, backward] : order_) {
    if (!backward) {
      capture(graph);
    } else if (graph->captured()) {
      capture_backward(graph);
    }
  }
  std::int64_t captured = 0;
  std::int64_t all = 0;
  for (const auto& [graph, backward] : order_) {
    all += backward ? 0 : 1;
    captured += !backward && graph->captured() ? 1 : 0;
  }
  log_info(
      "CUDA graphs: {} of {} regions captured, {:.0f} MB",
      captured,
      all,
      static_cast<double>(pool_->nbytes()) * 1e-6);
}

void RegionGraphs::capture(const std::shared_ptr<RegionGraph>& graph) {
  Unit& unit = graph->unit();
  const UnitRegions& regions = *unit_regions_[unit.id()];
  if (regions.moved || (!unit.resident() && !regions.forward)) {
    return;  // its slots have no place of their own
  }
  point(unit, graph->call().in_backward);
  const auto done = c10::make_scope_exit([&] { rest(unit); });
  try {
    graph->capture_forward(*pool_);
    ++stats_.captures;
  } catch (const c10::Error& e) {
    give_up(*graph, e.what_without_backtrace());
  } catch (const std::exception& e) {
    give_up(*graph, e.what());
  }
}

void RegionGraphs::capture_backward(const std::shared_ptr<RegionGraph>& graph) {
  std::vector<RegionGraph::Consumer> consumers(graph->num_outputs());
  for (std::size_t output = 0; output < consumers.size(); ++output) {
    int count = 0;
    for (const auto& [other, backward] : order_) {
      if (backward) {
        continue;
      }
      const auto& inputs = other->call().inputs;
      for (std::size_t i = 0; other->with_grad() && i < inputs.size(); ++i) {
        if (inputs[i].producer == graph &&
            inputs[i].producer_output == output) {
          consumers[output] = {other, i};
          ++count;
        }
      }
    }
    if (count != 1) {
      consumers[output] = {};
    }
  }
  Unit& unit = graph->unit();
  point(unit, /*in_backward=*/true);
  const auto done = c10::make_scope_exit([&] { rest(unit); });
  try {
    graph->capture_backward(
        *pool_,
        consumers,
        unit_regions_[unit.id()]->targets);
    ++stats_.captures;
  } catch (const c10::Error& e) {
    give_up(*graph, e.what_without_backtrace());
  } catch (const std::exception& e) {
    give_up(*graph, e.what());
  }
}

void RegionGraphs::give_up(RegionGraph& graph, const std::string& why) {
  graph.drop();
  for (const auto& [owner, regions] : regions_) {
    for (const auto& region : regions) {
      if (region->graphs[graph.with_grad()].get() == &graph) {
        region->failure = "its capture failed: " + why;
      }
    }
  }
  log_warning(
      "{} stays eager, because it could not be captured: {}",
      graph.name(),
      why);
}

}  // namespace flatshard
