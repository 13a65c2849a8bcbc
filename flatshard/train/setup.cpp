#include "flatshard/train/setup.h"

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/models/flops.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/sgd.h"
#include "flatshard/peer/peer_memory.h"
#include "flatshard/train/metrics.h"
#include "flatshard/train/option_errors.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace flatshard {
namespace {

template <class T, class U>
void override_with(T& value, const std::optional<U>& key) {
  if (key) {
    value = static_cast<T>(*key);
  }
}

GradScaling parse_scaling(const std::string& name) {
  if (name == "pre_scaled_sum") {
    return GradScaling::pre_scaled;
  }
  FLATSHARD_CHECK(
      name == "mean" || name == "per_token",
      config,
      "precision.scaling: expected mean, pre_scaled_sum or per_token, got "
      "'{}'",
      name);
  return name == "mean" ? GradScaling::mean : GradScaling::sum;
}

CopyEngines parse_copy_engines(const std::string& name) {
  if (name == "forward") {
    return {.gathers = CopyEngines::Gathers::forward};
  }
  if (name == "all") {
    return CopyEngines::all();
  }
  FLATSHARD_CHECK(
      name == "none",
      config,
      "parallelism.copy_engines: expected auto, none, forward or all, got "
      "'{}'",
      name);
  return {};
}

}  // namespace

models::ModelConfig model_config(const Config& config) {
  const Config::Model& m = config.model;
  FLATSHARD_CHECK(
      m.family == "llama",
      config,
      "model.family: expected llama, got '{}'",
      m.family);
  models::ModelConfig model;
  FLATSHARD_CHECK(
      m.preset.empty() || m.hf_config.empty(),
      config,
      "expected one of model.preset and model.hf_config, got both");
  if (!m.preset.empty()) {
    model =
        for_option("model.preset", [&] { return models::preset(m.preset); });
  } else if (!m.hf_config.empty()) {
    model = for_option("model.hf_config", [&] {
      return models::from_hf_json(m.hf_config);
    });
  } else if (!m.init_from.empty() && !m.dim) {
    model = for_option("model.init_from", [&] {
      return models::from_hf_json(
          std::filesystem::path(m.init_from) / "config.json");
    });
  } else {
    FLATSHARD_CHECK(
        m.dim && m.layers && m.heads && m.ffn_dim && m.vocab_size,
        config,
        "expected model.preset, model.hf_config, or all of model.dim, "
        "model.layers, model.heads, model.ffn_dim and model.vocab_size");
    model.kv_heads = *m.heads;
    model.head_dim = 0;
    model.max_seq_len = config.training.seq_len;
  }
  override_with(model.dim, m.dim);
  override_with(model.layers, m.layers);
  override_with(model.heads, m.heads);
  override_with(model.kv_heads, m.kv_heads);
  override_with(model.head_dim, m.head_dim);
  override_with(model.ffn_dim, m.ffn_dim);
  override_with(model.vocab_size, m.vocab_size);
  override_with(model.max_seq_len, m.max_seq_len);
  override_with(model.rope_theta, m.rope_theta);
  override_with(model.norm_eps, m.norm_eps);
  override_with(model.tie_embeddings, m.tie_embeddings);
  model.validate();
  FLATSHARD_CHECK(
      config.training.seq_len <= model.max_seq_len,
      config,
      "training.seq_len: expected at most model.max_seq_len = {}, got {}",
      model.max_seq_len,
      config.training.seq_len);
  return model;
}

std::string tokenizer_corpus(const Config& config) {
  for (const data::SourceChoice& choice : config.data.train) {
    if (!choice.is_random()) {
      return choice.path;
    }
  }
  return {};
}

at::ScalarType parse_dtype(const std::string& name, const std::string& key) {
  if (name == "float32") {
    return at::kFloat;
  }
  if (name == "float16") {
    return at::kHalf;
  }
  FLATSHARD_CHECK(
      name == "bfloat16",
      config,
      "{}: expected float32, bfloat16 or float16, got '{}'",
      key,
      name);
  return at::kBFloat16;
}

std::string strategy_name(const Config& config) {
  const std::string& name = config.parallelism.strategy;
  if (config.parallelism.data_parallel_replicate_degree == 1) {
    return name;
  }
  const StrategyName& row = find_strategy_name(name);
  return std::string(row.needs_outer_axis() ? row.name : row.with_replicas);
}

std::vector<MeshAxis> mesh_axes(const Config& config) {
  const auto& p = config.parallelism;
  if (p.data_parallel_replicate_degree == 1) {
    return {{"dp", p.data_parallel_shard_degree}};
  }
  return {
      {"replicate", p.data_parallel_replicate_degree},
      {"shard", p.data_parallel_shard_degree}};
}

std::string choose_copy_engines(const Config& config, Mesh& mesh) {
  const Config::Parallelism& p = config.parallelism;
  if (p.copy_engines != "auto") {
    return p.copy_engines;
  }
  // Reductions alone gain nothing, so not where weights are not gathered.
  const Strategy strategy =
      Strategy::named(strategy_name(config), mesh.num_axes());
  const bool gathers =
      p.keep_compute_weights &&
      std::ranges::any_of(strategy.parameter, &Placement::is_shard);
  return gathers && PeerMemory::has_fast_links(mesh.world()) ? "all" : "none";
}

FullyShardOptions shard_options(
    const Config& config,
    const std::string& copy_engines) {
  const Config::Precision& p = config.precision;
  FullyShardOptions options;
  options.strategy = strategy_name(config);
  options.group.precision = {
      .compute = parse_dtype(p.compute, "precision.compute"),
      .reduce = parse_dtype(p.reduce, "precision.reduce"),
      .main_params = parse_dtype(p.main_params, "precision.main_params"),
      .main_grads = parse_dtype(p.main_grads, "precision.main_grads")};
  options.group.scaling = parse_scaling(p.scaling);
  options.runtime.prefetch = static_cast<int>(config.parallelism.prefetch);
  options.runtime.reshard_after_forward =
      config.parallelism.reshard_after_forward;
  options.group.keep_compute_weights = config.parallelism.keep_compute_weights;
  options.runtime.copy_engines = parse_copy_engines(copy_engines);
  options.granularity = Granularity::parse(config.parallelism.granularity);
  options.group.layout.max_padding = config.parallelism.max_padding;
  options.seed = static_cast<std::uint64_t>(config.run.seed);
  options.runtime.streams.delay_seed =
      static_cast<std::uint64_t>(config.debug.comm_delay_seed);
  options.runtime.streams.max_delay_us =
      static_cast<int>(config.debug.comm_delay_us);
  options.runtime.graphs = {
      .enabled = config.cuda_graph.impl == "unit",
      .regions = graph_regions(config),
      .warmup_steps = static_cast<int>(config.cuda_graph.warmup_steps),
      .miss_is_error = config.cuda_graph.on_miss == "error"};
  options.runtime.debug = {
      .poison = config.diagnostics.poison,
      .strict = config.diagnostics.strict};
  return options;
}

std::unique_ptr<Optimizer> make_optimizer(
    const Config& config,
    const std::vector<ParamGroup*>& groups) {
  const Config::Optimizer& o = config.optimizer;
  if (o.name == "sgd") {
    return std::make_unique<Sgd>(
        groups,
        SgdOptions{.momentum = o.momentum, .weight_decay = o.weight_decay});
  }
  FLATSHARD_CHECK(
      o.name == "adamw",
      config,
      "optimizer.name: expected adamw or sgd, got '{}'",
      o.name);
  return std::make_unique<AdamW>(
      groups,
      AdamWOptions{
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay});
}

LrSchedule lr_schedule(const Config& config) {
  LrSchedule schedule{
      .kind = LrSchedule::parse_kind(config.lr_scheduler.name),
      .base_lr = config.optimizer.lr,
      .total_steps = config.training.steps,
      .warmup_steps = config.lr_scheduler.warmup_steps,
      .decay_ratio = config.lr_scheduler.decay_ratio,
      .min_lr_factor = config.lr_scheduler.min_lr_factor};
  schedule.validate();
  return schedule;
}

std::int64_t least_memory(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t world) {
  const auto size = [](const std::string& dtype, const char* key) {
    return static_cast<std::int64_t>(c10::elementSize(parse_dtype(dtype, key)));
  };
  const Config::Precision& p = config.precision;
  const Config::Optimizer& o = config.optimizer;
  const std::int64_t gradient = std::min(
      size(p.reduce, "precision.reduce"),
      size(p.main_grads, "precision.main_grads"));
  const std::int64_t states = o.name == "adamw" ? 2 : o.momentum > 0 ? 1 : 0;
  const std::int64_t each = size(p.main_params, "precision.main_params") +
                            gradient +
                            states * static_cast<std::int64_t>(sizeof(float));
  const std::string_view strategy =
      find_strategy_name(config.parallelism.strategy).name;
  std::int64_t shards = world;
  if (strategy == "zero0") {
    shards = 1;
  } else if (strategy != "hfsdp") {
    shards /= std::max<std::int64_t>(
        1,
        config.parallelism.data_parallel_replicate_degree);
  }
  return models::num_parameters(model) * each / shards;
}

void check_memory(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t world,
    at::Device device) {
  const std::int64_t capacity = memory_stats(device).capacity_bytes;
  const std::int64_t needed = least_memory(config, model, world);
  FLATSHARD_CHECK(
      capacity <= 0 || needed <= capacity,
      memory,
      "a model of {} parameters needs at least {:.1f} GiB on each of {} ranks "
      "for weights, gradients and optimizer state, and this device has {:.1f} "
      "GiB; lower the sizes in [model], use more ranks, or a "
      "parallelism.strategy that shards more",
      with_commas(models::num_parameters(model)),
      static_cast<double>(needed) / kGiB,
      world,
      static_cast<double>(capacity) / kGiB);
}

at::Device choose_device(const std::string& name, const RankEnvironment& env) {
  const int gpus = name == "cpu" ? 0 : num_cuda_devices();
  if (name == "cpu" || (name == "auto" && gpus == 0)) {
    return at::kCPU;
  }
  FLATSHARD_CHECK(
      name == "auto" || name == "cuda",
      config,
      "--device: expected auto, cpu or cuda, got '{}'",
      name);
  FLATSHARD_CHECK(
      env.local_rank < gpus,
      config,
      "expected a GPU for local rank {}, got {} GPUs; start fewer ranks or use "
      "--device cpu",
      env.local_rank,
      gpus);
  return {at::kCUDA, static_cast<c10::DeviceIndex>(env.local_rank)};
}

}  // namespace flatshard
