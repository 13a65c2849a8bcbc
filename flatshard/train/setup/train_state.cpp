#include "flatshard/train/setup/train_state.h"

#include <algorithm>

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/setup/float8_choice.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/run_optimizer.h"

namespace flatshard {
namespace {

/// Keeps as many units unsharded as parallelism.memory_budget has room for.
/// Collective. @return how many.
int spend_memory_budget(
    const config::Parallelism& keys,
    Mesh& mesh,
    TrainState& state) {
  const std::int64_t mine = total_nbytes(memory_rows(state));
  const auto totals = all_gather_values(mesh.world(), mine);
  return state.runtime->gathers().keep_gathered(
      state.runtime->executor().slots().pool().arena_nbytes() +
      left_of_memory_budget(keys, std::ranges::max(totals)));
}

}  // namespace

std::int64_t left_of_memory_budget(
    const config::Parallelism& keys,
    std::int64_t total) {
  const double budget_gib = keys.memory_budget;
  const auto budget = static_cast<std::int64_t>(budget_gib * kGiB);
  FLATSHARD_CHECK(
      budget >= total,
      config,
      "parallelism.memory_budget: expected at least {:.4g} GiB (total of the "
      "memory table if all units reshard), got {:g}",
      static_cast<double>(total) / kGiB,
      budget_gib);
  return budget - total;
}

std::vector<MemoryRow> memory_rows(
    const TrainState& state,
    const std::optional<GraphStats>& graphs) {
  auto rows =
      memory_rows(*state.runtime, state.optimizer->state_nbytes(), graphs);
  for (MemoryRow& row : rows) {
    if (row.role == "slot pool" && state.num_in_flight > 1) {
      row.reason +=
          fmt::format(", with {} microbatches in flight", state.num_in_flight);
    }
    if (row.role == "optimizer state" &&
        state.optimizer->host_state_nbytes() > 0) {
      row.reason = "two buffers for the states that are updated";
    }
  }
  if (state.exchange && state.exchange->nbytes() > 0) {
    rows.push_back(
        {"token exchange",
         state.exchange->nbytes(),
         "windows that peers copy rows from and to"});
  }
  if (state.ranks && state.ranks->nbytes() > 0) {
    rows.push_back(
        {"shared layers",
         state.ranks->nbytes(),
         "windows that peers copy activations from and to"});
  }
  if (state.context && state.context->nbytes() > 0) {
    rows.push_back(
        {"shared sequences",
         state.context->nbytes(),
         "windows that peers copy heads from and to"});
  }
  return rows;
}

TrainState make_train_state(
    const Config& config,
    const models::ModelConfig& model,
    const std::shared_ptr<Mesh>& mesh,
    std::int64_t num_microbatches) {
  TrainState state;
  models::MoeOptions moe = moe_options(config.moe, config.debug.force_balance);
  const config::Parallelism& p = config.parallelism;
  if (config::expert_ranks(p) > 1) {
    state.exchange = make_exchange(
        p,
        {.num_experts = model.moe.num_experts,
         .window_nbytes = exchange_window_nbytes(config, model),
         .timeout = timeout_of(config.comm),
         .exchange =
             {.groups_by_rank = config.debug.deterministic,
              .stream = comm_streams(config.debug)}},
        *mesh);
    moe.exchange = state.exchange;
    moe.local_experts = model.moe.num_experts / p.expert_parallel_degree;
    moe.local_ffn_dim = model.moe.ffn_dim / p.expert_tensor_parallel_degree;
  }
  const auto overlap =
      overlap_options(p, config.activation_checkpoint.mode, model);
  const bool in_pieces = overlap.has_value();
  if (overlap) {
    state.num_in_flight = static_cast<int>(
        std::min<std::int64_t>(overlap->in_flight, num_microbatches));
  }
  models::ActivationCheckpoint checkpoint = config.activation_checkpoint.mode;
  if (in_pieces && checkpoint == models::ActivationCheckpoint::full) {
    // A schedule of pieces recomputes them itself.
    checkpoint = models::ActivationCheckpoint::none;
  }
  if (in_pieces && !state.exchange) {
    // Pieces between which rows are permuted on another stream.
    moe.exchange = std::make_shared<nn::LocalExchange>();
  }
  state.ranks = tensor_parallel_ranks(
      p,
      config.has_plain_layers(),
      {.window_nbytes = tensor_window_nbytes(config, model),
       .stream = comm_streams(config.debug)},
      *mesh);
  state.context = context_parallel_ranks(
      p,
      {.window_nbytes = context_window_nbytes(config, model),
       .stream = comm_streams(config.debug)},
      *mesh);
  state.model = models::Llama(
      model,
      models::LlamaOptions{
          .activation_checkpoint = checkpoint,
          .checkpointed_layers = config.activation_checkpoint.layers,
          .keep_attention = config.activation_checkpoint.saves_attention(),
          .mlp_chunk_tokens = config.activation_checkpoint.mlp_chunk_tokens,
          .plain_attention = config.model.plain_attention,
          .loss =
              {.chunk_tokens = config.activation_checkpoint.loss_chunk_tokens},
          .moe = moe,
          .ranks = state.ranks,
          .context = state.context});
  if (config.lora.enabled()) {
    state.lora = add_adapters(
        state.model,
        lora_config(config.lora),
        {.seed = static_cast<std::uint64_t>(config.run.seed),
         .local_batch_size = config.training.local_batch_size,
         .part = token_part(*mesh)},
        mesh->device());
  }
  for (const models::RouterOf& of : state.model->routers()) {
    of.router->make_bias(mesh->device());
  }
  state.copy_engines = choose_copy_engines(p, config.cuda_graph, *mesh);
  const FullyShardOptions options = model_shard_options(
      config,
      model,
      state.model,
      *mesh,
      state.copy_engines,
      num_microbatches);
  state.runtime = fully_shard(*state.model, mesh, options);
  if (const Float8Choice float8(config.float8, model); float8.enabled()) {
    state.float8 = float8.effect_on(*state.runtime);
  }
  state.optimizer = make_optimizer(
      config.optimizer,
      state.runtime->groups(),
      models::hf_entries_of(model),
      options.runtime.streams);
  if (config.optimizer.stochastic_rounding) {
    state.optimizer->set_stochastic_rounding(
        static_cast<std::uint64_t>(config.run.seed));
  }
  if (config.optimizer.overlap) {
    state.optimizer->set_stream(
        make_stream(mesh->device(), "optimizer", options.runtime.streams));
  }
  if (p.memory_budget > 0) {
    state.num_kept_units = spend_memory_budget(p, *mesh, state);
  }
  return state;
}

}  // namespace flatshard
