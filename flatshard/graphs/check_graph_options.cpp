#include "flatshard/core/error.h"
#include "flatshard/graphs/region_graphs.h"
#include "flatshard/runtime/runtime_options.h"

namespace flatshard {
namespace {

void check_whole_step(const RuntimeOptions& options) {
  FLATSHARD_CHECK(
      !options.copy_engines.any(),
      config,
      "GraphOptions::whole_step with copy_engines: fences and copies between "
      "the memory of GPUs are not recorded; use collectives "
      "(parallelism.copy_engines = \"none\")");
  FLATSHARD_CHECK(
      !options.unused_grads_stay_undefined,
      config,
      "GraphOptions::whole_step with unused_grads_stay_undefined: the host "
      "would decide after each backward which gradients there are");
  FLATSHARD_CHECK(
      !options.debug.poison,
      config,
      "GraphOptions::whole_step with DebugOptions::poison: not supported");
}

}  // namespace

void check_graph_options(
    const RuntimeOptions& options,
    at::Device device,
    const std::vector<std::unique_ptr<Unit>>& units) {
  FLATSHARD_CHECK(
      device.is_cuda() || options.graphs.emulate_on_cpu,
      config,
      "GraphOptions::enabled (cuda_graph.impl) requires a mesh of GPUs, got "
      "{}: CPUs have no CUDA graphs",
      device.str());
  FLATSHARD_CHECK(
      options.graphs.warmup_steps >= 1,
      config,
      "GraphOptions::warmup_steps: expected at least 1, got {}",
      options.graphs.warmup_steps);
  FLATSHARD_CHECK(
      !options.graphs.regions.empty(),
      config,
      "GraphOptions::regions: expected at least one name of a region, such as "
      "block");
  FLATSHARD_CHECK(
      options.graphs.regions.size() == 1 ||
          !options.graphs.regions.contains("block"),
      config,
      "GraphOptions::regions: expected either block or parts of blocks, got "
      "both: a block includes its parts");
  FLATSHARD_CHECK(
      !options.slots_on_demand,
      config,
      "GraphOptions::enabled with slots_on_demand: a graph needs weights and "
      "gradients at the same addresses in every step; use the arena");
  FLATSHARD_CHECK(
      !options.offload_activations,
      config,
      "GraphOptions::enabled with offload_activations: a graph reads what its "
      "region keeps at fixed addresses on the device; turn one of them off");
  FLATSHARD_CHECK(
      !options.debug.strict,
      config,
      "GraphOptions::enabled cannot be combined with DebugOptions::strict, "
      "because a replay does not call the inner modules that strict checks");
  if (options.graphs.whole_step) {
    check_whole_step(options);
  }
  for (const auto& unit : units) {
    for (const auto& group : unit->groups()) {
      FLATSHARD_CHECK(
          !group->options().offload,
          config,
          "GraphOptions::enabled with offload: not supported");
    }
  }
}

std::string to_string(const GraphStats& stats) {
  std::string text = fmt::format(
      "CUDA graphs: {} captured ({:.0f} MB), ",
      stats.captures,
      static_cast<double>(stats.nbytes) * 1e-6);
  text += stats.step_replays > 0
              ? fmt::format("{} replays of whole steps", stats.step_replays)
              : fmt::format(
                    "{} forward and {} backward replays",
                    stats.forward_replays,
                    stats.backward_replays);
  std::int64_t eager = 0;
  std::string reasons;
  for (const auto& [reason, count] : stats.fallbacks) {
    eager += count;
    reasons +=
        fmt::format("{}{} ({})", eager > count ? "; " : "", reason, count);
  }
  return eager == 0
             ? text
             : fmt::format("{}; {} ran eagerly: {}", text, eager, reasons);
}

}  // namespace flatshard
