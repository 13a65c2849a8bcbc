#include "flatshard/train/config_unused.h"

#include <string_view>

#include "flatshard/layout/strategy.h"
#include "flatshard/train/config_check.h"

namespace flatshard {
namespace {

/// Collects the keys that are set and not used.
class UnusedKeys {
 public:
  explicit UnusedKeys(const Config& config) : config_(config) {}
  void look_at(
      std::string_view full_name,
      std::string_view chooser,
      std::string_view value,
      std::string_view belongs_to) {
    for (const ConfigKey& key : config_keys()) {
      if (key.full_name() == full_name && differs_from_default(config_, key)) {
        found_.push_back(
            {&key,
             std::string(chooser),
             std::string(value),
             std::string(belongs_to)});
      }
    }
  }
  const Config& config() const { return config_; }
  std::vector<UnusedKey> take() { return std::move(found_); }

 private:
  const Config& config_;
  std::vector<UnusedKey> found_;
};

void unused_of_optimizer(UnusedKeys& unused) {
  const std::string& name = unused.config().optimizer.name;
  constexpr std::string_view kChooser = "optimizer.name";
  if (name == "adamw") {
    unused.look_at("optimizer.momentum", kChooser, name, "sgd");
  } else {
    for (const char* key :
         {"optimizer.beta1", "optimizer.beta2", "optimizer.eps"}) {
      unused.look_at(key, kChooser, name, "adamw");
    }
  }
}

void unused_of_lr_scheduler(UnusedKeys& unused) {
  const std::string& name = unused.config().lr_scheduler.name;
  if (name == "constant") {
    for (const char* key :
         {"lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor"}) {
      unused.look_at(key, "lr_scheduler.name", name, "linear, cosine and wsd");
    }
  }
}

void unused_of_parallelism(UnusedKeys& unused) {
  const Config::Parallelism& parallel = unused.config().parallelism;
  if (find_strategy_name(parallel.strategy).keeps_whole_weights()) {
    for (const char* key :
         {"parallelism.reshard_after_forward",
          "parallelism.memory_budget",
          "parallelism.keep_compute_weights"}) {
      unused.look_at(
          key,
          "parallelism.strategy",
          parallel.strategy,
          "strategies that shard the weights");
    }
  }
  if (parallel.expert_parallel_degree == 1) {
    unused.look_at(
        "parallelism.token_exchange",
        "parallelism.expert_parallel_degree",
        "1",
        "more ranks than one");
  }
  if (!parallel.overlap_expert_parallel) {
    unused.look_at(
        "parallelism.delay_wgrad",
        "parallelism.overlap_expert_parallel",
        "false",
        "runs of two microbatches at once");
  }
  if (find_strategy_name(parallel.strategy).name == "zero0") {
    unused.look_at(
        "parallelism.copy_engines",
        "parallelism.strategy",
        parallel.strategy,
        "strategies that shard something");
  }
  if (!parallel.reshard_after_forward) {
    unused.look_at(
        "parallelism.memory_budget",
        "parallelism.reshard_after_forward",
        "false",
        "runs that release weights after forward");
  }
}

/// Keys that belong to something that is switched off.
void unused_of_features(UnusedKeys& unused) {
  const Config& config = unused.config();
  if (config.validation.freq == 0) {
    for (const char* key : {"validation.sequences", "data.validation"}) {
      unused.look_at(
          key,
          "validation.freq",
          "0",
          "runs that validate; set validation.freq to 1 or more");
    }
  }
  if (!config.profiling.enabled) {
    for (const char* key : {"profiling.step", "profiling.folder"}) {
      unused.look_at(
          key,
          "profiling.enabled",
          "false",
          "runs that write a trace");
    }
  }
  if (config.cuda_graph.impl == "none") {
    for (const char* key :
         {"cuda_graph.modules",
          "cuda_graph.warmup_steps",
          "cuda_graph.on_miss",
          "debug.emulate_graphs"}) {
      unused.look_at(
          key,
          "cuda_graph.impl",
          "none",
          "runs with CUDA graphs; set cuda_graph.impl to unit or "
          "full_iteration");
    }
  }
  if (config.float8.recipe == "none") {
    for (const char* key :
         {"float8.exclude",
          "float8.keep_first_last",
          "float8.column_plane",
          "float8.gather_parts",
          "float8.emulate"}) {
      unused.look_at(
          key,
          "float8.recipe",
          "none",
          "runs with FP8 weights; set float8.recipe");
    }
  }
  if (config.checkpoint.interval == 0) {
    for (const char* key :
         {"checkpoint.keep_latest_k",
          "checkpoint.async",
          "checkpoint.export_hf_at_end"}) {
      unused.look_at(
          key,
          "checkpoint.interval",
          "0",
          "runs that write checkpoints; set checkpoint.interval to 1 or more");
    }
  }
  if (config.debug.comm_delay_us == 0) {
    unused.look_at(
        "debug.comm_delay_seed",
        "debug.comm_delay_us",
        "0",
        "runs with delays");
  }
}

}  // namespace

std::vector<UnusedKey> find_unused(const Config& config) {
  UnusedKeys unused(config);
  unused_of_optimizer(unused);
  unused_of_lr_scheduler(unused);
  unused_of_parallelism(unused);
  unused_of_features(unused);
  return unused.take();
}

}  // namespace flatshard
