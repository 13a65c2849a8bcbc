#include "tests/overlap/overlap_moe.h"
#include "flatshard/graphs/model_graphs.h"

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/peer/page_communicator.h"
#include "flatshard/peer/peer_communicator.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kVocab = 64;
constexpr std::int64_t kDim = 32;
constexpr std::int64_t kExperts = 8;
constexpr std::int64_t kExpertsPerToken = 2;

}  // namespace

std::vector<MeshAxis> MoeOverlapCase::axes() const {
  std::vector<MeshAxis> all;
  if (has_outer()) {
    all.push_back({"outer", 2});
  }
  all.push_back({"edp", edp});
  if (ep > 1 || exchanges_alone) {
    all.push_back({"ep", ep});
  }
  return all;
}

std::string MoeOverlapCase::name() const {
  return fmt::format(
      "{}_edp{}_ep{}{}_m{}{}{}{}",
      strategy,
      edp,
      ep,
      copies ? "_copies" : "",
      microbatches,
      options.delay_wgrad ? "_late" : "",
      options.recompute ? "_recompute" : "",
      options.shared_experts ? "_shared" : "");
}

MoeOverlapTrainer::MoeOverlapTrainer(
    const MoeOverlapCase& options,
    const std::shared_ptr<Mesh>& mesh)
    : options_(options), mesh_(mesh) {
  const StreamOptions streams{
      .delay_seed = 3 + static_cast<std::uint64_t>(mesh->rank()),
      .max_delay_us = options.max_delay_us};
  if (options.ep > 1 || options.exchanges_alone) {
    make_exchange(streams);
  }
  // The runner splits blocks at exchanges, even if there are no other ranks.
  std::shared_ptr<nn::TokenExchange> of_layers = exchange;
  if (!exchange && options.with_runner) {
    of_layers =
        options.local ? options.local : std::make_shared<nn::LocalExchange>();
  }
  models::ModelConfig shape{
      .family = "moe",
      .dim = kDim,
      .layers = options.layers,
      .heads = 4,
      .kv_heads = 2,
      .ffn_dim = 64,
      .vocab_size = kVocab,
      .max_seq_len = options.tokens,
      .block = {.attention = {.qk_norm = models::QkNorm::head}},
      .moe = {
          .num_experts = kExperts,
          .experts_per_token = kExpertsPerToken,
          .ffn_dim = 32,
          .shared_experts = options.options.shared_experts ? 1 : 0,
          .dense_layers = options.dense_layers}};
  if (options.change_model) {
    options.change_model(shape);
  }
  llama = models::Llama(
      shape,
      models::LlamaOptions{
          .activation_checkpoint = options.selective
                                       ? models::ActivationCheckpoint::selective
                                       : models::ActivationCheckpoint::none,
          .moe = {
              .aux_loss = 0.01,
              .z_loss = 0.001,
              .exchange = of_layers,
              .local_experts = kExperts / options.ep}});
  FullyShardOptions sharding{.strategy = options.strategy, .seed = 11};
  sharding.runtime.streams = streams;
  sharding.runtime.trace = true;
  if (!options.regions.empty()) {
    sharding.runtime.graphs = {
        .enabled = true,
        .regions = options.regions,
        .warmup_steps = MoeOverlapCase::kWarmupSteps,
        .emulate_on_cpu = mesh->device().is_cpu()};
  }
  if (exchange) {
    sharding.placement_of =
        [placement = ParameterPlacement::along(*mesh, "ep", kExperts)](
            const std::string& name) {
          return models::is_expert_parameter(name) ? placement
                                                   : ParameterPlacement{};
        };
  }
  if (options.change) {
    options.change(sharding);
  }
  const auto modules = llama->unit_modules();
  for (const auto& module : modules) {
    sharding.units.push_back(module.get());
  }
  runtime = fully_shard(*llama, mesh, sharding);
  optimizer_ = std::make_unique<AdamW>(runtime->groups(), AdamWOptions{});
  if (!options.with_runner) {
    return;
  }
  OverlapModel pieces{
      .root = runtime->unit_of(*llama),
      .ends =
          PlanUnits::Ends{
              .embed = runtime->unit_of(*modules.front()),
              .head = runtime->unit_of(*modules.back())},
      .embed = [this](int m) { return llama->embed(tokens(m)); },
      .nodes = [this](int /*m*/, int l) { return llama->blocks()[l]->nodes(); },
      .head =
          [this](int m, const at::Tensor& h) {
            before_head(m);
            return llama->head(h, tokens(m).roll(1, 1)) / options_.microbatches;
          }};
  OverlapPlanOptions plan = options.options;
  for (int l = 0; l < options.layers; ++l) {
    pieces.layers.push_back(runtime->unit_of(*llama->blocks()[l]));
    plan.dense.push_back(l < options.dense_layers);
  }
  runner = std::make_unique<OverlapRunner>(
      runtime,
      pieces,
      options.microbatches,
      plan);
}

void MoeOverlapTrainer::make_exchange(const StreamOptions& streams) {
  const auto group =
      mesh_->communicator(mesh_->axis_index("ep"), Purpose::exchange)
          .shared_from_this();
  const ExchangeOptions how{.groups_by_rank = true, .stream = streams};
  if (!options_.copies) {
    exchange = std::make_shared<CollectiveExchange>(group, kExperts, how);
    return;
  }
  std::vector<MeshGroup> watched;
  auto fences = group;
  if (mesh_->device().is_cuda()) {
    fences = make_peer_communicator(group, {});
    watched.push_back({{"ep"}, fences, Purpose::exchange});
  }
  const auto hosts = make_page_communicator(group);
  watched.push_back({{"ep"}, hosts, Purpose::exchange});
  mesh_ = mesh_->with_communicators(std::move(watched));
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  exchange = std::make_shared<PeerExchange>(
      fences,
      hosts,
      kExperts,
      PeerExchangeOptions{
          .window_nbytes =
              options_.tokens * kExpertsPerToken * (kDim + 1) * kFloat,
          .exchange = how});
}

at::Tensor MoeOverlapTrainer::tokens(int microbatch) const {
  const auto seed = static_cast<std::uint64_t>(
      1000 * step_ + 10 * mesh_->rank() + microbatch);
  const at::Tensor random = at::randint(
      kVocab,
      {1, options_.tokens},
      at::make_generator<at::CPUGeneratorImpl>(seed),
      at::kLong);
  return (options_.change_tokens ? options_.change_tokens(microbatch, random)
                                 : random)
      .to(mesh_->device());
}

std::vector<double> MoeOverlapTrainer::forward_backward(int step) {
  step_ = step;
  std::vector<at::Tensor> losses;
  if (runner) {
    losses = runner->run();
  }
  for (int m = 0; !runner && m < options_.microbatches; ++m) {
    runtime->set_is_last_microbatch(m + 1 == options_.microbatches);
    losses.push_back(
        llama(tokens(m), tokens(m).roll(1, 1)) / options_.microbatches);
    losses.back().backward();
  }
  std::vector<double> values;
  values.reserve(losses.size());
  for (const at::Tensor& loss : losses) {
    values.push_back(loss.item<double>());
  }
  return values;
}

void MoeOverlapTrainer::update() {
  optimizer_->step(1e-3);
  optimizer_->zero_grad();
}

void train_overlapped_rank(
    const MoeOverlapCase& options,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    MoeOverlapResult& result) {
  MoeOverlapTrainer trainer(options, mesh);
  for (int step = 0; step < options.steps; ++step) {
    if (options.before_step) {
      options.before_step(trainer, step);
    }
    const auto losses = trainer.forward_backward(step);
    trainer.update();
    const std::lock_guard lock(mutex);
    for (int m = 0; m < static_cast<int>(losses.size()); ++m) {
      result.losses[{step, mesh->rank(), m}] = losses[m];
    }
  }
  trainer.runtime->synchronize();
  collect_weights(*trainer.runtime, mutex, result.weights);
  const std::lock_guard lock(mutex);
  result.graphs[mesh->rank()] = trainer.runtime->graphs().stats();
  auto& chosen = result.counts[mesh->rank()];
  for (const models::RouterOf& of : trainer.llama->routers()) {
    const at::Tensor counts = of.router->take_load().counts.cpu();
    for (std::int64_t e = 0; e < counts.numel(); ++e) {
      chosen.push_back(counts[e].item<std::int64_t>());
    }
  }
}

MoeOverlapResult train_overlapped_moe(const MoeOverlapCase& options) {
  MoeOverlapResult result;
  std::mutex mutex;
  run_ranks(options.world(), [&](RankContext& context) {
    train_overlapped_rank(options, context.mesh(options.axes()), mutex, result);
  });
  return result;
}

void expect_same(const MoeOverlapResult& got, const MoeOverlapResult& want) {
  EXPECT_EQ(got.losses, want.losses);
  // A recompute does not count again, and a first run without a graph does.
  EXPECT_EQ(got.counts, want.counts);
  ASSERT_EQ(got.weights.size(), want.weights.size());
  const auto same = [](float a, float b) {
    return a == b || (std::isnan(a) && std::isnan(b));
  };
  for (const auto& [name, values] : want.weights) {
    EXPECT_TRUE(std::ranges::equal(got.weights.at(name), values, same)) << name;
  }
}

}  // namespace flatshard::testing
