#include "flatshard/train/config_check.h"

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/layout/granularity.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/train/config_float8.h"
#include "flatshard/train/config_graph.h"
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
      config.cuda_graph.impl == "full_iteration",
      "cuda_graph.impl = \"full_iteration\"",
      "backwards that interleave are no single graph; use \"unit\" with "
      "cuda_graph.modules, or \"none\"");
  refuse(
      config.cuda_graph.impl == "unit" && config.cuda_graph.modules.empty(),
      "cuda_graph.impl = \"unit\" of whole blocks",
      "blocks run in pieces; name parts in cuda_graph.modules (attn, "
      "moe_router, mlp)");
  refuse(
      config.cuda_graph.impl != "none" && config.float8.recipe != "none",
      "cuda_graph.impl and float8.recipe",
      "the FP8 planes of two microbatches lie in other places; leave one out");
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

}  // namespace

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
