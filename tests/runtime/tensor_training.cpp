#include "tests/runtime/tensor_training.h"

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/fully_shard/context_parallel.h"
#include "flatshard/fully_shard/expert_parallel.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/fully_shard/tensor_parallel.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/graphs/step_graph.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/optim/sgd.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kTensorVocab = 61;  // no multiple of 2 or 4
constexpr std::int64_t kTensorSeq = 12;
// Its halves fit the block sizes of FP8.
constexpr const char* kWide = "wide";
// Layers that ranks cannot share: context-parallel ranks read one kv head.
constexpr const char* kMultiQuery = "multi_query";
// Longer sequences than the original ones have other frequencies.
constexpr const char* kDynamicRope = "dynamic_rope";

using TensorModels =
    std::map<std::string, std::function<void(models::ModelConfig&)>>;

const TensorModels& models_by_name() {
  static const TensorModels models{
      {"llama", [](auto&) {}},
      {"tied", [](auto& c) { c.tie_embeddings = true; }},
      {"biases",
       [](auto& c) {
         c.block.attention.qkv_bias = true;
         c.block.attention.output_bias = true;
         c.block.mlp_bias = true;
       }},
      {"head_norms",
       [](auto& c) {
         c.family = "qwen3";
         c.block.attention.qk_norm = models::QkNorm::head;
       }},
      {"projection_norms",
       [](auto& c) {
         c.family = "olmo2";
         c.block.attention.qk_norm = models::QkNorm::projection;
         c.block.norms = models::NormPlacement::after;
       }},
      {"experts",
       [](auto& c) {
         c.family = "moe";
         c.moe = {
             .num_experts = 4,
             .experts_per_token = 2,
             .ffn_dim = 8,
             .shared_experts = 1,
             .dense_layers = 1};
       }},
      {"sinks",
       [](auto& c) {
         c.family = "gpt_oss";
         c.block = models::family_defaults("gpt_oss").block;
         c.block.attention.window = 4;
         c.moe = {.num_experts = 4, .experts_per_token = 2};
       }},
      {kMultiQuery, [](auto& c) { c.kv_heads = 1; }},
      {kDynamicRope,
       [](auto& c) {
         c.rope_scaling = nn::RopeScaling{
             .type = nn::RopeType::dynamic,
             .factor = 4.0,
             .original_max_positions = 6};
       }},
      {kWide,
       [](auto& c) {
         c.dim = 128;
         c.kv_heads = c.heads;
         c.head_dim = 32;
         c.ffn_dim = 256;
         c.initializer_range = 0.05;
       }},
      {"gemma", [](auto& c) {
         c.family = "gemma2";
         c.tie_embeddings = true;
         c.scale_embeddings = true;
         c.final_soft_cap = 5.0;
         c.block.norms = models::NormPlacement::both;
         c.block.norms_add_one = true;
         c.block.activation = nn::GateActivation::gelu_tanh;
         c.block.attention.soft_cap = 10.0;
         c.block.attention.window = 4;
         c.block.attention.window_pattern = {true, false};
       }}};
  return models;
}

models::ModelConfig tensor_config(const std::string& model) {
  models::ModelConfig config{
      .dim = 16,
      .layers = 2,
      .heads = 8,
      .kv_heads = 4,
      .head_dim = 4,
      .ffn_dim = 24,
      .vocab_size = kTensorVocab,
      .max_seq_len = kTensorSeq,
      .rope_theta = 1000.0,
      .initializer_range = 0.2};
  models_by_name().at(model)(config);
  return config;
}

models::MoeOptions moe_options_of(const TensorRun& run) {
  return run.model == "experts"
             ? models::
                   MoeOptions{.aux_loss = 0.1, .z_loss = 0.01, .capacity_factor = run.capacity_factor}
             : models::MoeOptions{};
}

/// This rank's part of the experts.
struct OwnExperts {
  models::MoeOptions options;
  std::function<ParameterPlacement(const std::string& name)> placement;
};

OwnExperts own_experts(const TensorRun& run, Mesh& mesh) {
  OwnExperts own{.options = moe_options_of(run)};
  if (!run.shares_experts()) {
    return own;
  }
  const auto indices = [&](const std::vector<std::string>& names) {
    std::vector<int> found;
    for (const std::string& name : names) {
      found.push_back(mesh.axis_index(name));
    }
    return found;
  };
  std::vector<std::string> axes = run.division_axes();
  std::ranges::copy(run.width_axes(), std::back_inserter(axes));
  const models::ModelConfig config = tensor_config(run.model);
  own.options.exchange = std::make_shared<CollectiveExchange>(
      mesh.communicator(indices(axes), Purpose::exchange).shared_from_this(),
      config.moe.num_experts,
      ExchangeOptions{.ranks_per_expert = run.etp});
  own.options.local_experts = config.moe.num_experts / run.ep;
  own.options.local_ffn_dim = config.moe.ffn_dim / run.etp;
  const ExpertPart part{
      .rank = mesh.group_index(indices(run.division_axes())),
      .ranks = run.ep,
      .width_rank = mesh.group_index(indices(run.width_axes())),
      .width_ranks = run.etp};
  own.placement = [&mesh, axes, part](const std::string& name) {
    return expert_placement(mesh, axes, expert_slice(name, part));
  };
  return own;
}

struct Sequences {
  at::Tensor tokens;
  at::Tensor targets;
};

// One target in five is ignored, or all but one.
Sequences sequences_of(const TensorRun& run, int step, int index) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(
      static_cast<std::uint64_t>(1000 * step + index));
  const std::vector<std::int64_t> shape{run.batch, kTensorSeq};
  Sequences made{
      at::randint(kTensorVocab, shape, generator, at::kLong),
      at::randint(kTensorVocab, shape, generator, at::kLong)};
  at::Tensor ignored = at::randint(5, shape, generator, at::kLong).eq(0);
  if (run.one_target) {
    ignored.fill_(true).view({-1})[run.batch * kTensorSeq - 2] = false;
  }
  made.targets.masked_fill_(ignored, nn::LossOptions{}.ignore_index);
  return made;
}

nn::Documents documents_of(const TensorRun& run, at::Device device) {
  if (!run.documents) {
    return {};
  }
  std::vector<std::int64_t> lengths;
  for (int row = 0; row < run.batch; ++row) {
    const std::int64_t first = 7 - 2 * row;
    lengths.insert(lengths.end(), {first, 1, kTensorSeq - first - 1});
  }
  return nn::Documents::of(lengths, kTensorSeq, device);
}

at::Tensor count_targets(const at::Tensor& targets) {
  return targets.ne(nn::LossOptions{}.ignore_index).sum().to(at::kDouble);
}

}  // namespace

std::vector<std::string> tensor_models() {
  std::vector<std::string> names;
  for (const auto& [name, change] : models_by_name()) {
    if (name != kWide && name != kMultiQuery && name != kDynamicRope) {
      names.push_back(name);
    }
  }
  return names;
}

std::vector<MeshAxis> TensorRun::axes() const {
  std::vector<MeshAxis> axes;
  if (replicate > 1) {
    axes.push_back({"replicate", replicate});
  }
  const int etp_of_data = etp == 1 ? 1 : etp / tp;
  const int ep_of_data = experts_span_tokens() ? ep / cp : ep;
  axes.push_back({"dp", dp / ep_of_data / etp_of_data});
  if (ep_of_data > 1) {
    axes.push_back({"ep", ep_of_data});
  }
  if (etp_of_data > 1 && !experts_span_tokens()) {
    axes.push_back({"etp", etp_of_data});
  }
  if (cp > 1) {
    if (hosts > 1) {
      axes.push_back({"cp_hosts", hosts, AxisRole::sequence});
    }
    axes.push_back({"cp", cp / hosts, AxisRole::sequence});
  }
  if (etp_of_data > 1 && experts_span_tokens()) {
    axes.push_back({"etp", etp_of_data});
  }
  if (tp > 1) {
    axes.push_back({"tp", tp, AxisRole::model});
  }
  return axes;
}

std::vector<std::string> TensorRun::division_axes() const {
  std::vector<std::string> axes;
  if (ep > (experts_span_tokens() ? cp : 1)) {
    axes.emplace_back("ep");
  }
  if (experts_span_tokens()) {
    if (hosts > 1) {
      axes.emplace_back("cp_hosts");
    }
    axes.emplace_back("cp");
  }
  return axes;
}

std::vector<std::string> TensorRun::width_axes() const {
  std::vector<std::string> axes;
  if (etp > tp) {
    axes.emplace_back("etp");
  }
  if (etp > 1 && tp > 1) {
    axes.emplace_back("tp");
  }
  return axes;
}

std::string TensorRun::name() const {
  constexpr const char* kRecompute[] = {"none", "full", "selective"};
  return fmt::format(
      "{}_{}_r{}_dp{}_cp{}x{}_tp{}_ep{}_etp{}_m{}_{}{}{}{}_mlp{}_chunk{}{}{}{}",
      model,
      strategy,
      replicate,
      dp,
      hosts,
      cp / hosts,
      tp,
      ep,
      etp,
      microbatches,
      kRecompute[static_cast<int>(checkpoint)],
      checkpointed_layers ? fmt::format("_of_{}", *checkpointed_layers) : "",
      keep_attention ? "_keep" : "",
      offload ? "_offload" : "",
      mlp_chunk_tokens,
      chunk_tokens,
      copies ? "_copies" : "",
      documents ? "_documents" : "",
      one_target ? "_one_target" : "");
}

void train_tensor_rank(
    const TensorRun& run,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    TensorResult& result) {
  const StreamOptions streams{
      .delay_seed = run.delay_seed + static_cast<std::uint64_t>(mesh->rank()),
      .max_delay_us = 50};
  const nn::TensorParallelPtr ranks =
      run.tp > 1 ? make_tensor_parallel(
                       *mesh,
                       "tp",
                       {.copies = run.copies, .stream = streams})
                 : nullptr;
  const nn::ContextParallelPtr context =
      run.cp > 1 ? make_context_parallel(
                       *mesh,
                       "cp",
                       {.hosts = run.hosts > 1 ? "cp_hosts" : "",
                        .copies = run.copies,
                        .stream = streams})
                 : nullptr;
  const OwnExperts experts = own_experts(run, *mesh);
  models::Llama llama(
      tensor_config(run.model),
      models::LlamaOptions{
          .activation_checkpoint = run.checkpoint,
          .checkpointed_layers = run.checkpointed_layers,
          .keep_attention = run.keep_attention,
          .mlp_chunk_tokens = run.mlp_chunk_tokens,
          .plain_attention = true,  // on GPUs; soft caps have no kernel
          .loss = {.chunk_tokens = run.chunk_tokens},
          .moe = experts.options,
          .ranks = ranks,
          .context = context});
  FullyShardOptions options{
      .strategy = run.strategy,
      .seed = 11,
      .group =
          {.precision = run.precision,
           .post_forward_ranks = run.post_forward_ranks},
      .runtime = {
          .offload_activations = run.offload,
          .streams = streams,
          .graphs = {
              .enabled = run.has_graphs(),
              .whole_step = run.step_graph,
              .regions =
                  run.step_graph ? GraphOptions().regions : run.graph_regions,
              .warmup_steps = TensorRun::kWarmupSteps,
              .emulate_on_cpu = true}}};
  if (ranks) {
    options.placement_of = placement_of_parts(*llama, *mesh);
  }
  if (run.shares_experts()) {
    options.placement_of =
        [experts, others = options.placement_of](const std::string& name) {
          return models::is_expert_parameter(name) ? experts.placement(name)
                 : others                          ? others(name)
                                                   : ParameterPlacement{};
        };
  }
  if (run.float8) {
    options.float8_of = [&run](
                            const std::string& /*name*/,
                            const std::vector<std::int64_t>& shape) {
      return run.float8->why_not(shape).empty() ? run.float8 : std::nullopt;
    };
  }
  for (const auto& unit : llama->unit_modules()) {
    options.units.push_back(unit.get());
  }
  const auto runtime = fully_shard(*llama, mesh, options);
  Sgd optimizer(runtime->groups(), SgdOptions{});
  const int data_rank = mesh->data_mesh()->rank();
  const auto index_of = [&](int m) { return data_rank * run.microbatches + m; };
  const nn::Documents documents = documents_of(run, mesh->device());
  const auto own = [&](const at::Tensor& x) {
    return nn::own_rows(context, x.view({-1})).view({run.batch, -1});
  };
  // Tokens, targets and loss factor of each microbatch -> their losses.
  int step = 0;
  const auto work = [&](const nn::TensorList& in) {
    nn::TensorList losses;
    for (int m = 0; m < run.microbatches; ++m) {
      runtime->set_is_last_microbatch(m == run.microbatches - 1);
      const at::Tensor loss =
          llama(in[3 * m], in[3 * m + 1], documents, in[3 * m + 2]);
      if (run.before_backward && m == 0) {
        run.before_backward(*mesh, step);
      }
      (loss / run.microbatches).backward();
      losses.push_back(loss.detach());
    }
    return losses;
  };
  std::optional<StepGraph> graph;
  if (run.step_graph) {
    graph.emplace(runtime, work);
  }
  for (; step < run.steps; ++step) {
    runtime->set_step(step);
    nn::TensorList in;
    for (int m = 0; m < run.microbatches; ++m) {
      const Sequences made = sequences_of(run, step, index_of(m));
      const at::Tensor targets = own(made.targets);
      in.push_back(own(made.tokens).to(mesh->device()));
      in.push_back(targets.to(mesh->device()));
      // Gradients are means over the ranks that share a microbatch, too.
      in.push_back(
          (count_targets(targets) * run.cp / count_targets(made.targets))
              .to(mesh->device(), at::kFloat));
    }
    const nn::TensorList losses = graph ? graph->run(in) : work(in);
    for (int m = 0; m < run.microbatches; ++m) {
      if (context) {
        std::vector<int> axes{mesh->axis_index("cp")};
        if (run.hosts > 1) {
          axes.insert(axes.begin(), mesh->axis_index("cp_hosts"));
        }
        mesh->communicator(axes, Purpose::reduce)
            .all_reduce(losses[m], ReduceOp::avg);
      }
      const auto value = losses[m].item<double>();
      const std::lock_guard lock(mutex);
      const auto [found, is_new] =
          result.losses.insert({{step, index_of(m)}, value});
      if (!is_new && found->second != value) {
        found->second = std::numeric_limits<double>::quiet_NaN();
      }
    }
    const GradNorm norm = grad_norm_and_scale(runtime->groups(), run.max_norm);
    optimizer.step(1.0, norm.scale);
    optimizer.zero_grad();
    const std::lock_guard lock(mutex);
    result.norms[{step, mesh->rank()}] = norm.norm.item<double>();
  }
  optimizer.wait();
  {
    const std::lock_guard lock(mutex);
    result.graphs[mesh->rank()] =
        graph ? graph->stats() : runtime->graphs().stats();
    if (const KeptActivations* kept = runtime->executor().kept()) {
      result.host_nbytes += kept->host_nbytes();
    }
  }
  collect_weights(*runtime, mutex, result.weights);
}

TensorResult train_tensor(const TensorRun& run) {
  TensorResult result;
  std::mutex mutex;
  run_ranks(run.world(), [&](RankContext& context) {
    train_tensor_rank(run, context.mesh(run.axes()), mutex, result);
  });
  return result;
}

TensorRun tensor_reference(const TensorRun& run) {
  return {
      .model = run.model,
      .strategy = "zero0",
      .microbatches = run.data_ranks() * run.microbatches,
      .max_norm = run.max_norm,
      .batch = run.batch,
      .documents = run.documents,
      .one_target = run.one_target,
      .steps = run.steps,
      .capacity_factor = run.capacity_factor,
      .precision = run.precision,
      .float8 = run.float8};
}

TensorDistance tensor_distance(
    const TensorResult& got,
    const TensorResult& want) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  TensorDistance distance;
  const auto note = [&](double difference, const std::string& where) {
    if (!(difference <= distance.largest)) {
      distance = {std::isnan(difference) ? kNever : difference, where};
    }
  };
  if (got.losses.size() != want.losses.size() ||
      got.weights.size() != want.weights.size()) {
    note(kNever, "what there is");
  }
  for (const auto& [key, loss] : want.losses) {
    const auto found = got.losses.find(key);
    note(
        found == got.losses.end() ? kNever : std::abs(found->second - loss),
        fmt::format("the loss {} of step {}", key.second, key.first));
  }
  for (const auto& [key, norm] : got.norms) {
    const double expected = want.norms.at({key.first, 0});
    note(
        std::abs(norm - expected) / expected,
        fmt::format("the norm of step {} on rank {}", key.first, key.second));
  }
  for (const auto& [name, values] : want.weights) {
    const auto found = got.weights.find(name);
    if (found == got.weights.end() || found->second.size() != values.size()) {
      note(kNever, name);
      continue;
    }
    double scale = 1;
    for (const float value : values) {
      scale = std::max(scale, std::abs(double{value}));
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      note(
          std::abs(double{found->second[i]} - double{values[i]}) / scale,
          name);
    }
  }
  return distance;
}

double tensor_tolerance(const TensorRun& run) {
  const std::int64_t tokens =
      kTensorSeq * run.batch * run.data_ranks() * run.microbatches;
  const models::ModelConfig config = tensor_config(run.model);
  const int passes = sums_of_steps(config.layers, 1);
  // The rate is 1, so a step hands its gradient's errors to the weights, by as
  // much as clipping leaves of them.
  const double steps = 1 + (run.steps - 1) * std::min(1.0, run.max_norm);
  return sum_tolerance(
      {.addends = std::max({config.ffn_dim, kTensorVocab, tokens}),
       .in_a_row = static_cast<int>(std::ceil(passes * steps))});
}

}  // namespace flatshard::testing
