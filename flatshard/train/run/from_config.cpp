#include "flatshard/train/run/from_config.h"

#include <c10/core/ScalarType.h>

#include "flatshard/train/setup/run_lora.h"
#include "flatshard/train/setup/run_optimizer.h"
#include "flatshard/train/tools/stored_model.h"

namespace flatshard {
namespace {

RunFiles files_of(const Config& config) {
  return run_files(
      config.run,
      config.checkpoint,
      config.profiling,
      config.lora.enabled());
}

data::PackingOptions packing_options(const Config& config) {
  return {
      .packing = config.data.packing,
      .seq_len = config.training.seq_len,
      .max_documents = config.data.packing == data::Packing::documents
                           ? config.data.documents_per_sample
                           : 0};
}

DataOptions data_options(
    const Config& config,
    const models::ModelConfig& model) {
  return {
      .train = config.data.train,
      .validation = config.data.validation,
      .packing = packing_options(config),
      .seed = static_cast<std::uint64_t>(config.run.seed),
      .global_batch_size = config.training.global_batch_size,
      .vocab_size = model.vocab_size,
      .validates = config.validation.freq != 0,
      .validation_sequences = config.validation.sequences};
}

RunCheckpoints::Options checkpoint_options(
    const Config& config,
    const models::ModelConfig& model) {
  return {
      .keys = config.checkpoint,
      .folder = files_of(config).checkpoints,
      .last_step = config.training.steps,
      .seed = config.run.seed,
      .num_experts = model.moe.num_experts,
      .config = to_toml(config),
      .schedule = lr_schedule(
          config.lr_scheduler,
          config.optimizer.lr,
          config.training.steps)};
}

std::optional<WeightSender::Options> weight_options(const Config& config) {
  const config::Weights& keys = config.weights;
  if (keys.send.empty()) {
    return std::nullopt;
  }
  return WeightSender::Options{
      .engine =
          {.server = parse_http_url(keys.send, "weights.send"),
           .num_ranks = static_cast<int>(keys.engine_ranks)},
      .every = keys.every,
      .last_step = config.training.steps,
      .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
          std::chrono::duration<double>(keys.timeout_s))};
}

RunOutput::Options output_options(const Config& config) {
  return {
      .files = files_of(config),
      .config = to_toml(config),
      .sources =
          {.corpus = tokenizer_corpus(config.data.train),
           .init_from = config.model.init_from,
           .hf_config = config.model.hf_config},
      .tensorboard = config.metrics.tensorboard};
}

AdviceOptions advice_options(
    const Config& config,
    const models::ModelConfig& model) {
  const auto size = [](at::ScalarType dtype) {
    return static_cast<std::int64_t>(c10::elementSize(dtype));
  };
  const std::int64_t parameter_nbytes =
      size(config.precision.main_params) +
      static_cast<std::int64_t>(config.optimizer.state_nbytes());
  return {
      .steps = config.training.steps,
      .warmup_steps = config.lr_scheduler.warmup_steps,
      .checkpoint_interval = config.checkpoint.interval,
      .kept_checkpoints = config.checkpoint.keep_latest_k,
      .checkpoint_nbytes =
          num_trainable_parameters(config.lora, model) * parameter_nbytes,
      .recomputes = config.activation_checkpoint.mode !=
                        models::ActivationCheckpoint::none &&
                    config.activation_checkpoint.layers.value_or(
                        model.layers) == model.layers,
      .activation_nbytes = activation_nbytes(
          model,
          config.tokens_per_microbatch(),
          size(config.precision.compute))};
}

}  // namespace

RunOptions run_options(const Config& config, const models::ModelConfig& model) {
  const config::Training& t = config.training;
  return {
      .least_memory =
          {.precision = config.precision,
           .parallelism = config.parallelism,
           .lora = config.lora,
           .float8 = config.float8.recipe.has_value(),
           .state_nbytes = config.optimizer.offload_states
                               ? 0
                               : config.optimizer.fewest_state_nbytes()},
      .data = data_options(config, model),
      .batches =
          {.local_batch_size = t.local_batch_size,
           .packing = packing_options(config),
           .fixed_shapes = config.cuda_graph.enabled(),
           .numbers_samples = config.lora.dropout > 0},
      .evaluation =
          {.freq = config.validation.freq,
           .last_step = t.steps,
           .local_batch_size = t.local_batch_size,
           .packing = packing_options(config),
           .drops_tokens = config.moe.expert_capacity_factor > 0},
      .balance_rate = config.moe.balance_rate,
      .on_nonfinite = t.on_nonfinite,
      .diagnostics =
          {.checks = config.diagnostics,
           .spoil_gradient_step = config.debug.spoil_gradient_step,
           .last_step = t.steps},
      .profile =
          {.step = config.profiling.enabled
                       ? std::optional(config.profiling.step)
                       : std::nullopt,
           .folder = std::filesystem::path(config.run.output_dir) /
                     config.profiling.folder},
      .checkpoints = checkpoint_options(config, model),
      .weights = weight_options(config),
      .output = output_options(config),
      .start =
          {.files = files_of(config),
           .init_from = config.model.init_from,
           .load_step = config.checkpoint.load_step,
           .last_step = t.steps},
      .advice = advice_options(config, model)};
}

}  // namespace flatshard
