#include "tests/graphs/graph_training.h"
#include "flatshard/graphs/model_graphs.h"

#include "flatshard/group/initializer.h"
#include "flatshard/models/llama.h"
#include "flatshard/nn/dropout.h"
#include "flatshard/nn/region.h"
#include "flatshard/nn/rms_norm.h"
#include "flatshard/optim/grad_norm.h"
#include "tests/runtime/gradients_in_slots.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <numeric>
#include <optional>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kDim = 32;
constexpr std::int64_t kSeq = 16;
constexpr std::int64_t kVocab = 64;

at::Tensor tokens(int step, int microbatch, int rank, std::int64_t batch) {
  at::Generator generator = at::detail::createCPUGenerator(
      static_cast<std::uint64_t>(1 + step * 1000 + microbatch * 100 + rank));
  return at::randint(kVocab, {batch, kSeq}, generator, at::kLong);
}

}  // namespace

// x + dropout(down(gelu(up(norm(x))))), twice.
class GraphHalfImpl : public nn::Module {
 public:
  GraphHalfImpl(const char* name, std::optional<at::Generator> generator)
      : region_(name) {
    norm_ = register_module("norm", nn::RmsNorm(kDim, 1e-5));
    up_ = register_module(
        "up",
        nn::Linear(kDim, 2 * kDim, nn::LinearOptions{.bias = true}));
    down_ = register_module("down", nn::Linear(2 * kDim, kDim));
    dropout_ = register_module("dropout", nn::Dropout(0.3, generator));
  }
  at::Tensor forward(const at::Tensor& x) {
    return nn::region(
        *this,
        region_,
        [this](const nn::TensorList& in) {
          const at::Tensor y = down_(at::gelu(up_(norm_(in[0]))));
          return nn::TensorList{in[0] + dropout_(y)};
        },
        {x})[0];
  }

 private:
  const char* region_;
  nn::RmsNorm norm_{nullptr};
  nn::Linear up_{nullptr}, down_{nullptr};
  nn::Dropout dropout_{nullptr};
};
FLATSHARD_MODULE(GraphHalf);

class GraphBlockImpl : public nn::Module {
 public:
  GraphBlockImpl(bool recompute, std::optional<at::Generator> generator)
      : recompute_(recompute) {
    attn_ = register_module("attn", GraphHalf("attn", generator));
    mlp_ = register_module("mlp", GraphHalf("mlp", generator));
    gain_ = declare_parameter("gain", {kDim}, InitSpec::ones());
  }
  at::Tensor forward(const at::Tensor& x) {
    nn::RegionOptions options;
    if (recompute_) {
      options.recompute = nn::RecomputeOptions{};
    }
    return nn::region(
        *this,
        "block",
        [this](const nn::TensorList& in) {
          return nn::TensorList{mlp_(attn_(in[0])) * gain_};
        },
        {x},
        options)[0];
  }

 private:
  bool recompute_;
  GraphHalf attn_{nullptr}, mlp_{nullptr};
  at::Tensor gain_;  // its gradient comes as a tensor
};
FLATSHARD_MODULE(GraphBlock);

// A model with dropout, because models::Llama has none.
class GraphModelImpl : public nn::Module {
 public:
  GraphModelImpl(bool recompute, std::optional<at::Generator> generator) {
    embed_ = register_module(
        "embed",
        nn::Embedding(kVocab, kDim, InitSpec::normal(0, 0.5F)));
    for (int i = 0; i < GraphCase::kLayers; ++i) {
      blocks_.push_back(register_module(
          "block" + std::to_string(i),
          GraphBlock(recompute, generator)));
    }
    head_ = register_module("head", nn::Linear(kDim, kVocab));
  }
  at::Tensor forward(const at::Tensor& input, const at::Tensor& targets) {
    at::Tensor x = embed_(input);
    for (GraphBlock& block : blocks_) {
      x = block(x);
    }
    const at::Tensor logits = head_(x).to(at::kFloat);
    return at::cross_entropy_loss(
        logits.view({-1, kVocab}),
        targets.reshape({-1}));
  }
  std::vector<nn::Module*> unit_modules() {
    std::vector<nn::Module*> units{embed_.get()};
    for (GraphBlock& block : blocks_) {
      units.push_back(block.get());
    }
    units.push_back(head_.get());
    return units;
  }

 private:
  nn::Embedding embed_{nullptr};
  std::vector<GraphBlock> blocks_;
  nn::Linear head_{nullptr};
};
FLATSHARD_MODULE(GraphModel);

struct GraphTraining::Model {
  std::optional<models::Llama> llama;
  std::optional<GraphModel> with_dropout;
};

std::string GraphCase::name() const {
  std::string text;
  for (const std::string& region : regions) {
    text += region + "_";
  }
  text += strategy;
  for (const std::int64_t size : mesh) {
    text += "_" + std::to_string(size);
  }
  text += recompute ? "_recompute" : "";
  text += keep_attention ? "_keep" : "";
  text += "_mb" + std::to_string(microbatches);
  text += float32_reduce ? "_fp32" : "_bf16";
  text += bf16_compute ? "_compute16" : "";
  text += dropout ? "_dropout" : "";
  return text;
}

int GraphCase::world() const {
  return static_cast<int>(std::accumulate(
      mesh.begin(),
      mesh.end(),
      std::int64_t{1},
      std::multiplies<>()));
}

GraphTraining::GraphTraining(const GraphCase& c, std::shared_ptr<Mesh> mesh)
    : case_(c), mesh_(std::move(mesh)), model_(std::make_unique<Model>()) {
  nn::Module* root = nullptr;
  if (c.dropout) {
    // Ranks that are threads share the default one.
    std::optional<at::Generator> generator;
    if (!mesh_->device().is_cuda()) {
      generator = at::detail::createCPUGenerator(
          static_cast<std::uint64_t>(77 + mesh_->rank()));
    }
    model_->with_dropout.emplace(c.recompute, generator);
    units_ = (*model_->with_dropout)->unit_modules();
    root = model_->with_dropout->get();
  } else {
    model_->llama.emplace(
        models::ModelConfig{
            .dim = kDim,
            .layers = GraphCase::kLayers,
            .heads = 4,
            .kv_heads = 2,
            .ffn_dim = 2 * kDim,
            .vocab_size = kVocab,
            .max_seq_len = kSeq},
        models::LlamaOptions{
            .activation_checkpoint = c.recompute
                                         ? models::ActivationCheckpoint::full
                                         : models::ActivationCheckpoint::none,
            .keep_attention = c.keep_attention});
    for (const auto& unit : (*model_->llama)->unit_modules()) {
      units_.push_back(unit.get());
    }
    root = model_->llama->get();
  }
  Precision precision = Precision::full();
  precision.compute = c.bf16_compute ? at::kBFloat16 : at::kFloat;
  precision.reduce = c.float32_reduce ? at::kFloat : at::kBFloat16;
  runtime_ = fully_shard(
      *root,
      mesh_,
      {.units = units_,
       .strategy = c.strategy,
       .seed = 5,
       .group =
           {.precision = precision, .post_forward_ranks = c.post_forward_ranks},
       .runtime = {
           .prefetch = c.prefetch,
           .streams =
               {.delay_seed = 3 + static_cast<std::uint64_t>(mesh_->rank()),
                .max_delay_us = c.max_delay_us},
           .trace = true,
           .graphs = {
               .enabled = c.graphs,
               .whole_step = c.whole_step,
               .regions = c.regions,
               .warmup_steps = c.warmup_steps,
               .miss_is_error = c.miss_is_error,
               .audit = c.audit,
               .emulate_on_cpu = true}}});
  if (!c.graphs && !c.whole_step) {
    runtime_->add_observer(std::make_shared<GradientsInSlots>());
  }
  if (c.graphs && c.whole_step) {
    step_graph_ = std::make_unique<StepGraph>(
        runtime_,
        [this](const nn::TensorList& inputs) {
          return forward_backward(inputs, {});
        });
  }
}

GraphTraining::~GraphTraining() = default;

nn::Module& GraphTraining::model() {
  if (model_->llama) {
    return **model_->llama;
  }
  return **model_->with_dropout;
}

nn::TensorList GraphTraining::batch(int step, int microbatch, std::int64_t rows)
    const {
  const at::Tensor in =
      tokens(step, microbatch, mesh_->rank(), rows).to(mesh_->device());
  return {in, in.roll(1, 1)};
}

at::Tensor GraphTraining::loss_of(
    const at::Tensor& in,
    const at::Tensor& targets) {
  return model_->llama ? (*model_->llama)(in, targets)
                       : (*model_->with_dropout)(in, targets);
}

at::Tensor GraphTraining::forward(int step, int microbatch, std::int64_t rows) {
  const nn::TensorList in = batch(step, microbatch, rows);
  return loss_of(in[0], in[1]);
}

nn::TensorList GraphTraining::forward_backward(
    const nn::TensorList& inputs,
    const std::function<void(at::Tensor&)>& before_backward) {
  nn::TensorList losses;
  for (int m = 0; m < case_.microbatches; ++m) {
    runtime_->set_is_last_microbatch(m == case_.microbatches - 1);
    at::Tensor loss = loss_of(inputs[2 * m], inputs[2 * m + 1]);
    losses.push_back(loss.detach());
    if (before_backward) {
      before_backward(loss);
    }
    if (loss.defined()) {
      (loss / case_.microbatches).backward();
    }
  }
  return losses;
}

GraphRun GraphTraining::run(const GraphHooks& hooks) {
  GraphRun run;
  optimizer_ = std::make_unique<AdamW>(runtime_->groups(), AdamWOptions{});
  AdamW& optimizer = *optimizer_;
  for (int step = 0; step < case_.steps; ++step) {
    if (hooks.before_step) {
      hooks.before_step(*this, step);
    }
    nn::TensorList inputs;
    for (int m = 0; m < case_.microbatches; ++m) {
      for (at::Tensor& tensor : batch(step, m, batch_)) {
        inputs.push_back(std::move(tensor));
      }
    }
    const nn::TensorList losses =
        step_graph_ ? step_graph_->run(inputs)
                    : forward_backward(inputs, [&](at::Tensor& loss) {
                        if (hooks.before_backward) {
                          hooks.before_backward(*this, step, loss);
                        }
                      });
    for (const at::Tensor& loss : losses) {
      run.losses.push_back(loss.item<double>());
    }
    if (hooks.before_update) {
      hooks.before_update(*this, step);
    }
    const GradNorm norm = grad_norm_and_scale(runtime_->groups(), 1.0);
    for (ParamGroup* group : runtime_->groups()) {
      if (group->gradients().reduced().exists()) {
        run.gradients.push_back(
            group->gradients().reduced().local().to(at::kCPU).clone());
      }
    }
    optimizer.step(1e-2, norm.scale);
    optimizer.zero_grad();
    if (step % 2 == 0) {
      runtime_->gathers().prefetch_forward();
    }
  }
  optimizer.wait();
  runtime_->synchronize();
  run.actions = to_string(runtime_->trace().actions);
  run.stats = step_graph_ ? step_graph_->stats() : runtime_->graphs().stats();
  return run;
}

GraphRun train_graphs(const GraphCase& c, const GraphHooks& hooks) {
  GraphRun result;
  run_ranks(c.world(), [&](RankContext& context) {
    std::vector<MeshAxis> axes;
    for (std::size_t i = 0; i < c.mesh.size(); ++i) {
      axes.push_back({"axis" + std::to_string(i), c.mesh[i]});
    }
    GraphTraining training(c, context.mesh(axes));
    GraphRun run = training.run(hooks);
    if (context.rank == 0) {
      result = std::move(run);
    }
  });
  return result;
}

std::vector<GraphCase> all_graph_cases(int world) {
  std::vector<GraphCase> cases;
  for (const std::set<std::string>& regions :
       std::vector<std::set<std::string>>{
           {"block"},
           {"attn"},
           {"mlp"},
           {"attn", "mlp"}}) {
    for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
      for (const bool recompute : {false, true}) {
        for (const int microbatches : {1, 3}) {
          for (const bool float32_reduce : {true, false}) {
            for (const bool dropout : {false, true}) {
              cases.push_back(
                  {.regions = regions,
                   .strategy = strategy,
                   .mesh = {world},
                   .recompute = recompute,
                   .microbatches = microbatches,
                   .float32_reduce = float32_reduce,
                   .bf16_compute = !float32_reduce,
                   .dropout = dropout});
            }
          }
        }
      }
    }
  }
  return cases;
}

std::vector<GraphCase> all_step_cases(int world) {
  std::vector<GraphCase> cases = all_graph_cases(world);
  std::erase_if(cases, [](const GraphCase& c) {
    return !c.regions.contains("block") || (c.recompute && c.dropout);
  });
  for (GraphCase& c : cases) {
    c.whole_step = true;
  }
  return cases;
}

namespace {

std::vector<GraphCase> pairwise(const std::vector<GraphCase>& all) {
  // Greedy: the next case of the full matrix that has the most new pairs.
  const auto values = [](const GraphCase& c) {
    return std::vector<int>{
        static_cast<int>(c.regions.size()) * 2 +
            static_cast<int>(c.regions.contains("mlp")) +
            (c.regions.contains("block") ? 8 : 0),
        c.strategy.back(),
        c.recompute,
        c.microbatches,
        c.float32_reduce,
        c.dropout};
  };
  const auto pairs = [&](const GraphCase& c) {
    std::set<std::vector<std::size_t>> found;
    const auto v = values(c);
    for (std::size_t i = 0; i < v.size(); ++i) {
      for (std::size_t j = i + 1; j < v.size(); ++j) {
        found.insert(
            {i,
             j,
             static_cast<std::size_t>(v[i]),
             static_cast<std::size_t>(v[j])});
      }
    }
    return found;
  };
  std::set<std::vector<std::size_t>> missing;
  for (const GraphCase& c : all) {
    missing.merge(pairs(c));
  }
  std::vector<GraphCase> chosen;
  while (!missing.empty()) {
    const GraphCase* best = nullptr;
    std::size_t most = 0;
    for (const GraphCase& c : all) {
      std::size_t count = 0;
      for (const auto& pair : pairs(c)) {
        count += missing.count(pair);
      }
      if (count > most) {
        most = count;
        best = &c;
      }
    }
    for (const auto& pair : pairs(*best)) {
      missing.erase(pair);
    }
    chosen.push_back(*best);
    // Alternating 1, 2 and 4 ranks, with two of them as HSDP.
    const std::int64_t world = std::int64_t{1} << (chosen.size() % 3);
    chosen.back().mesh = {world};
    chosen.back().max_delay_us = world > 1 ? 100 : 0;
  }
  return chosen;
}

}  // namespace

std::vector<GraphCase> pairwise_graph_cases() {
  std::vector<GraphCase> chosen = pairwise(all_graph_cases(1));
  chosen.push_back({.strategy = "hsdp", .mesh = {2, 2}, .microbatches = 3});
  return chosen;
}

std::vector<int> pairwise_step_indices() {
  const std::vector<GraphCase> all = all_step_cases(1);
  std::vector<int> indices;
  for (GraphCase c : pairwise(all)) {
    c.mesh = {1};
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i].name() == c.name()) {
        indices.push_back(static_cast<int>(i));
      }
    }
  }
  return indices;
}

std::vector<GraphCase> pairwise_step_cases() {
  std::vector<GraphCase> chosen = pairwise(all_step_cases(1));
  chosen.push_back(
      {.strategy = "hsdp",
       .mesh = {2, 2},
       .microbatches = 3,
       .whole_step = true});
  return chosen;
}

}  // namespace flatshard::testing
