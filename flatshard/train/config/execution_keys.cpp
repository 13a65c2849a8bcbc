#include "flatshard/train/config/execution_keys.h"

#include <sstream>

#include "flatshard/core/error.h"
#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {

constinit const UsedIf kHasGraphs{
    "cuda_graph.impl",
    WHEN(c.cuda_graph.enabled()),
    "runs with CUDA graphs; set cuda_graph.impl to unit or full_iteration"};

namespace {

constexpr UsedIf kRecomputesAttention{
    "activation_checkpoint.mode",
    WHEN(c.activation_checkpoint.mode == models::ActivationCheckpoint::full),
    "runs that recompute attention; set activation_checkpoint.mode to full"};

constexpr UsedIf kRecomputes{
    "activation_checkpoint.mode",
    WHEN(c.activation_checkpoint.mode != models::ActivationCheckpoint::none),
    "runs that recompute activations; set activation_checkpoint.mode to full "
    "or selective"};

constexpr UsedIf kRecomputesMlp{
    "activation_checkpoint.mode",
    WHEN(c.activation_checkpoint.mode != models::ActivationCheckpoint::none),
    "runs that recompute the feed-forward part; set activation_checkpoint.mode "
    "to selective or full"};

bool captures_attention(const Config& c) {
  return c.cuda_graph.enabled() && graph_regions(c).contains("attn");
}

bool captures_mlp(const Config& c) {
  return c.cuda_graph.enabled() && !c.cuda_graph.whole_step() &&
         (graph_regions(c).contains("block") ||
          graph_regions(c).contains("mlp"));
}

const ConfigKey kExecutionKeys[] = {
#define KEY(...) KEY_ROW(activation_checkpoint, __VA_ARGS__)
#include "flatshard/train/config/sections/activation_checkpoint.def"
#define KEY(...) KEY_ROW(cuda_graph, __VA_ARGS__)
#include "flatshard/train/config/sections/cuda_graph.def"
};

void check_execution(const Config& config) {
  if (config.cuda_graph.enabled()) {
    graph_regions(config);  // throws
  }
}

}  // namespace

KeyTable execution_keys() {
  return {kExecutionKeys, check_execution};
}

}  // namespace flatshard::config

namespace flatshard {

std::set<std::string> graph_regions(const Config& config) {
  std::set<std::string> regions;
  std::istringstream text(config.cuda_graph.modules);
  for (std::string name; std::getline(text, name, ',');) {
    std::erase_if(name, [](char c) { return c == ' '; });
    FLATSHARD_CHECK(
        name != "moe",
        config,
        "cuda_graph.modules: {} is not recorded: the number of exchanged rows "
        "depends on the router's choice, for which the host waits; use "
        "moe_router and "
        "moe_preprocess",
        name);
    FLATSHARD_CHECK(
        name == "attn" || name == "mlp" || name == "moe_router" ||
            name == "moe_preprocess",
        config,
        "cuda_graph.modules: expected a comma-separated list of attn, mlp, "
        "moe_router and moe_preprocess, or an empty value for full blocks; "
        "got '{}'",
        name);
    regions.insert(name);
  }
  return regions.empty() ? std::set<std::string>{"block"} : regions;
}

}  // namespace flatshard
