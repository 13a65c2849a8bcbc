// Builds a Trainer. trainer.cpp runs its steps.
#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/device_name.h"
#include "flatshard/diagnostics/machine.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/config/split_list.h"
#include "flatshard/train/data/epochs.h"
#include "flatshard/train/data/trained_samples.h"
#include "flatshard/train/run/run_summary.h"
#include "flatshard/train/run/trainer.h"
#include "flatshard/train/setup/base_digest.h"
#include "flatshard/train/setup/first_kernels.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/run_device.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <chrono>

namespace flatshard {
namespace {

// Longer than the time until a rank notices that its peers are gone.
constexpr std::chrono::seconds kRestartPatience(60);

InitWeightsOptions init_options(
    const Config& config,
    const models::ModelConfig& model) {
  const std::int64_t layers = config.model.layers.value_or(-1);
  return {
      .entries_of = models::hf_entries_of(model),
      .base_prefix = std::string(models::kHfBasePrefix),
      .unneeded =
          [layers](const std::string& name, std::size_t num_dims) {
            // Fewer layers than in the folder are allowed if the config asks
            // for fewer.
            const auto layer = models::layer_of_hf_entry(name);
            return (layers >= 0 && layer && *layer >= layers) ||
                   models::is_unneeded_hf_entry(name, num_dims);
          },
      .exclude = split_list(config.checkpoint.exclude)};
}

/// A missing head has a separate error.
void check_head(const Config& config, const models::ModelConfig& model) {
  constexpr std::string_view kHead = "lm_head.weight";
  const auto exclude = split_list(config.checkpoint.exclude);
  const HfFolder weights(config.model.init_from, models::kHfBasePrefix);
  FLATSHARD_CHECK(
      model.tie_embeddings || weights.contains(kHead) ||
          !weights.contains("model.embed_tokens.weight") ||
          std::any_of(
              exclude.begin(),
              exclude.end(),
              [&](const std::string& pattern) {
                return ::fnmatch(pattern.c_str(), kHead.data(), 0) == 0;
              }),
      format,
      "{} has no tensor '{}', and the model does not tie it to the embedding; "
      "set model.tie_embeddings = true to do that, or checkpoint.exclude = "
      "\"{}\" to start with a random one",
      config.model.init_from,
      kHead,
      kHead);
}

void report_unused(const UnusedWeights& unused, const Config& config) {
  if (!unused.names.empty()) {
    log_info(
        "{} has what is not used: {}",
        config.model.init_from,
        fmt::join(unused.names, ", "));
  }
  for (const std::string& name : unused.other_values) {
    log_warning(
        "{} of {} is not used: the model ties its head to the embedding "
        "(tie_word_embeddings), and their values differ. transformers 4 does "
        "the same; transformers 5 keeps both, as does model.tie_embeddings = "
        "false",
        name,
        config.model.init_from);
  }
}

}  // namespace

Trainer::Trainer(
    const Config& config,
    const RankEnvironment& env,
    const std::string& device,
    bool resume,
    OnStuckAbort on_stuck_abort)
    : start_clock_(launched_by_this_program()),
      given_(config),
      config_(resolve_config(config, env.world_size, env.ranks_per_host)),
      device_(choose_device(device, env)),
      model_config_(model_config(config_)),
      options_(run_options(config_, model_config_)),
      schedule_(options_.checkpoints.schedule),
      // Data first: a wrong path should not wait for the model.
      loader_(open_train_loader(options_.data)) {
  auto validation_sets = open_validation_sets(options_.data);
  check_memory(
      least_memory(options_.least_memory, model_config_, env.world_size),
      model_config_,
      env.world_size,
      device_);
  set_current_device(device_);
  if (config_.debug.deterministic) {
    at::globalContext().setDeterministicAlgorithms(true, false);
  }
  start_clock_.end(&StartTimes::device_s);
  mesh_ = make_mesh(
      mesh_axes(config_.parallelism),
      config_.comm,
      env,
      device_,
      std::move(on_stuck_abort));
  start_clock_.end(&StartTimes::ranks_s);
  watched([&] {
    // Nothing here touches a file of an earlier run: open_output() does, when
    // the first backward has shown that data, weights and memory are in order.
    if (env.rank == 0) {
      lock_folder(env.restart_count);
    }
    start_ = find_start(options_.start, resume, *mesh_);
    if (start_.nothing_left) {
      return;
    }
    if (env.rank == 0) {
      check_trained_samples(config_.data.train, loader_, validation_sets);
    }
    if (start_.checkpoint) {
      config_.training.global_batch_size = global_batch_from(
          *start_.checkpoint,
          options_.start.files.checkpoints,
          {.local = config_.training.local_batch_size,
           .global = config_.training.global_batch_size,
           .derived = config.training.global_batch_size == -1},
          *mesh_);
      options_ = run_options(config_, model_config_);
      loader_.set_global_batch_size(config_.training.global_batch_size);
    }
    build(std::move(validation_sets));
    start_clock_.end(&StartTimes::model_s);
    load_weights(resume);
    start_clock_.end(&StartTimes::weights_s);
    diagnostics_->check_weights(*state_.optimizer);
    requests_.emplace(mesh_, config_.metrics.log_freq);
  });
}

Trainer::~Trainer() = default;

void Trainer::lock_folder(int restart_count) {
  for_option(kOutputDir, [&] {
    // torchrun may start ranks here before those elsewhere have ended.
    lock_.emplace(
        config_.run.output_dir,
        RunLock::Options{
            .patience = restart_count > 0 ? kRestartPatience
                                          : std::chrono::seconds(0)});
  });
  output_.emplace();
}

void Trainer::build(std::vector<ValidationSet> validation_sets) {
  const config::Training& t = config_.training;
  RunOutput* output = output_ ? &*output_ : nullptr;
  const std::int64_t num_microbatches =
      loader_.num_microbatches(mesh_->data_mesh()->size(), t.local_batch_size);
  state_ = make_train_state(config_, model_config_, mesh_, num_microbatches);
  diagnostics_
      .emplace(options_.diagnostics, state_.runtime, mesh_->rank(), output);
  experts_.emplace(options_.balance_rate, state_.model, state_.exchange, mesh_);
  if (output_ && (start_.checkpoint || config_.checkpoint.interval > 0)) {
    data_.emplace(config_.data.train, loader_, validation_sets);
  }
  checkpoints_.emplace(
      options_.checkpoints,
      RunCheckpoints::Parts{
          .mesh = mesh_,
          .groups = state_.saved_groups(),
          .optimizer = state_.optimizer.get(),
          .loader = &loader_,
          .buffers = experts_->buffers(),
          .data = data_ ? &*data_ : nullptr,
          .output = output});
  batches_.emplace(options_.batches, mesh_, loader_);
  microbatches_.emplace(
      state_.model,
      state_.runtime,
      mesh_,
      *batches_,
      MicrobatchOptions{
          .as_graph = config_.cuda_graph.whole_step(),
          .overlap = overlap_options(
              config_.parallelism,
              config_.activation_checkpoint.mode,
              model_config_),
          .samples = state_.lora ? state_.lora->samples() : at::Tensor()});
  if (!validation_sets.empty()) {
    evaluation_.emplace(
        options_.evaluation,
        std::move(validation_sets),
        mesh_,
        state_.model);
  }
  if (options_.weights) {
    const auto groups = state_.runtime->all_groups();
    sender_.emplace(
        *options_.weights,
        WeightSender::Parts{
            .mesh = mesh_,
            .groups = {groups.begin(), groups.end()},
            .entries_of = models::hf_entries_of(model_config_),
            .buffers = experts_->buffers(),
            .output = output});
  }
  guard_.emplace(
      options_.on_nonfinite,
      NonfiniteGuard::Parts{
          .mesh = mesh_,
          .runtime = state_.runtime,
          .optimizer = state_.optimizer.get(),
          .checkpoints = &*checkpoints_,
          .loader = &loader_,
          .output = output});
  const double flops_per_token =
      trained_flops_per_token(config_.lora, model_config_, t.seq_len);
  const std::optional<double> peak =
      peak_flops(config_.precision.compute, device_);
  meter_.emplace(StepMeter::Work{
      .tokens = t.global_batch_size * t.seq_len,
      .num_ranks = mesh_->size(),
      .flops_per_token = flops_per_token,
      .peak_flops = peak});
  profile_.emplace(
      options_.profile,
      device_,
      speed_of_light(
          model_config_,
          {.sequences = t.local_batch_size * num_microbatches,
           .seq_len = t.seq_len,
           .ranks_per_sample = config_.parallelism.tensor_parallel_degree *
                               config_.parallelism.context_parallel_degree,
           .matmul_flops_per_token =
               matmul_flops_per_token(config_.lora, model_config_)},
          peak),
      output);
  if (output_) {
    if (state_.float8.is_none) {
      log_warning("{}", state_.float8.text);
    }
    output_->print(to_string(RunSummary{
        .config = config_,
        .set_keys = differing_keys(given_, Config()),
        .model = model_config_,
        .mesh = *mesh_,
        .state = state_,
        .goes_on = start_.goes_on,
        .loader = loader_,
        .num_microbatches = num_microbatches,
        .flops_per_token = flops_per_token,
        .staging_nbytes = checkpoints_->staging_nbytes(),
        .advice = options_.advice}));
  }
}

StartMetrics Trainer::start_metrics() const {
  StartMetrics start{
      .done = start_.first_step() - 1,
      .steps = config_.training.steps,
      .ranks = mesh_->size(),
      .device = device_.is_cuda() ? cuda_device_name(device_) : "CPU",
      .parameters = models::num_parameters(model_config_),
      .tokens_per_step =
          config_.training.global_batch_size * config_.training.seq_len,
      .data = data_epochs(config_.data.train, loader_, config_.training.steps),
      .changed_keys = changed_keys(given_),
      .environment = {{"flatshard", FLATSHARD_VERSION}}};
  for (const Fact& fact : build_facts()) {
    start.environment.emplace_back(fact.name, fact.value);
  }
  const Fact host = host_fact();
  start.environment.emplace_back(host.name, host.value);
  return start;
}

void Trainer::load_weights(bool resume) {
  const bool reads = start_.checkpoint || !config_.model.init_from.empty();
  const std::future<void> kernels =
      reads ? load_first_kernels(device_, config_.precision.compute)
            : std::future<void>();
  // Checkpoints of adapters do not contain the base model's weights.
  if (!start_.checkpoint || state_.lora) {
    take_weights();
  }
  if (start_.checkpoint) {
    checkpoints_->load(*start_.checkpoint);
    return;
  }
  if (!config_.lora.init_from_adapter.empty()) {
    load_adapter(
        config_.lora.init_from_adapter,
        lora_config(config_.lora),
        model_config_,
        state_.runtime->groups());
  }
  if (resume && output_) {
    log_info(
        "no checkpoint in {} yet: starting from the first step",
        options_.start.files.checkpoints.string());
  }
}

void Trainer::take_weights() {
  const std::vector<ParamGroup*> groups = state_.lora
                                              ? frozen_groups(*state_.runtime)
                                              : state_.runtime->all_groups();
  if (!config_.model.init_from.empty()) {
    const UnusedWeights unused = for_option("model.init_from", [&] {
      check_head(config_, model_config_);
      return init_weights(
          config_.model.init_from,
          groups,
          init_options(config_, model_config_));
    });
    if (output_) {
      log_info("loaded the weights of {}", config_.model.init_from);
      report_unused(unused, config_);
    }
  }
  if (state_.lora) {
    checkpoints_->set_base(to_json(digest_weights(groups)));
    keep_float8_alone(groups);
  }
}

}  // namespace flatshard
