#include "flatshard/train/plan/planned_run.h"

#include "flatshard/buffer/peer_mesh.h"
#include "flatshard/context_parallel/peer_context_parallel.h"
#include "flatshard/core/error.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/layout/padding.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/peer/copy_reducer.h"
#include "flatshard/schedule/keep_units.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"
#include "flatshard/tensor_parallel/peer_tensor_parallel.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/plan/model_work.h"
#include "flatshard/train/plan/planned_send.h"
#include "flatshard/train/plan/planned_units.h"
#include "flatshard/train/plan/planned_updates.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/train_state.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <ranges>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

CopyEngines copy_engines_on(
    const PlannedHost& host,
    const Config& config,
    std::int64_t ranks) {
  const auto& chosen = config.parallelism.copy_engines;
  const bool one_host = ranks <= host.ranks;
  FLATSHARD_CHECK(
      !chosen || !chosen->any() || one_host,
      config,
      "parallelism.copy_engines = {}: copies reach GPUs of one host, got {} "
      "ranks on hosts of {}; use auto or none",
      config::word_of(chosen),
      ranks,
      host.ranks);
  return copy_engines_of(config.parallelism, config.cuda_graph, [&] {
    return host.nvlink && one_host && ranks > 1;
  });
}

bool copies_activations_on(const PlannedHost& host, const Config& config) {
  const config::Parallelism& p = config.parallelism;
  const bool one_host = p.tensor_parallel_degree <= host.ranks;
  FLATSHARD_CHECK(
      !p.shares_layers() || !p.copies_activations() || one_host,
      config,
      "parallelism.tensor_parallel_comm = \"copies\": copies reach GPUs of one "
      "host, got {} ranks that share layers on hosts of {}; use \"auto\" or "
      "\"collective\"",
      p.tensor_parallel_degree,
      host.ranks);
  return copies_activations(p, config.has_plain_layers(), [&] {
    return host.nvlink && one_host;
  });
}

bool copies_heads_on(const PlannedHost& host, const Config& config) {
  const config::Parallelism& p = config.parallelism;
  const std::int64_t ranks = p.head_ranks() * config::context_rank_stride(p);
  FLATSHARD_CHECK(
      !p.copies_heads() || ranks <= host.ranks,
      config,
      "parallelism.context_parallel_comm = \"copies\": copies reach GPUs of "
      "one host, got {} ranks that share sequences on hosts of {}; use "
      "\"auto\" or \"collective\"",
      ranks,
      host.ranks);
  return p.copies_heads();
}

/// Returns the memory for reductions by copies: of each group of ranks that
/// reduces and scatters.
std::int64_t copied_gradients_nbytes(
    const std::vector<UnitShape>& units,
    std::int64_t nbytes) {
  // Sizes and strides of axes -> the ranks of a group.
  std::map<std::set<std::pair<std::int64_t, std::int64_t>>, std::int64_t>
      groups;
  for (const UnitShape& unit : units) {
    for (const GroupShape& group : unit.groups) {
      for (const std::vector<int>& axes : scattered_axes(group.strategy)) {
        std::set<std::pair<std::int64_t, std::int64_t>> over;
        std::int64_t ranks = 1;
        for (const int axis : axes) {
          if (group.mesh.sizes[axis] > 1) {
            ranks *= group.mesh.sizes[axis];
            over.insert({group.mesh.sizes[axis], group.mesh.strides[axis]});
          }
        }
        groups[over] = ranks;
      }
    }
  }
  std::int64_t sum = 0;
  for (const auto& [over, ranks] : groups) {
    sum += over.empty() ? 0 : CopyReducer::memory_nbytes(nbytes, ranks);
  }
  return sum;
}

/// Returns the layouts of all groups.
/// @param units  outlive the result.
std::vector<const FlatLayout*> layouts_of(const std::vector<UnitPlan>& units) {
  std::vector<const FlatLayout*> layouts;
  for (const UnitPlan& unit : units) {
    for (const GroupPlan& group : unit.groups) {
      layouts.push_back(group.layout.get());
    }
  }
  return layouts;
}

/// Keeps as many units unsharded as parallelism.memory_budget has room for.
void spend_memory_budget(
    const Config& config,
    const std::vector<UnitPlan>& units,
    plan::Job& job) {
  if (config.parallelism.memory_budget == 0) {
    return;
  }
  std::int64_t total = 0;
  std::int64_t slots = 0;
  for (const plan::RoleBytes& row : plan::memory_of(job, units)) {
    total += row.nbytes;
    slots += row.role == "slot pool" ? row.nbytes : 0;
  }
  std::vector<UnitSpec> specs;
  for (const UnitPlan& unit : units) {
    specs.push_back(unit.spec);
  }
  for (const UnitId unit : choose_kept_units(
           specs,
           job.scheduler,
           slots + left_of_memory_budget(config.parallelism, total))) {
    job.units[unit].policy.reshard_after_forward = false;
  }
}

/// Returns the recipes of all FP8 weights by their names.
std::map<std::string, std::string> float8_recipes(
    const std::vector<UnitShape>& units) {
  std::map<std::string, std::string> recipes;
  for (const UnitShape& unit : units) {
    for (const GroupShape& group : unit.groups) {
      if (group.float8) {
        for (const TensorSpec& tensor : group.tensors) {
          recipes.emplace(tensor.name, group.float8->recipe);
        }
      }
    }
  }
  return recipes;
}

WorkOptions work_options(const Config& config) {
  return {
      .training = config.training,
      .parallelism = config.parallelism,
      .lora = config.lora,
      .compute = config.precision.compute,
      .reduce = config.precision.reduce,
      .recompute = config.activation_checkpoint.mode,
      .recomputed_layers = config.activation_checkpoint.layers,
      .keeps_attention = config.activation_checkpoint.saves_attention(),
      .offloads = config.activation_checkpoint.offload,
      .mlp_chunk_tokens = config.activation_checkpoint.mlp_chunk_tokens,
      .loss_chunk_tokens = config.activation_checkpoint.loss_chunk_tokens};
}

/// Returns the axes of the ranks that exchange tokens.
std::vector<plan::AxisRanks> exchange_axes(const config::Parallelism& p) {
  const std::vector<std::string> names = expert_axes(p);
  std::vector<plan::AxisRanks> axes;
  std::int64_t stride = 1;
  for (const MeshAxis& axis : mesh_axes(p) | std::views::reverse) {
    if (std::ranges::count(names, axis.name) > 0) {
      axes.push_back({.size = axis.size, .stride = stride});
    }
    stride *= axis.size;
  }
  return axes;
}

std::vector<std::int64_t> offloaded_by_layer(const plan::Job& job) {
  std::vector<std::int64_t> nbytes;
  for (const int kind : job.kind_of_layer) {
    nbytes.push_back(job.layer_kinds[kind].offloaded_nbytes);
  }
  return nbytes;
}

}  // namespace

plan::Job plan_job(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t ranks,
    const PlannedHost& host,
    std::shared_ptr<PlannedModel> modules) {
  const std::int64_t tensor = config.parallelism.tensor_parallel_degree;
  const std::int64_t microbatches = config.training.global_batch_size /
                                    (config.training.local_batch_size *
                                     config.parallelism.num_data_ranks(ranks));
  plan::Job job{
      .ranks = ranks,
      .ranks_per_host = host.ranks,
      .scheduler = {.prefetch = static_cast<int>(config.parallelism.prefetch)},
      .microbatches = static_cast<int>(microbatches),
      .overlap_updates = config.optimizer.overlap,
      .clips = config.training.max_norm > 0,
      .graphs = config.cuda_graph.enabled()};
  job.tensor_ranks = tensor;
  job.copy_activations = copies_activations_on(host, config);
  job.context_ranks = config.parallelism.context_parallel_degree;
  job.context_stride = config::context_rank_stride(config.parallelism);
  job.context_hosts = config.parallelism.context_hosts();
  job.copy_heads = copies_heads_on(host, config);
  if (job.copy_heads) {
    job.other_nbytes["shared sequences"] = PeerContextParallel::windows_nbytes(
        context_window_nbytes(config, model));
  }
  if (job.copy_activations) {
    job.other_nbytes["shared layers"] = PeerTensorParallel::windows_nbytes(
        tensor_window_nbytes(config, model),
        tensor);
  }
  if (!modules) {
    modules =
        std::make_shared<PlannedModel>(config.parallelism, config.lora, model);
  }
  const std::shared_ptr<Mesh> mesh =
      planned_mesh(mesh_axes(config.parallelism));
  PlannedUnits units = planned_units(
      modules->model,
      mesh,
      model_shard_options(
          config,
          model,
          modules->model,
          *mesh,
          CopyEngines{},
          microbatches));
  job.units = std::move(units.shapes);
  job.plan_units = std::move(units.by_node);
  const models::ActivationCheckpoint recompute =
      config.activation_checkpoint.mode;
  if (const auto overlap =
          overlap_options(config.parallelism, recompute, model)) {
    job.overlap = *overlap;
    // A selective recompute runs kernels that a node's backward already has.
    job.overlap.recompute = recompute == models::ActivationCheckpoint::full;
    // The same value as in OverlapRunner.
    job.scheduler.max_grad_slots = 3;
  } else {
    job.overlap = {
        .in_flight = 1,
        .recompute = recompute == models::ActivationCheckpoint::full,
        .shared_experts = model.moe.shared_experts > 0};
    job.overlap.recomputed_layers = static_cast<int>(
        config.activation_checkpoint.layers.value_or(model.layers));
    for (std::int64_t layer = 0; layer < model.layers; ++layer) {
      job.overlap.dense.push_back(!model.has_experts(layer));
    }
  }
  add_model_work(
      work_options(config),
      model,
      float8_recipes(job.units),
      modules->adapted,
      job);
  if (config.activation_checkpoint.offload) {
    job.plan_units.kept_nbytes = offloaded_by_layer(job);
  }
  const CopyEngines copies = copy_engines_on(host, config, ranks);
  job.copy_forward_gathers = copies.gather();
  job.copy_backward_gathers = copies.gathers == CopyEngines::Gathers::all;
  job.copy_reductions = copies.reductions_nbytes > 0;
  if (job.copy_reductions) {
    job.other_nbytes["copied gradients"] =
        copied_gradients_nbytes(job.units, copies.reductions_nbytes);
  }
  const std::int64_t width = config.parallelism.expert_tensor_parallel_degree;
  const std::int64_t experts = config::expert_ranks(config.parallelism);
  if (experts > 1) {
    // Routed rows of a rank's samples, for each part of an expert.
    const std::int64_t rows =
        config.tokens_per_microbatch() * model.moe.experts_per_token;
    const std::int64_t row =
        model.dim *
        static_cast<std::int64_t>(c10::elementSize(config.precision.compute));
    job.exchange_axes = exchange_axes(config.parallelism);
    job.exchange_nbytes =
        static_cast<double>(rows * row * width) / static_cast<double>(tensor);
    job.copy_exchange =
        config.parallelism.token_exchange == config::TransferKind::copies;
    if (job.copy_exchange) {
      job.other_nbytes["token exchange"] =
          PeerExchange::windows_nbytes(exchange_window_nbytes(config, model));
    }
  }
  const std::vector<UnitPlan> plans = plan::plan_units(job);
  check_padding(layouts_of(plans), config.parallelism.max_padding);
  const StoredEntriesOf entries_of = models::hf_entries_of(model);
  if (!config.weights.send.empty()) {
    job.send_nbytes = send_nbytes(entries_of, units.descriptions, plans);
  }
  PlannedUpdates updates =
      planned_updates(config.optimizer, entries_of, units.descriptions, plans);
  job.state_nbytes = updates.state_nbytes;
  job.updates = std::move(updates.units);
  job.matrices = std::move(updates.matrices);
  job.host_state_nbytes = updates.host_state_nbytes;
  job.copied_states = std::move(updates.copied_states);
  spend_memory_budget(config, plans, job);
  return job;
}

std::int64_t offloaded_nbytes(
    const Config& config,
    const models::ModelConfig& model) {
  plan::Job job;
  std::set<std::string> adapted;
  if (config.lora.enabled()) {
    adapted = PlannedModel(config.parallelism, config.lora, model).adapted;
  }
  add_model_work(work_options(config), model, {}, adapted, job);
  const std::vector<std::int64_t> nbytes = offloaded_by_layer(job);
  return std::accumulate(nbytes.begin(), nbytes.end(), std::int64_t{0});
}

}  // namespace flatshard
