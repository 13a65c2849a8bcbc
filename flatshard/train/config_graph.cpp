#include "flatshard/train/config_graph.h"

#include <sstream>

#include "flatshard/core/error.h"

namespace flatshard {

void check_cuda_graph(const Config& config) {
  const Config::CudaGraph& graph = config.cuda_graph;
  if (graph.impl == "none") {
    return;
  }
  graph_regions(config);  // throws
  const auto refuse = [&](bool found, const char* what, const char* why) {
    FLATSHARD_CHECK(
        !found,
        config,
        "cuda_graph.impl = \"{}\" with {}: {}",
        graph.impl,
        what,
        why);
  };
  refuse(
      config.diagnostics.strict,
      "diagnostics.strict = true",
      "a replay calls no modules whose calls could be checked");
  if (graph.impl == "full_iteration") {
    refuse(
        !graph.modules.empty(),
        "cuda_graph.modules",
        "the whole step is one graph; leave modules empty, or use \"unit\"");
    refuse(
        config.parallelism.copy_engines != "auto" &&
            config.parallelism.copy_engines != "none",
        "parallelism.copy_engines",
        "copies between the memory of GPUs are not recorded; use \"none\", "
        "which \"auto\" means here");
    refuse(
        config.diagnostics.nan_check || config.diagnostics.overlap_check,
        "diagnostics.nan_check or diagnostics.overlap_check",
        "they watch what is inside of a step, where a replay stops for nobody");
    refuse(
        config.diagnostics.poison,
        "diagnostics.poison = true",
        "what a replay releases is not poisoned");
    return;
  }
  refuse(
      config.activation_checkpoint.mode == "selective" && graph.modules.empty(),
      "activation_checkpoint.mode = \"selective\"",
      "a block cannot be recorded with a recomputation inside; record attn "
      "alone (cuda_graph.modules), or use \"full\" or \"none\"");
}

std::set<std::string> graph_regions(const Config& config) {
  std::set<std::string> regions;
  std::istringstream text(config.cuda_graph.modules);
  for (std::string name; std::getline(text, name, ',');) {
    std::erase_if(name, [](char c) { return c == ' '; });
    FLATSHARD_CHECK(
        name != "moe" && name != "moe_preprocess",
        config,
        "cuda_graph.modules: {} is not recorded: a router's choice says how "
        "many rows travel, for which the host waits; use moe_router",
        name);
    FLATSHARD_CHECK(
        name == "attn" || name == "mlp" || name == "moe_router",
        config,
        "cuda_graph.modules: expected attn, mlp, moe_router or several with "
        "commas between, or nothing for whole blocks; got '{}'",
        name);
    regions.insert(name);
  }
  return regions.empty() ? std::set<std::string>{"block"} : regions;
}

}  // namespace flatshard
