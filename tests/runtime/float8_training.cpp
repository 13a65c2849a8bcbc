#include "tests/runtime/float8_training.h"
#include "flatshard/graphs/model_graphs.h"

#include "flatshard/graphs/step_graph.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

namespace flatshard::testing {
namespace {

using float8::Recipe;

constexpr std::int64_t kDim = Float8Case::kDim;
constexpr std::int64_t kSeq = 24;  // no recipe's multiple
constexpr std::int64_t kVocab = 64;

at::Tensor tokens(int step, int index) {
  at::Generator generator = at::detail::createCPUGenerator(
      static_cast<std::uint64_t>(1 + step * 100 + index));
  return at::randint(kVocab, {2, kSeq}, generator, at::kLong);
}

}  // namespace

int Float8Case::world() const {
  return static_cast<int>(std::accumulate(
      mesh.begin(),
      mesh.end(),
      std::int64_t{1},
      std::multiplies<>()));
}

void expect_same_run(const Float8Run& a, const Float8Run& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_FALSE(a.weights.empty());
  EXPECT_EQ(a.weights, b.weights);
}

std::vector<Float8Format> float8_formats() {
  return {
      {.recipe = Recipe::tensorwise},
      {.recipe = Recipe::rowwise},
      {.recipe = Recipe::rowwise, .stored_columns = true},
      {.recipe = Recipe::blockwise},
      {.recipe = Recipe::mxfp8},
      {.recipe = Recipe::mxfp8, .stored_columns = true}};
}

std::string name_of_format(const Float8Format& format) {
  return std::string(float8::to_string(format.recipe)) +
         (format.stored_columns ? "_stored" : "");
}

models::Llama make_llama(models::ActivationCheckpoint checkpoint) {
  return models::Llama(
      models::ModelConfig{
          .dim = kDim,
          .layers = Float8Case::kLayers,
          .heads = 4,
          .kv_heads = 4,
          .ffn_dim = Float8Case::kFfn,
          .vocab_size = kVocab,
          .max_seq_len = kSeq},
      models::LlamaOptions{.activation_checkpoint = checkpoint});
}

std::shared_ptr<Runtime> shard_llama(
    models::Llama& llama,
    const std::shared_ptr<Mesh>& mesh,
    const Float8Case& c) {
  FullyShardOptions options{
      .strategy = c.strategy,
      .seed = 5,
      .group =
          {.keep_compute_weights = c.keep_compute_weights,
           .offload = c.offload,
           .pin_memory = false},
      .runtime = {
          .reshard_after_forward = c.reshard_after_forward,
          .copy_engines = c.copy_engines,
          .streams =
              {.delay_seed = 3 + static_cast<std::uint64_t>(mesh->rank()),
               .max_delay_us = c.max_delay_us},
          .trace = true,
          .debug = {.poison = c.poison},
          .graphs = {
              .enabled = c.whole_step || !c.regions.empty(),
              .whole_step = c.whole_step,
              .warmup_steps = Float8Case::kWarmupSteps,
              .emulate_on_cpu = mesh->device().is_cpu()}}};
  if (!c.regions.empty()) {
    options.runtime.graphs.regions = c.regions;
  }
  for (const auto& unit : llama->unit_modules()) {
    options.units.push_back(dynamic_cast<nn::Module*>(unit.get()));
  }
  if (c.format) {
    Float8Format format = *c.format;
    format.gather_parts = c.gather_parts;
    options.float8_of = [format](
                            const std::string& /*name*/,
                            const std::vector<std::int64_t>& shape) {
      return format.why_not(shape).empty() ? std::optional(format)
                                           : std::nullopt;
    };
  }
  return fully_shard(*llama, mesh, std::move(options));
}

void train_float8_rank(
    const Float8Case& c,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    Float8Run& result) {
  models::Llama llama = make_llama(c.checkpoint);
  for (const auto& p : nn::named_parameters(*llama)) {
    if (c.freezes_attention && p.name.find("self_attn") != std::string::npos) {
      at::Tensor(p.tensor).set_requires_grad(false);
    }
  }
  const auto runtime = shard_llama(llama, mesh, c);
  AdamW optimizer(runtime->groups(), AdamWOptions{});
  const auto forward_backward = [&](const nn::TensorList& inputs) {
    nn::TensorList losses;
    for (const at::Tensor& in : inputs) {
      runtime->set_is_last_microbatch(losses.size() + 1 == inputs.size());
      losses.push_back(llama(in, in.roll(1, 1)));
      (losses.back() / c.microbatches).backward();
    }
    return losses;
  };
  std::optional<StepGraph> graph;
  if (c.whole_step) {
    graph.emplace(runtime, forward_backward);
  }
  for (int step = 0; step < c.steps; ++step) {
    runtime->clear_trace();
    nn::TensorList inputs;
    const int first = mesh->rank() * c.microbatches;
    for (int m = 0; m < c.microbatches; ++m) {
      inputs.push_back(tokens(step, first + m).to(mesh->device()));
    }
    const nn::TensorList losses =
        graph ? graph->run(inputs) : forward_backward(inputs);
    for (int m = 0; m < c.microbatches; ++m) {
      const auto loss = losses[m].item<double>();
      const std::lock_guard lock(mutex);
      result.losses[{step, first + m}] = loss;
    }
    const GradNorm norm = grad_norm_and_scale(runtime->groups(), 1e6);
    optimizer.step(1e-2, norm.scale);
    optimizer.zero_grad();
    if (c.prefetches_between_steps && step % 2 == 0) {
      runtime->gathers().prefetch_forward();
    }
  }
  optimizer.wait();
  runtime->synchronize();
  collect_weights(*runtime, mutex, result.weights);
  if (mesh->rank() == c.reporting_rank) {
    result.graphs = graph ? graph->stats() : runtime->graphs().stats();
    result.last_step = runtime->trace().actions;
    result.units = runtime->scheduler().units();
  }
}

Float8Run train_float8(const Float8Case& c) {
  Float8Run result;
  std::mutex mutex;
  run_ranks(c.world(), [&](RankContext& context) {
    std::vector<MeshAxis> axes;
    for (std::size_t i = 0; i < c.mesh.size(); ++i) {
      axes.push_back({"axis" + std::to_string(i), c.mesh[i]});
    }
    train_float8_rank(c, context.mesh(axes), mutex, result);
  });
  return result;
}

}  // namespace flatshard::testing
