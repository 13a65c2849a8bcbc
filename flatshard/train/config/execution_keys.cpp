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

const ConfigKey kExecutionKeys[] = {
    KEY(activation_checkpoint.mode,
        "Activation checkpointing: which activations the backward recomputes "
        "instead of storing them."),

    KEY(cuda_graph.impl,
        "Scope of CUDA graphs. unit: the forward and the backward of each "
        "block, one launch each. full_iteration: the full forward and "
        "backward with their collectives, one launch. Useful for small "
        "models, because their kernels run faster than the host can launch "
        "them.",
        .conflicts =
            {{{"diagnostics.strict"},
              WHEN(c.diagnostics.strict),
              "a replay calls no modules whose calls could be checked"},
             {{"cuda_graph.modules"},
              WHEN(c.cuda_graph.whole_step() && !c.cuda_graph.modules.empty()),
              "the whole step is one graph; leave modules empty, or use "
              "\"unit\""},
             {{"parallelism.copy_engines"},
              WHEN(c.cuda_graph.whole_step() && c.parallelism.copies()),
              "copies between the memory of GPUs are not captured; use "
              "\"none\" (\"auto\" selects it here)"},
             {{"diagnostics.nan_check"},
              WHEN(c.cuda_graph.whole_step() && c.diagnostics.nan_check),
              "this check hooks into the step, and a replayed CUDA graph runs "
              "no hooks; disable one of the two"},
             {{"diagnostics.overlap_check"},
              WHEN(c.cuda_graph.whole_step() && c.diagnostics.overlap_check),
              "this check hooks into the step, and a replayed CUDA graph runs "
              "no hooks; disable one of the two"},
             {{"diagnostics.poison"},
              WHEN(c.cuda_graph.whole_step() && c.diagnostics.poison),
              "a replay does not poison the weights that it reshards"},
             {{"activation_checkpoint.mode"},
              WHEN(
                  !c.cuda_graph.whole_step() && c.cuda_graph.modules.empty() &&
                  c.activation_checkpoint.mode ==
                      models::ActivationCheckpoint::selective),
              "a block cannot be captured with a recomputation inside; capture "
              "only attn (cuda_graph.modules), or use \"full\" or \"none\""}}),
    KEY(cuda_graph.modules,
        "Capture only these parts of each block, as a comma-separated list: "
        "attn, mlp, and for blocks with experts moe_router and moe_preprocess.",
        .used_if = {kHasGraphs}),
    KEY(cuda_graph.warmup_steps,
        "Number of steps before the first capture.",
        .range = {1, kMaxSteps},
        .used_if = {kHasGraphs}),
    KEY(cuda_graph.on_miss,
        "Action if a block or step cannot be replayed: run it eagerly "
        "(counted, and logged once per reason), or stop the run.",
        .used_if = {kHasGraphs}),
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
