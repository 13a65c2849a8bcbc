#include "flatshard/core/log.h"
#include "flatshard/unit/module_modes.h"
#include "flatshard/unit/region_graphs.h"
#include "flatshard/unit/step_watch.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

namespace flatshard {

void RegionGraphs::capture_all() {
  capturing_ = true;
  const auto done = c10::make_scope_exit([&] { capturing_ = false; });
  pool_ = make_graph_pool(device_, options_.audit);
  pool_->make_room();
  for (const auto& regions : unit_regions_) {
    regions->targets = regions->slots.targets();
  }
  for (const auto& [graph, backward] : watch_->order()) {
    if (!backward) {
      capture(graph);
    } else if (graph->captured()) {
      capture_backward(graph);
    }
  }
  std::int64_t captured = 0;
  std::int64_t all = 0;
  for (const auto& [graph, backward] : watch_->order()) {
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
  if (!unit_regions_[graph->unit().id()]->slots.planned()) {
    return;  // its slots have no place of their own
  }
  const bool in_backward = graph->call().in_backward;
  attempt(*graph, in_backward, [&](UnitRegions& unit) {
    graph->capture_forward(*pool_, places(unit, in_backward));
  });
}

void RegionGraphs::capture_backward(const std::shared_ptr<RegionGraph>& graph) {
  attempt(*graph, /*in_backward=*/true, [&](UnitRegions& unit) {
    graph->capture_backward(
        *pool_,
        watch_->consumers_of(graph),
        unit.targets,
        places(unit, /*in_backward=*/true));
  });
}

std::shared_ptr<PlanePlaces> RegionGraphs::places(
    const UnitRegions& unit,
    bool in_backward) {
  return unit.unit().has_float8()
             ? std::make_shared<PlanePlaces>(unit.slots, in_backward)
             : nullptr;
}

void RegionGraphs::attempt(
    RegionGraph& graph,
    bool in_backward,
    const std::function<void(UnitRegions& unit)>& record) {
  UnitRegions& unit = *unit_regions_[graph.unit().id()];
  const ModesScope modes(unit.modules, region_of_graph_.at(&graph)->training);
  const auto tell_program = [&](bool captures) {
    if (unit.unit().module() == nullptr && program_.around_capture) {
      program_.around_capture(unit.unit(), captures);
    }
  };
  unit.slots.point(in_backward);
  tell_program(true);
  const auto done = c10::make_scope_exit([&] {
    tell_program(false);
    unit.slots.rest();
  });
  try {
    record(unit);
    ++stats_.captures;
  } catch (const c10::Error& e) {
    give_up(graph, e.what_without_backtrace());
  } catch (const std::exception& e) {
    give_up(graph, e.what());
  }
  if (options_.audit && graph.captured()) {
    audit(graph, unit.targets);
  }
}

void RegionGraphs::audit(const RegionGraph& graph, const TargetSink& targets) {
  const GraphAudit found = graph.audit(targets);
  stats_.audited_addresses += found.addresses;
  if (found.strays.empty()) {
    return;
  }
  log_warning(
      "{}: {} addresses of its kernels are in memory that is not of its "
      "inputs, constants, parameters or gradients, and may move: {}. If a "
      "tensor of yours is there, make it an input of the region or name it in "
      "RegionOptions::constants",
      graph.name(),
      found.strays.size(),
      found.strays.front());
  for (const std::string& stray : found.strays) {
    stats_.audit_findings.push_back(graph.name() + ": " + stray);
  }
}

void RegionGraphs::give_up(RegionGraph& graph, const std::string& why) {
  graph.drop();
  region_of_graph_.at(&graph)->failure = "its capture failed: " + why;
  log_warning(
      "{} stays eager, because it could not be captured: {}",
      graph.name(),
      why);
}

}  // namespace flatshard
