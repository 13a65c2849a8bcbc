#include "flatshard/train/config_check.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "flatshard/core/error.h"
#include "flatshard/layout/granularity.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/train/config_field.h"
#include "flatshard/train/config_float8.h"
#include "flatshard/train/config_unused.h"

namespace flatshard {
namespace {

void check_model(const Config& config) {
  const Config::Model& model = config.model;
  FLATSHARD_CHECK(
      model.hf_config.empty() || model.preset.empty(),
      config,
      "model.hf_config = \"{}\" and model.preset = \"{}\" contradict each "
      "other; give one of them",
      model.hf_config,
      model.preset);
  // Without any of the others the shape is that of init_from's config.json.
  if (model.hf_config.empty() && model.preset.empty() &&
      (model.init_from.empty() || model.dim)) {
    FLATSHARD_CHECK(
        model.dim && model.layers && model.heads && model.ffn_dim &&
            model.vocab_size,
        config,
        "[model] needs dim, layers, heads, ffn_dim and vocab_size, or preset, "
        "or hf_config; '{}' is missing",
        !model.dim       ? "dim"
        : !model.layers  ? "layers"
        : !model.heads   ? "heads"
        : !model.ffn_dim ? "ffn_dim"
                         : "vocab_size");
  }
  if (model.dim && model.heads && !model.head_dim) {
    FLATSHARD_CHECK(
        *model.dim % *model.heads == 0,
        config,
        "model.dim = {} must be a multiple of model.heads = {}, or set "
        "model.head_dim",
        *model.dim,
        *model.heads);
  }
  if (model.heads && model.kv_heads) {
    FLATSHARD_CHECK(
        *model.heads % *model.kv_heads == 0,
        config,
        "model.heads = {} must be a multiple of model.kv_heads = {}",
        *model.heads,
        *model.kv_heads);
  }
  FLATSHARD_CHECK(
      !model.max_seq_len || config.training.seq_len <= *model.max_seq_len,
      config,
      "training.seq_len = {} is longer than model.max_seq_len = {}",
      config.training.seq_len,
      model.max_seq_len.value_or(0));
}

void check_optimizer(const Config& config) {
  if (config.optimizer.name == "adamw") {
    FLATSHARD_CHECK(
        config.optimizer.beta1 < 1 && config.optimizer.beta2 < 1,
        config,
        "optimizer.beta1 and optimizer.beta2 must be below 1, got {} and {}",
        config.optimizer.beta1,
        config.optimizer.beta2);
  }
}

void check_lr_scheduler(const Config& config) {
  const Config::LrScheduler& scheduler = config.lr_scheduler;
  FLATSHARD_CHECK(
      scheduler.warmup_steps <= config.training.steps,
      config,
      "lr_scheduler.warmup_steps = {} is more than training.steps = {}",
      scheduler.warmup_steps,
      config.training.steps);
}

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

void check_checkpoint_folder(const std::string& text) {
  const std::filesystem::path folder(text);
  const bool leaves = std::any_of(
      folder.begin(),
      folder.end(),
      [](const std::filesystem::path& part) {
        return part == ".." || part == ".";
      });
  FLATSHARD_CHECK(
      !text.empty() && !leaves,
      config,
      "checkpoint.folder expected a folder below run.output_dir, or an "
      "absolute "
      "one, got \"{}\"",
      text);
}

void check_parallelism(const Config& config) {
  const Config::Parallelism& parallel = config.parallelism;
  Granularity::parse(parallel.granularity, "parallelism.granularity");
  const bool keeps_weights =
      find_strategy_name(parallel.strategy).keeps_whole_weights();
  FLATSHARD_CHECK(
      parallel.copy_engines != "forward" || !keeps_weights,
      config,
      "parallelism.copy_engines = \"forward\" is for strategies that gather "
      "weights in forward; \"{}\" does not: use none or all",
      parallel.strategy);
  FLATSHARD_CHECK(
      parallel.copy_engines == "auto" || parallel.copy_engines == "none" ||
          parallel.keep_compute_weights,
      config,
      "parallelism.copy_engines = \"{}\" copies compute weights, which "
      "parallelism.keep_compute_weights = false does not keep; choose one",
      parallel.copy_engines);
  FLATSHARD_CHECK(
      parallel.expert_parallel_degree == 1 || parallel.copy_engines == "auto" ||
          parallel.copy_engines == "none",
      config,
      "parallelism.copy_engines = \"{}\" is not supported with "
      "expert_parallel_degree above 1; use none",
      parallel.copy_engines);
  const std::int64_t replicate = parallel.data_parallel_replicate_degree;
  const std::int64_t shard = parallel.data_parallel_shard_degree;
  FLATSHARD_CHECK(
      replicate != 0 && shard != 0,
      config,
      "parallelism.data_parallel_replicate_degree and "
      "data_parallel_shard_degree expected -1 or at least 1, got {} and {}",
      replicate,
      shard);
  FLATSHARD_CHECK(
      replicate != -1 || shard != -1,
      config,
      "parallelism.data_parallel_replicate_degree and "
      "data_parallel_shard_degree are both -1; only one can be the rest");
  FLATSHARD_CHECK(
      replicate != 1 ||
          !find_strategy_name(parallel.strategy).needs_outer_axis(),
      config,
      "parallelism.strategy = \"{}\" needs an outer axis, but "
      "data_parallel_replicate_degree is 1; set it to 2 or more, or use zero3",
      parallel.strategy);
}

/// What two microbatches at once do not work with.
void check_overlap(const Config& config) {
  if (!config.parallelism.overlap_expert_parallel) {
    return;
  }
  const auto refuse = [&](bool found, const char* what, const char* why) {
    FLATSHARD_CHECK(
        !found,
        config,
        "parallelism.overlap_expert_parallel with {}: {}",
        what,
        why);
  };
  refuse(
      config.activation_checkpoint.mode == "selective",
      "activation_checkpoint.mode = \"selective\"",
      "the pieces of a block are recomputed whole; use \"full\" or \"none\"");
  refuse(
      config.cuda_graph.impl != "none",
      "cuda_graph.impl",
      "graphs whose backwards interleave are not supported; use \"none\"");
  refuse(
      config.diagnostics.strict,
      "diagnostics.strict = true",
      "it watches the calls of modules, and pieces of blocks are none");
  refuse(
      config.parallelism.memory_budget > 0,
      "parallelism.memory_budget",
      "units that stay gathered are planned for one microbatch at a time; "
      "leave it at 0");
}

/// Steps that a warm-up may take beside the decay.
std::int64_t longest_warmup(const Config& config) {
  const bool has_decay = config.lr_scheduler.name == "wsd" ||
                         (config.lr_scheduler.name != "constant" &&
                          config.lr_scheduler.decay_ratio);
  const LrSchedule schedule{
      .kind = LrSchedule::parse_kind(config.lr_scheduler.name),
      .total_steps = config.training.steps,
      .decay_ratio = config.lr_scheduler.decay_ratio};
  return config.training.steps - (has_decay ? schedule.decay_steps() : 0);
}

}  // namespace

std::vector<std::string> settle_overrides(
    Config& config,
    const std::set<std::string>& overridden) {
  std::vector<std::string> notes;
  const auto given = [&](const std::string& name) {
    return overridden.contains(name);
  };
  for (bool again = true; std::exchange(again, false);) {
    for (const UnusedKey& unused : find_unused(config)) {
      const std::string name = unused.key->full_name();
      if (!given(unused.chooser) || given(name)) {
        continue;
      }
      const ConfigField field = unused.key->field(config);
      notes.push_back(fmt::format(
          "{} = {} is not used, since --set {}={}",
          name,
          value_text(field),
          unused.chooser,
          unused.value));
      set_to_default(config, *unused.key);
      again = true;
    }
  }
  std::int64_t& warmup = config.lr_scheduler.warmup_steps;
  if (given("training.steps") && !given("lr_scheduler.warmup_steps") &&
      warmup > longest_warmup(config)) {
    const std::int64_t most = std::max<std::int64_t>(0, longest_warmup(config));
    notes.push_back(fmt::format(
        "lr_scheduler.warmup_steps = {} instead of {}, since --set "
        "training.steps={}",
        most,
        std::exchange(warmup, most),
        config.training.steps));
  }
  std::int64_t& traced = config.profiling.step;
  if ((given("training.steps") || given("profiling.enabled")) &&
      !given("profiling.step") && config.profiling.enabled &&
      traced > config.training.steps) {
    notes.push_back(fmt::format(
        "profiling.step = {} instead of {}, since there are no more "
        "training.steps",
        config.training.steps,
        std::exchange(traced, config.training.steps)));
  }
  std::string& nonfinite = config.training.on_nonfinite;
  if (given("checkpoint.interval") && !given("training.on_nonfinite") &&
      config.checkpoint.interval == 0 && nonfinite == "rewind") {
    nonfinite = "stop";
    notes.emplace_back(
        "training.on_nonfinite = \"stop\" instead of \"rewind\", since --set "
        "checkpoint.interval=0 leaves nothing to rewind to");
  }
  return notes;
}

void validate_config(const Config& config) {
  check_config_values(config);
  FLATSHARD_CHECK(
      !config.data.train.empty(),
      config,
      "data.train is missing: give a corpus folder (made by 'flatshard data "
      "prepare') or \"random\"");
  FLATSHARD_CHECK(
      !config.run.output_dir.empty(),
      config,
      "run.output_dir is empty: give a folder");
  FLATSHARD_CHECK(
      config.training.global_batch_size != 0,
      config,
      "training.global_batch_size expected -1 or at least 1, got 0");
  check_model(config);
  check_optimizer(config);
  check_lr_scheduler(config);
  check_parallelism(config);
  check_cuda_graph(config);
  check_overlap(config);
  check_float8(config);
  check_checkpoint_folder(config.checkpoint.folder);
  FLATSHARD_CHECK(
      config.validation.sequences != 0,
      config,
      "validation.sequences expected -1 (the whole split) or at least 1, got "
      "0; validation.freq = 0 is a run without validation");
  FLATSHARD_CHECK(
      config.training.on_nonfinite != "rewind" ||
          config.checkpoint.interval > 0,
      config,
      "training.on_nonfinite = \"rewind\" goes back to checkpoints, and "
      "checkpoint.interval is 0, so there are none");
  for (const UnusedKey& unused : find_unused(config)) {
    FLATSHARD_THROW(
        config,
        "{} is set, but {} = \"{}\" does not use it; it belongs to {}",
        unused.key->full_name(),
        unused.chooser,
        unused.value,
        unused.belongs_to);
  }
  FLATSHARD_CHECK(
      !config.profiling.enabled ||
          config.profiling.step <= config.training.steps,
      config,
      "profiling.step = {} comes after training.steps = {}, so there would be "
      "no trace",
      config.profiling.step,
      config.training.steps);
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

Config resolve_config(const Config& config, std::int64_t world) {
  validate_config(config);
  FLATSHARD_CHECK(world >= 1, usage, "expected world >= 1, got {}", world);
  Config resolved = config;
  std::int64_t& replicate = resolved.parallelism.data_parallel_replicate_degree;
  std::int64_t& shard = resolved.parallelism.data_parallel_shard_degree;
  std::int64_t& rest = replicate == -1 ? replicate : shard;
  const std::int64_t given = replicate == -1 ? shard : replicate;
  if (rest == -1) {
    FLATSHARD_CHECK(
        world % given == 0,
        config,
        "parallelism: {} ranks cannot be divided by {} = {}",
        world,
        &rest == &replicate ? "data_parallel_shard_degree"
                            : "data_parallel_replicate_degree",
        given);
    rest = world / given;
  }
  FLATSHARD_CHECK(
      replicate * shard == world,
      config,
      "parallelism: data_parallel_replicate_degree * "
      "data_parallel_shard_degree = {} * {} must be the number of ranks, {}",
      replicate,
      shard,
      world);
  const std::int64_t experts = resolved.parallelism.expert_parallel_degree;
  FLATSHARD_CHECK(
      shard % experts == 0,
      config,
      "parallelism.expert_parallel_degree = {} must divide "
      "data_parallel_shard_degree, which is {} of {} ranks",
      experts,
      shard,
      world);
  const std::int64_t ranks_batch = resolved.training.local_batch_size * world;
  std::int64_t& global_batch = resolved.training.global_batch_size;
  if (global_batch == -1) {
    global_batch = ranks_batch;
  }
  FLATSHARD_CHECK(
      global_batch % ranks_batch == 0,
      config,
      "training.global_batch_size = {} must be a multiple of "
      "local_batch_size * ranks = {} * {}",
      global_batch,
      resolved.training.local_batch_size,
      world);
  FLATSHARD_CHECK(
      !resolved.parallelism.overlap_expert_parallel ||
          global_batch / ranks_batch >= 2,
      config,
      "parallelism.overlap_expert_parallel needs 2 microbatches or more, got "
      "training.global_batch_size = {} with local_batch_size * ranks = {}; "
      "double the one or halve the other",
      global_batch,
      ranks_batch);
  validate_config(resolved);
  return resolved;
}

}  // namespace flatshard
