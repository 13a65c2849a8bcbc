#include "flatshard/train/setup/parallelism.h"

#include "flatshard/comm/store.h"
#include "flatshard/core/error.h"
#include "flatshard/fully_shard/expert_parallel.h"
#include "flatshard/models/moe.h"
#include "flatshard/optim/moments.h"
#include "flatshard/peer/peer_memory.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/setup/float8_choice.h"

#include <algorithm>
#include <iterator>

namespace flatshard {
namespace {

constexpr const char* kExpertAxis = "ep";
constexpr const char* kExpertTensorAxis = "etp";
constexpr const char* kContextAxis = "cp";
constexpr const char* kContextHostsAxis = "cp_hosts";
constexpr const char* kTensorAxis = "tp";

// Returns the ranks of expert_parallel_degree that read different samples.
std::int64_t expert_axis_ranks(const config::Parallelism& p) {
  return config::experts_span_sequences(p)
             ? p.expert_parallel_degree / p.context_parallel_degree
             : p.expert_parallel_degree;
}

// Axes over which experts are divided.
std::vector<std::string> division_axes(const config::Parallelism& p) {
  std::vector<std::string> axes;
  if (expert_axis_ranks(p) > 1) {
    axes.emplace_back(kExpertAxis);
  }
  if (config::experts_span_sequences(p)) {
    if (p.context_hosts() > 1) {
      axes.emplace_back(kContextHostsAxis);
    }
    axes.emplace_back(kContextAxis);
  }
  return axes;
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

std::vector<int> indices_of(
    const Mesh& mesh,
    const std::vector<std::string>& names) {
  std::vector<int> indices;
  for (const std::string& name : names) {
    indices.push_back(mesh.axis_index(name));
  }
  return indices;
}

// Without options that depend on the model: units, placements, FP8.
FullyShardOptions shard_options(
    const Config& config,
    const CopyEngines& copy_engines) {
  FullyShardOptions options;
  options.strategy = strategy_name(config.parallelism);
  options.group.precision = config.precision;
  options.group.scaling = config.precision.scaling;
  options.group.keep_compute_weights = config.parallelism.keep_compute_weights;
  options.group.post_forward_ranks = config.parallelism.post_forward_ranks;
  options.max_padding = config.parallelism.max_padding;
  options.runtime.prefetch = static_cast<int>(config.parallelism.prefetch);
  options.runtime.reshard_after_forward =
      config.parallelism.reshard_after_forward;
  options.runtime.copy_engines = copy_engines;
  options.runtime.offload_activations = config.activation_checkpoint.offload;
  options.granularity = config.parallelism.granularity;
  if (config.optimizer.needs_state_blocks()) {
    options.group.alignment = kInt8Alignment;
  }
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

}  // namespace

std::string strategy_name(const config::Parallelism& keys) {
  const config::StrategyChoice& strategy = keys.strategy;
  if (keys.data_parallel_replicate_degree == 1) {
    return std::string(strategy.name());
  }
  return std::string(
      strategy->needs_outer_axis() ? strategy->name : strategy->with_replicas);
}

std::chrono::milliseconds timeout_of(const config::Comm& keys) {
  const std::chrono::duration<double> timeout(keys.timeout_s);
  return std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
}

std::vector<MeshAxis> mesh_axes(const config::Parallelism& keys) {
  const bool has_replicas = keys.data_parallel_replicate_degree > 1;
  std::vector<MeshAxis> axes;
  if (has_replicas) {
    axes.push_back({"replicate", keys.data_parallel_replicate_degree});
  }
  const std::int64_t ranks = config::expert_data_ranks(keys);
  if (ranks == 1) {
    axes.push_back(
        {has_replicas ? "shard" : "dp", keys.data_parallel_shard_degree});
  } else {
    axes.push_back({"edp", keys.data_parallel_shard_degree / ranks});
  }
  const std::int64_t divisions = expert_axis_ranks(keys);
  if (divisions > 1) {
    axes.push_back({kExpertAxis, divisions});
  }
  if (keys.shares_sequences()) {
    if (keys.context_hosts() > 1) {
      axes.push_back(
          {kContextHostsAxis, keys.context_hosts(), AxisRole::sequence});
    }
    axes.push_back({kContextAxis, keys.head_ranks(), AxisRole::sequence});
  }
  if (ranks > divisions) {
    // Inside all axes that divide experts: see ExchangeOptions.
    const auto inside =
        config::experts_span_sequences(keys)
            ? axes.end()
            : std::ranges::find(axes, AxisRole::sequence, &MeshAxis::role);
    axes.insert(inside, {kExpertTensorAxis, ranks / divisions});
  }
  if (keys.tensor_parallel_degree > 1) {
    axes.push_back({kTensorAxis, keys.tensor_parallel_degree, AxisRole::model});
  }
  return axes;
}

std::vector<std::string> expert_axes(const config::Parallelism& keys) {
  std::vector<std::string> axes = division_axes(keys);
  std::ranges::copy(width_axes(keys), std::back_inserter(axes));
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
    const config::Parallelism& keys,
    const config::CudaGraph& graph,
    const std::function<bool()>& linked) {
  if (keys.copy_engines) {
    return *keys.copy_engines;
  }
  if (graph.whole_step()) {
    return {};
  }
  // Only copied reductions gain nothing, so require all-gathers of weights.
  const Strategy strategy = Strategy::named(
      strategy_name(keys),
      static_cast<int>(mesh_axes(keys).size()));
  const bool gathers =
      keys.keep_compute_weights &&
      std::ranges::any_of(strategy.parameter, &Placement::is_shard);
  return gathers && linked() ? CopyEngines::all() : CopyEngines{};
}

CopyEngines choose_copy_engines(
    const config::Parallelism& keys,
    const config::CudaGraph& graph,
    Mesh& mesh) {
  return copy_engines_of(keys, graph, [&] {
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
  const std::int64_t rows =
      config.tokens_per_microbatch() * model.moe.experts_per_token;
  const std::int64_t row =
      model.dim *
      static_cast<std::int64_t>(c10::elementSize(config.precision.compute));
  return rows * (row + static_cast<std::int64_t>(sizeof(float)));
}

std::shared_ptr<StreamExchange> make_exchange(
    const config::Parallelism& keys,
    TokenExchangeOptions options,
    Mesh& mesh) {
  options.copies = keys.token_exchange == config::TransferKind::copies;
  options.exchange.ranks_per_expert = keys.expert_tensor_parallel_degree;
  return make_token_exchange(
      mesh,
      indices_of(mesh, expert_axes(keys)),
      options);
}

bool copies_activations(
    const config::Parallelism& keys,
    bool plain_layers,
    const std::function<bool()>& linked) {
  if (!keys.shares_layers()) {
    return false;
  }
  if (keys.tensor_parallel_comm != config::TransferKind::automatic) {
    return keys.copies_activations();
  }
  return plain_layers && linked();
}

std::int64_t tensor_window_nbytes(
    const Config& config,
    const models::ModelConfig& model) {
  return config.tokens_per_microbatch() * model.dim *
         static_cast<std::int64_t>(c10::elementSize(config.precision.compute));
}

nn::TensorParallelPtr tensor_parallel_ranks(
    const config::Parallelism& keys,
    bool plain_layers,
    TensorParallelOptions options,
    Mesh& mesh) {
  if (!keys.shares_layers()) {
    return nullptr;
  }
  options.copies = copies_activations(keys, plain_layers, [&] {
    return PeerMemory::has_fast_links(
        mesh.communicator(mesh.axis_index(kTensorAxis), Purpose::exchange));
  });
  return make_tensor_parallel(mesh, kTensorAxis, options);
}

nn::ContextParallelPtr context_parallel_ranks(
    const config::Parallelism& keys,
    ContextParallelOptions options,
    Mesh& mesh) {
  if (!keys.shares_sequences()) {
    return nullptr;
  }
  options.copies = keys.copies_heads();
  options.hosts = keys.context_hosts() > 1 ? kContextHostsAxis : "";
  return make_context_parallel(mesh, kContextAxis, options);
}

std::int64_t context_window_nbytes(
    const Config& config,
    const models::ModelConfig& model) {
  const config::Parallelism& p = config.parallelism;
  const std::int64_t kv_heads = model.kv_heads / p.tensor_parallel_degree;
  const std::int64_t num_groups = nn::num_head_groups(kv_heads, p.head_ranks());
  // Each rank gets a head of keys and of values.
  const std::int64_t heads = model.heads / p.tensor_parallel_degree +
                             2 * std::max(kv_heads, p.head_ranks());
  return config.tokens_per_microbatch() * model.head_dim * heads / num_groups *
         static_cast<std::int64_t>(c10::elementSize(config.precision.compute));
}

std::function<ParameterPlacement(const std::string& name)> parameter_placement(
    const config::Parallelism& keys,
    models::Llama& model,
    const Mesh& mesh) {
  std::function<ParameterPlacement(const std::string& name)> of_parts;
  if (keys.shares_layers()) {
    of_parts = placement_of_parts(*model, mesh, kTensorAxis);
  }
  const std::vector<std::string> axes = expert_axes(keys);
  if (axes.empty()) {
    return of_parts;
  }
  const ExpertPart part{
      .rank = mesh.group_index(indices_of(mesh, division_axes(keys))),
      .ranks = keys.expert_parallel_degree,
      .width_rank = mesh.group_index(indices_of(mesh, width_axes(keys))),
      .width_ranks = keys.expert_tensor_parallel_degree};
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
    const config::Parallelism& keys,
    models::ActivationCheckpoint recompute,
    const models::ModelConfig& model) {
  const bool overlaps = keys.overlap_expert_parallel;
  if (!overlaps && !keys.delay_wgrad) {
    return std::nullopt;
  }
  OverlapPlanOptions options{
      .in_flight = overlaps ? static_cast<int>(keys.microbatches_in_flight) : 1,
      .delay_wgrad = keys.delay_wgrad,
      .recompute = recompute != models::ActivationCheckpoint::none,
      .shared_experts = model.moe.shared_experts > 0};
  for (std::int64_t l = 0; l < model.layers; ++l) {
    options.dense.push_back(l < model.moe.dense_layers);
  }
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
  options.placement_of = parameter_placement(config.parallelism, layers, mesh);
  Float8Choice(config.float8, model).apply_to(options);
  for (const auto& module : layers->unit_modules()) {
    options.units.push_back(module.get());
  }
  return options;
}

}  // namespace flatshard
