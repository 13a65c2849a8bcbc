#include "flatshard/core/log.h"
#include "flatshard/graphs/module_modes.h"
#include "flatshard/graphs/region_graphs.h"
#include "flatshard/graphs/step_watch.h"
#include "flatshard/graphs/watched_graphs.h"
#include "flatshard/runtime/runtime.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>

namespace flatshard {
namespace {

// Ranks that share layers or sequences exchange activations.
bool have_collectives(const Mesh& mesh) {
  return std::ranges::any_of(mesh.axes(), [](const MeshAxis& axis) {
    return axis.role != AxisRole::data && axis.size > 1;
  });
}

}  // namespace

void RegionGraphs::capture_all() {
  const GraphLife::Capturing capturing(life_);
  pool_ = make_graph_pool(device_, life_.options().audit);
  const auto runtime = runtime_.lock();
  if (runtime && have_collectives(*runtime->mesh())) {
    pool_ = watch_collectives(
        std::move(pool_),
        device_,
        runtime->mesh()->flight_recorder());
  }
  pool_->make_room();
  for (const auto& regions : unit_regions_) {
    regions->targets.clear();
  }
  for (const StepWatch::Run& run : watch_->order()) {
    if (!run.backward) {
      capture(run);
    } else if (run.graph->captured()) {
      capture_backward(run);
    }
  }
  std::int64_t captured = 0;
  std::int64_t all = 0;
  for (const StepWatch::Run& run : watch_->order()) {
    all += run.backward ? 0 : 1;
    captured += !run.backward && run.graph->captured() ? 1 : 0;
  }
  log_info(
      "CUDA graphs: {} of {} regions captured, {:.0f} MB",
      captured,
      all,
      static_cast<double>(pool_->nbytes()) * 1e-6);
  life_.move_to(GraphPhase::captured);
}

void RegionGraphs::capture(const StepWatch::Run& run) {
  UnitSlots& slots = slots_of(run);
  if (!slots.planned()) {
    return;  // its slots share the memory of others
  }
  const bool in_backward = run.graph->call().in_backward;
  attempt(run, in_backward, [&] {
    run.graph->capture_forward(*pool_, places(slots, in_backward));
  });
}

void RegionGraphs::capture_backward(const StepWatch::Run& run) {
  attempt(run, /*in_backward=*/true, [&] {
    run.graph->capture_backward(
        *pool_,
        watch_->consumers_of(run.graph),
        targets_of(run),
        places(slots_of(run), /*in_backward=*/true));
  });
}

UnitSlots& RegionGraphs::slots_of(const StepWatch::Run& run) {
  return run.slots ? *run.slots : unit_regions_[run.graph->unit().id()]->slots;
}

TargetSink& RegionGraphs::targets_of(const StepWatch::Run& run) {
  auto& targets = unit_regions_[run.graph->unit().id()]->targets;
  const int microbatch = place_of_graph_.at(run.graph.get()).microbatch;
  const auto found = targets.find(microbatch);
  return found != targets.end()
             ? found->second
             : targets.emplace(microbatch, slots_of(run).targets())
                   .first->second;
}

std::shared_ptr<PlanePlaces> RegionGraphs::places(
    const UnitSlots& slots,
    bool in_backward) {
  return slots.unit().weights().has_planes_on_request()
             ? std::make_shared<PlanePlaces>(slots, in_backward)
             : nullptr;
}

void RegionGraphs::attempt(
    const StepWatch::Run& run,
    bool in_backward,
    const std::function<void()>& record) {
  RegionGraph& graph = *run.graph;
  UnitRegions& unit = *unit_regions_[graph.unit().id()];
  UnitSlots& slots = slots_of(run);
  const ModesScope modes(
      unit.modules,
      place_of_graph_.at(&graph).region->training);
  const auto tell_program = [&](bool captures) {
    if (unit.unit().module() == nullptr && program_.around_capture) {
      program_.around_capture(unit.unit(), captures);
    }
  };
  slots.point(in_backward);
  tell_program(true);
  const auto done = c10::make_scope_exit([&] {
    tell_program(false);
    slots.rest();
  });
  try {
    record();
    ++life_.counts().captures;
  } catch (const c10::Error& e) {
    give_up(graph, e.what_without_backtrace());
  } catch (const std::exception& e) {
    give_up(graph, e.what());
  }
  if (life_.options().audit && graph.captured()) {
    audit(graph, run.backward ? targets_of(run) : TargetSink());
  }
}

void RegionGraphs::audit(const RegionGraph& graph, const TargetSink& targets) {
  const GraphAudit found = graph.audit(targets);
  life_.counts().audited_addresses += found.addresses;
  if (found.strays.empty()) {
    return;
  }
  log_warning(
      "{}: {} addresses of its kernels are in memory that is not of its "
      "inputs, constants, parameters or gradients, and may move: {}. If a "
      "tensor of yours is one of them, make it an input of the region or name "
      "it in RegionOptions::constants",
      graph.name(),
      found.strays.size(),
      found.strays.front());
  for (const std::string& stray : found.strays) {
    life_.counts().audit_findings.push_back(graph.name() + ": " + stray);
  }
}

void RegionGraphs::give_up(RegionGraph& graph, const std::string& why) {
  graph.drop();
  place_of_graph_.at(&graph).region->failure = "its capture failed: " + why;
  log_warning(
      "{} stays eager, because it could not be captured: {}",
      graph.name(),
      why);
}

}  // namespace flatshard
