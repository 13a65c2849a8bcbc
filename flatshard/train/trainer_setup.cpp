// How a Trainer is put together; trainer.cpp has what it does then.
#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/comm/all_gather_values.h"
#include "flatshard/comm/store.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/diagnostics/overlap_check.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/metrics.h"
#include "flatshard/train/option_errors.h"
#include "flatshard/train/setup.h"
#include "flatshard/train/trainer.h"
#include "flatshard/unit/fully_shard.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {
namespace {

// Longer than a rank takes to notice that its peers are gone.
constexpr std::chrono::seconds kRestartPatience(60);

std::shared_ptr<Mesh> make_mesh(
    const Config& config,
    const RankEnvironment& env,
    at::Device device,
    OnStuckAbort on_stuck_abort) {
  if (env.world_size == 1) {
    return Mesh::single(device);
  }
  const std::chrono::duration<double> timeout(config.comm.timeout_s);
  MeshOptions options;
  options.communicator.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
  options.watcher = config.comm.watcher;
  options.launcher_serves_store = env.launcher_serves_store;
  options.on_stuck_abort = std::move(on_stuck_abort);
  return Mesh::create(
      mesh_axes(config),
      env.rank,
      make_tcp_store(env),
      device,
      options);
}

}  // namespace

Trainer::Trainer(
    const Config& config,
    RankEnvironment env,
    const std::string& device,
    bool resume,
    OnStuckAbort on_stuck_abort)
    : derives_global_batch_(config.training.global_batch_size == -1),
      config_(resolve_config(config, env.world_size)),
      env_(std::move(env)),
      device_(choose_device(device, env_)),
      model_config_(model_config(config_)),
      schedule_(lr_schedule(config_)) {
  FLATSHARD_CHECK(
      config_.precision.scaling != "per_token",
      config,
      "precision.scaling = per_token: the trainer's batches hold equally many "
      "tokens on every rank, so mean is per token; use mean");
  set_current_device(device_);
  if (config_.debug.deterministic) {
    at::globalContext().setDeterministicAlgorithms(true, false);
  }
  const Config::Training& t = config_.training;
  // Data first: a wrong path should not wait for the model.
  const auto seed = static_cast<std::uint64_t>(config_.run.seed);
  FLATSHARD_CHECK(
      !config_.data.train.empty(),
      config,
      "data.train: expected a corpus folder (see `flatshard data prepare`) or "
      "\"random\"");
  for_option("data.train", [&] {
    train_loader_.emplace(
        data::open_token_sources(
            config_.data.train,
            "train",
            seed,
            model_config_.vocab_size),
        data::LoaderOptions{
            .seed = seed,
            .seq_len = t.seq_len,
            .global_batch_size = t.global_batch_size,
            .vocab_size = model_config_.vocab_size});
  });
  validation_sets_ = open_validation_sets(config_, model_config_.vocab_size);
  num_microbatches_ =
      train_loader_->num_microbatches(env_.world_size, t.local_batch_size);

  check_memory(config_, model_config_, env_.world_size, device_);
  mesh_ = make_mesh(config_, env_, device_, std::move(on_stuck_abort));
  watched([&] { build(resume); });
}

void Trainer::build(bool resume) {
  // Nothing below touches a file of an earlier run: open_output() does, when
  // the first backward has shown that data, weights and memory are in order.
  if (env_.rank == 0) {
    for_option(kOutputDir, [&] {
      // torchrun may start ranks here before those elsewhere have ended.
      lock_.emplace(
          config_.run.output_dir,
          RunLock::Options{
              .patience = env_.restart_count > 0 ? kRestartPatience
                                                 : std::chrono::seconds(0)});
    });
    output_.emplace();
  }
  const auto start = find_start(config_, resume, *mesh_);
  goes_on_ = resume || start;
  if (output_ && !goes_on_) {
    refuse_foreign_checkpoints(config_.checkpoint.folder);
  }
  if (start && run_has_ended(config_, *start, *mesh_)) {
    nothing_left_ = true;
    if (output_) {
      log_info(
          "nothing is left to do: the run has a checkpoint of step {}, and "
          "training.steps = {}; raise it to go on",
          *start,
          config_.training.steps);
    }
    return;
  }
  if (start) {
    keep_global_batch(*start);
  }
  const Config::Training& t = config_.training;
  model_ = models::Llama(
      model_config_,
      models::LlamaOptions{
          .activation_checkpoint = models::parse_activation_checkpoint(
              config_.activation_checkpoint.mode)});
  copy_engines_ = choose_copy_engines(config_, *mesh_);
  FullyShardOptions options = shard_options(config_, copy_engines_);
  options.group.grads_in_reduce_dtype = num_microbatches_ == 1;
  for (const auto& module : model_->unit_modules()) {
    options.units.push_back(module.get());
  }
  runtime_ = fully_shard(*model_, mesh_, options);
  install_diagnostics();
  optimizer_ = make_optimizer(config_, runtime_->groups());
  if (config_.optimizer.overlap) {
    optimizer_->set_stream(
        make_stream(device_, "optimizer", options.runtime.streams));
  }
  if (config_.parallelism.memory_budget > 0) {
    spend_memory_budget();
  }
  flops_per_token_ = models::flops_per_token(model_config_, t.seq_len);

  const auto shape = {t.local_batch_size, t.seq_len};
  auto host = at::TensorOptions().dtype(at::kLong);
  tokens_host_ = at::empty(shape, host.pinned_memory(device_.is_cuda()));
  targets_host_ = at::empty(shape, host.pinned_memory(device_.is_cuda()));
  tokens_ = at::empty(shape, host.device(device_));
  targets_ = at::empty(shape, host.device(device_));
  const auto groups = all_groups();
  checkpoints_.emplace(
      config_,
      RunCheckpoints::Parts{
          .mesh = mesh_,
          .groups = groups,
          .optimizer = optimizer_.get(),
          .loader = &*train_loader_});
  if (output_) {
    announce();
  }
  if (start) {
    checkpoints_->load(*start);
    first_step_ = *start + 1;
  } else if (!config_.model.init_from.empty()) {
    for_option("model.init_from", [&] {
      init_weights(config_.model.init_from, groups, models::to_hf_name);
    });
    if (output_) {
      log_info("took the weights of {}", config_.model.init_from);
    }
  }
  if (!start && resume && output_) {
    log_info(
        "no checkpoint in {} yet: starting from the first step",
        checkpoint_folder(config_).string());
  }
  signals_.emplace();
}

Trainer::~Trainer() = default;

void Trainer::keep_global_batch(std::int64_t step) {
  Config::Training& t = config_.training;
  const std::int64_t before = checkpoint_global_batch(config_, step, *mesh_);
  if (before <= 0 || before == t.global_batch_size) {
    return;
  }
  if (!derives_global_batch_) {
    if (output_) {
      log_info(
          "training.global_batch_size = {}, as the config says; the checkpoint "
          "of step {} was trained with {}",
          t.global_batch_size,
          step,
          before);
    }
    return;
  }
  const std::int64_t ranks_batch = t.local_batch_size * env_.world_size;
  FLATSHARD_CHECK(
      before % ranks_batch == 0,
      config,
      "training.global_batch_size: the checkpoint of step {} was trained with "
      "{} sequences a step, which is no multiple of local_batch_size * ranks = "
      "{} * {} = {}; set training.global_batch_size to a number, or change "
      "training.local_batch_size or the number of ranks",
      step,
      before,
      t.local_batch_size,
      env_.world_size,
      ranks_batch);
  if (output_) {
    log_info(
        "training.global_batch_size = {}, as in the checkpoint of step {}; "
        "these ranks alone would make it {}",
        before,
        step,
        t.global_batch_size);
  }
  t.global_batch_size = before;
  train_loader_->set_global_batch_size(before);
  num_microbatches_ =
      train_loader_->num_microbatches(env_.world_size, t.local_batch_size);
}

void Trainer::open_output() {
  if (std::exchange(opened_output_, true)) {
    return;
  }
  runtime_->synchronize();
  mesh_->world().barrier();
  mesh_->check();
  if (output_) {
    output_->open(config_, goes_on_, first_step_ - 1);
  }
  mesh_->world().barrier();  // what was there before is out of the way
  mesh_->check();
}

void Trainer::spend_memory_budget() {
  const auto budget =
      static_cast<std::int64_t>(config_.parallelism.memory_budget * kGiB);
  const std::int64_t mine =
      total_nbytes(memory_rows(*runtime_, optimizer_->state_nbytes()));
  const auto totals = all_gather_values(mesh_->world(), mine);
  const std::int64_t total = std::ranges::max(totals);
  FLATSHARD_CHECK(
      budget >= total,
      config,
      "parallelism.memory_budget: expected at least {:.4g} GiB, which is what "
      "the memory table comes to with no unit kept, got {:g}",
      static_cast<double>(total) / kGiB,
      config_.parallelism.memory_budget);
  num_kept_units_ = runtime_->keep_gathered(
      runtime_->executor().pool().arena_nbytes() + budget - total);
}

void Trainer::announce() {
  // A restart of the same run on the same ranks has nothing new to say.
  std::optional<Config> before;
  const auto path =
      std::filesystem::path(config_.run.output_dir) / "config.toml";
  if (goes_on_ && std::filesystem::exists(path)) {
    try {
      before = load_config(path);
    } catch (const Error&) {}  // of another version: as if it were not there
  }
  const std::string changed =
      differing_keys(config_, before.value_or(Config()));
  if (!before) {
    output_->print(fmt::format(
        "config: all of it is in {}; not as by default are\n{}",
        path.string(),
        changed));
  } else if (!changed.empty()) {
    output_->print(
        fmt::format("config: changed since the run's last start\n{}", changed));
  }
  output_->print(fmt::format(
      "model: {} parameters; {} ranks of {}; strategy {}; copy engines {}; {} "
      "microbatches per step",
      with_commas(models::num_parameters(model_config_)),
      env_.world_size,
      device_.is_cuda() ? "GPU" : "CPU",
      strategy_name(config_),
      copy_engines_,
      num_microbatches_));
  if (before && changed.empty()) {
    return;
  }
  output_->print(fmt::format(
      "tflops and mfu count 6 N + 12 L d T per token (attention as if it were "
      "not causal, no recompute): {} per token",
      format_flop(flops_per_token_)));
  if (config_.parallelism.memory_budget > 0) {
    output_->print(fmt::format(
        "parallelism.memory_budget: {} of {} units stay gathered from forward "
        "to backward",
        num_kept_units_,
        runtime_->units().size()));
  }
  const auto rows = memory_rows(*runtime_, optimizer_->state_nbytes());
  std::vector<MemoryRow> host_rows;
  if (checkpoints_->enabled()) {
    host_rows.push_back(
        {"checkpoint",
         checkpoints_->staging_nbytes(),
         "two buffers, from which checkpoints are written"});
  }
  output_->print(to_string(rows, host_rows));
}

void Trainer::install_diagnostics() {
  if (config_.diagnostics.overlap_check) {
    OverlapCheck::install(runtime_);
  }
  if (config_.diagnostics.nan_check) {
    NanCheck::install(runtime_);
    NanCheck::check_weights(*runtime_);
  }
}

}  // namespace flatshard
