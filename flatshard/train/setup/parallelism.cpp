#include "flatshard/train/setup/parallelism.h"

#include "flatshard/comm/store.h"
#include "flatshard/core/error.h"
#include "flatshard/fully_shard/expert_parallel.h"
#include "flatshard/fully_shard/make_token_exchange.h"
#include "flatshard/fully_shard/tensor_parallel.h"
#include "flatshard/models/moe.h"
#include "flatshard/peer/peer_memory.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/setup/float8_choice.h"

#include <algorithm>
#include <chrono>

namespace flatshard {
namespace {

constexpr const char* kExpertAxis = "ep";
constexpr const char* kExpertTensorAxis = "etp";
constexpr const char* kTensorAxis = "tp";

bool divides_experts(const config::Parallelism& p) {
  return p.expert_parallel_degree > 1;
}

// Axes over which the width of experts is split.
std::vector<std::string> width_axes(const config::Parallelism& p) {
  std::vector<std::string> axes;
  if (p.expert_tensor_parallel_degree > p.tensor_parallel_degree) {
    axes.emplace_back(kExpertTensorAxis);
  }
  if (p.expert_tensor_parallel_degree > 1 && p.shares_layers()) {
    axes.emplace_back(kTensorAxis);
  }
  return axes;
}

// Along which ranks have other parts of the experts.
std::vector<std::string> expert_axes(const config::Parallelism& p) {
  std::vector<std::string> axes = width_axes(p);
  if (divides_experts(p)) {
    axes.insert(axes.begin(), kExpertAxis);
  }
  return axes;
}

std::vector<int> indices_of(
    const Mesh& mesh,
    const std::vector<std::string>& names) {
  std::vector<int> indices;
  for (const std::string& name : names) {
    indices.push_back(mesh.axis_index(name));
  }
  return indices;
}

std::chrono::milliseconds timeout_of(const config::Comm& comm) {
  const std::chrono::duration<double> timeout(comm.timeout_s);
  return std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
}

}  // namespace

std::string strategy_name(const Config& config) {
  const config::StrategyChoice& strategy = config.parallelism.strategy;
  if (config.parallelism.data_parallel_replicate_degree == 1) {
    return std::string(strategy.name());
  }
  return std::string(
      strategy->needs_outer_axis() ? strategy->name : strategy->with_replicas);
}

std::vector<MeshAxis> mesh_axes(const Config& config) {
  const auto& p = config.parallelism;
  const bool has_replicas = p.data_parallel_replicate_degree > 1;
  std::vector<MeshAxis> axes;
  if (has_replicas) {
    axes.push_back({"replicate", p.data_parallel_replicate_degree});
  }
  const std::int64_t ranks = config::expert_data_ranks(p);
  if (ranks == 1) {
    axes.push_back(
        {has_replicas ? "shard" : "dp", p.data_parallel_shard_degree});
  } else {
    axes.push_back({"edp", p.data_parallel_shard_degree / ranks});
  }
  if (divides_experts(p)) {
    axes.push_back({kExpertAxis, p.expert_parallel_degree});
  }
  if (ranks > p.expert_parallel_degree) {
    axes.push_back({kExpertTensorAxis, ranks / p.expert_parallel_degree});
  }
  if (p.tensor_parallel_degree > 1) {
    axes.push_back({kTensorAxis, p.tensor_parallel_degree, AxisRole::model});
  }
  return axes;
}

std::shared_ptr<Mesh> make_mesh(
    const std::vector<MeshAxis>& axes,
    const config::Comm& comm,
    const RankEnvironment& env,
    at::Device device,
    OnStuckAbort on_stuck_abort) {
  if (env.world_size == 1) {
    return Mesh::single(device);
  }
  MeshOptions options;
  options.communicator.timeout = timeout_of(comm);
  options.watcher = comm.watcher;
  options.launcher_serves_store = env.launcher_serves_store;
  options.on_stuck_abort = std::move(on_stuck_abort);
  return Mesh::create(axes, env.rank, make_tcp_store(env), device, options);
}

CopyEngines copy_engines_of(
    const Config& config,
    const std::function<bool()>& linked) {
  const config::Parallelism& p = config.parallelism;
  if (p.copy_engines) {
    return *p.copy_engines;
  }
  if (config.cuda_graph.whole_step()) {
    return {};
  }
  // Only copied reductions gain nothing, so require all-gathers of weights.
  const Strategy strategy = Strategy::named(
      strategy_name(config),
      static_cast<int>(mesh_axes(config).size()));
  const bool gathers =
      p.keep_compute_weights &&
      std::ranges::any_of(strategy.parameter, &Placement::is_shard);
  return gathers && linked() ? CopyEngines::all() : CopyEngines{};
}

CopyEngines choose_copy_engines(const Config& config, Mesh& mesh) {
  return copy_engines_of(config, [&] {
    return PeerMemory::has_fast_links(mesh.world());
  });
}

StreamOptions comm_streams(const config::Debug& keys) {
  return {
      .delay_seed = static_cast<std::uint64_t>(keys.comm_delay_seed),
      .max_delay_us = static_cast<int>(keys.comm_delay_us)};
}

std::int64_t exchange_window_nbytes(
    const Config& config,
    const models::ModelConfig& model) {
  const std::int64_t rows = config.training.local_batch_size *
                            config.training.seq_len *
                            model.moe.experts_per_token;
  const std::int64_t row =
      model.dim *
      static_cast<std::int64_t>(c10::elementSize(config.precision.compute));
  return rows * (row + static_cast<std::int64_t>(sizeof(float)));
}

std::shared_ptr<StreamExchange> make_exchange(
    const Config& config,
    const models::ModelConfig& model,
    Mesh& mesh) {
  const config::Parallelism& p = config.parallelism;
  return make_token_exchange(
      mesh,
      indices_of(mesh, expert_axes(p)),
      {.num_experts = model.moe.num_experts,
       .copies = p.token_exchange == config::TransferKind::copies,
       .window_nbytes = exchange_window_nbytes(config, model),
       .timeout = timeout_of(config.comm),
       .exchange = {
           .groups_by_rank = config.debug.deterministic,
           .ranks_per_expert = p.expert_tensor_parallel_degree,
           .stream = comm_streams(config.debug)}});
}

bool copies_activations(
    const Config& config,
    const std::function<bool()>& linked) {
  const config::Parallelism& p = config.parallelism;
  if (!p.shares_layers()) {
    return false;
  }
  if (p.tensor_parallel_comm != config::TransferKind::automatic) {
    return p.copies_activations();
  }
  return !config.cuda_graph.enabled() && !config.float8.recipe &&
         !config.lora.enabled() && linked();
}

std::int64_t tensor_window_nbytes(
    const Config& config,
    const models::ModelConfig& model) {
  return config.training.local_batch_size * config.training.seq_len *
         model.dim *
         static_cast<std::int64_t>(c10::elementSize(config.precision.compute));
}

nn::TensorParallelPtr tensor_parallel_ranks(
    const Config& config,
    const models::ModelConfig& model,
    Mesh& mesh) {
  if (!config.parallelism.shares_layers()) {
    return nullptr;
  }
  const bool copies = copies_activations(config, [&] {
    return PeerMemory::has_fast_links(
        mesh.communicator(mesh.axis_index(kTensorAxis), Purpose::exchange));
  });
  return make_tensor_parallel(
      mesh,
      kTensorAxis,
      {.copies = copies,
       .window_nbytes = tensor_window_nbytes(config, model),
       .stream = comm_streams(config.debug)});
}

std::function<ParameterPlacement(const std::string& name)> parameter_placement(
    const Config& config,
    models::Llama& model,
    const Mesh& mesh) {
  const config::Parallelism& p = config.parallelism;
  std::function<ParameterPlacement(const std::string& name)> of_parts;
  if (p.shares_layers()) {
    of_parts = placement_of_parts(*model, mesh, kTensorAxis);
  }
  const std::vector<std::string> axes = expert_axes(p);
  if (axes.empty()) {
    return of_parts;
  }
  const ExpertPart part{
      .rank = divides_experts(p) ? mesh.coordinate(kExpertAxis) : 0,
      .ranks = p.expert_parallel_degree,
      .width_rank = mesh.group_index(indices_of(mesh, width_axes(p))),
      .width_ranks = p.expert_tensor_parallel_degree};
  const auto of_experts = [&](const char* name) {
    return expert_placement(mesh, axes, expert_slice(name, part));
  };
  return [of_parts,
          gate_up = of_experts("gate_up_proj"),
          down = of_experts("down_proj")](const std::string& name) {
    return models::is_expert_parameter(name)
               ? (name.ends_with("down_proj") ? down : gate_up)
           : of_parts ? of_parts(name)
                      : ParameterPlacement{};
  };
}

std::optional<OverlapPlanOptions> overlap_options(
    const Config& config,
    const models::ModelConfig& model) {
  const bool overlaps = config.parallelism.overlap_expert_parallel;
  if (!overlaps && !config.parallelism.delay_wgrad) {
    return std::nullopt;
  }
  OverlapPlanOptions options{
      .in_flight =
          overlaps ? static_cast<int>(config.parallelism.microbatches_in_flight)
                   : 1,
      .delay_wgrad = config.parallelism.delay_wgrad,
      .recompute = config.activation_checkpoint.mode !=
                   models::ActivationCheckpoint::none,
      .shared_experts = model.moe.shared_experts > 0};
  for (std::int64_t l = 0; l < model.layers; ++l) {
    options.dense.push_back(l < model.moe.dense_layers);
  }
  return options;
}

FullyShardOptions shard_options(
    const Config& config,
    const CopyEngines& copy_engines) {
  FullyShardOptions options;
  options.strategy = strategy_name(config);
  options.group.precision = config.precision;
  options.group.scaling = config.precision.scaling;
  options.group.keep_compute_weights = config.parallelism.keep_compute_weights;
  options.group.post_forward_ranks = config.parallelism.post_forward_ranks;
  options.max_padding = config.parallelism.max_padding;
  options.runtime.prefetch = static_cast<int>(config.parallelism.prefetch);
  options.runtime.reshard_after_forward =
      config.parallelism.reshard_after_forward;
  options.runtime.copy_engines = copy_engines;
  options.granularity = config.parallelism.granularity;
  options.seed = static_cast<std::uint64_t>(config.run.seed);
  options.runtime.streams = comm_streams(config.debug);
  options.runtime.graphs = {
      .enabled = config.cuda_graph.enabled(),
      .whole_step = config.cuda_graph.whole_step(),
      .regions = graph_regions(config),
      .warmup_steps = static_cast<int>(config.cuda_graph.warmup_steps),
      .miss_is_error = config.cuda_graph.on_miss == config::OnGraphMiss::error,
      .emulate_on_cpu = config.debug.emulate_graphs};
  options.runtime.debug = {
      .poison = config.diagnostics.poison,
      .strict = config.diagnostics.strict};
  return options;
}

FullyShardOptions model_shard_options(
    const Config& config,
    const models::ModelConfig& model,
    models::Llama& layers,
    const Mesh& mesh,
    const CopyEngines& copy_engines,
    std::int64_t num_microbatches) {
  FullyShardOptions options = shard_options(config, copy_engines);
  options.group.grads_in_reduce_dtype = num_microbatches == 1;
  options.placement_of = parameter_placement(config, layers, mesh);
  Float8Choice(config, model).apply_to(options);
  for (const auto& module : layers->unit_modules()) {
    options.units.push_back(module.get());
  }
  return options;
}

}  // namespace flatshard
