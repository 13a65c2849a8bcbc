#include "flatshard/models/moe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/llama.h"
#include "moe_reference.h"
#include "tests/support/counted_operation.h"
#include "tests/support/sum_order.h"

#include <map>

namespace flatshard::models {
namespace {

constexpr std::int64_t kVocab = 31;

ModelConfig shape_of(const std::string& family) {
  ModelConfig c{
      .family = family,
      .dim = 24,
      .layers = 2,
      .heads = 6,
      .kv_heads = 2,
      .ffn_dim = 40,
      .vocab_size = kVocab,
      .max_seq_len = 16,
      .rope_theta = 1000.0,
      .block =
          {.attention =
               {.qk_norm = family == "mixtral" ? QkNorm::none : QkNorm::head}},
      .moe = {.num_experts = 8, .experts_per_token = 3, .ffn_dim = 16}};
  if (family == "mixtral") {
    c.moe.ffn_dim = 40;
  }
  if (family == "moe") {
    c.moe.shared_experts = 2;
    c.moe.dense_layers = 1;
    c.moe.router_score = nn::RouterScore::sigmoid;
    c.moe.router_scale = 1.5;
    c.moe.router_groups = 4;
    c.moe.router_kept_groups = 2;
    c.moe.router_bias = true;
  }
  return c;
}

at::Tensor moe_tokens(std::uint64_t seed) {
  return at::randint(
      kVocab,
      {3, 11},
      at::make_generator<at::CPUGeneratorImpl>(seed),
      at::kLong);
}

// Weights large enough that every part matters and experts differ.
Llama make_moe(const ModelConfig& config, LlamaOptions options = {}) {
  Llama model(config, options);
  nn::materialize(
      *model,
      at::kCPU,
      at::kFloat,
      nn::random_fill(at::make_generator<at::CPUGeneratorImpl>(4)));
  const at::NoGradGuard no_grad;
  for (const auto& p : nn::named_parameters(*model)) {
    p.tensor.mul_(p.info->init.kind == InitSpec::Kind::normal ? 8 : 1);
  }
  for (const RouterOf& of : model->routers()) {
    of.router->make_bias(at::kCPU);
    if (of.router->bias().defined()) {
      of.router->bias().copy_(at::linspace(-0.2, 0.2, 8));
    }
  }
  return model;
}

double moe_error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor g = got.detach().to(at::kDouble);
  const at::Tensor e = want.detach();
  return ((g - e).norm() / e.norm()).item<double>();
}

struct MoeCase {
  const char* family;
  ActivationCheckpoint checkpoint;
  MoeOptions moe;
};

class MoeModel : public ::testing::TestWithParam<MoeCase> {};

INSTANTIATE_TEST_SUITE_P(
    Cases,
    MoeModel,
    ::testing::Values(
        MoeCase{"mixtral", ActivationCheckpoint::none, {}},
        MoeCase{"qwen3_moe", ActivationCheckpoint::selective, {}},
        MoeCase{
            "mixtral",
            ActivationCheckpoint::full,
            {.aux_loss = 0.5, .z_loss = 0.1}},
        MoeCase{"moe", ActivationCheckpoint::none, {}},
        MoeCase{
            "moe",
            ActivationCheckpoint::full,
            {.aux_loss = 0.5, .z_loss = 0.1}}));

TEST_P(MoeModel, LossLogitsAndGradientsMatchPlainTorch) {
  const MoeCase& c = GetParam();
  Llama model = make_moe(
      shape_of(c.family),
      {.activation_checkpoint = c.checkpoint, .moe = c.moe});
  MoeReference reference(model, c.moe);
  const at::Tensor ids = moe_tokens(1), targets = moe_tokens(2);
  // A third of it: the auxiliary losses are divided as well.
  const at::Tensor loss = model(ids, targets);
  (loss / 3).backward();
  (reference.loss(ids, targets) / 3).backward();
  // Against float64: forward and backward of 2 layers, matmuls over 40.
  const double tolerance = testing::sum_tolerance(
      {.addends = 40, .in_a_row = testing::sums_of_steps(2, 1)});
  EXPECT_LE(moe_error(loss, reference.cross_entropy()), tolerance);
  EXPECT_LE(moe_error(logits(model, ids), reference.logits(ids)), tolerance);
  for (const auto& p : nn::named_parameters(*model)) {
    ASSERT_TRUE(p.tensor.grad().defined()) << p.name;
    EXPECT_LE(
        moe_error(p.tensor.grad(), reference.weight(p.name).grad()),
        tolerance)
        << p.name;
  }
}

/// The state of a step after which it is compared.
struct StepOfDocuments {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients;
  std::vector<RouterLoad> loads;
};

// Two documents of 11 tokens, one in each row of `seq_len` tokens.
StepOfDocuments step_of_documents(
    std::int64_t seq_len,
    const MoeOptions& moe,
    ActivationCheckpoint mode,
    bool in_pieces) {
  Llama model = make_moe(
      shape_of("mixtral"),
      {.activation_checkpoint = mode, .moe = moe});
  for (const RouterOf& of : model->routers()) {
    of.router->set_measures_balance(true);
  }
  const std::int64_t num_padding = seq_len - 11;
  const auto rows = [&](std::uint64_t seed, std::int64_t fill) {
    return at::constant_pad_nd(
        moe_tokens(seed).narrow(0, 0, 2),
        {0, num_padding},
        fill);
  };
  std::vector<std::int64_t> lengths;
  for (int row = 0; row < 2; ++row) {
    lengths.push_back(11);
    if (num_padding > 0) {
      lengths.push_back(num_padding);
    }
  }
  const std::vector<std::int64_t> padding{num_padding, num_padding};
  const auto documents = nn::Documents::of(lengths, seq_len, at::kCPU, padding);
  at::Tensor loss;
  if (in_pieces) {  // as a schedule of two microbatches runs them
    at::Tensor x = model->embed(rows(1, 0));
    for (LlamaBlock& block : model->blocks()) {
      x = block->nodes(documents).run({x})[0];
    }
    loss = model->head(x, rows(2, -100));
  } else {
    loss = model(rows(1, 0), rows(2, -100), documents);
  }
  loss.backward();
  StepOfDocuments step{.loss = loss.item<double>()};
  for (const auto& p : nn::named_parameters(*model)) {
    step.gradients[p.name] = p.tensor.grad();
  }
  for (const RouterOf& of : model->routers()) {
    step.loads.push_back(of.router->take_load());
  }
  return step;
}

TEST(MoePadding, HasNoPartInLossesLoadsAndCapacity) {
  for (const bool in_pieces : {false, true}) {
    for (const auto mode :
         {ActivationCheckpoint::none, ActivationCheckpoint::selective}) {
      for (const double capacity : {0.0, 0.8}) {
        const MoeOptions moe{
            .aux_loss = 0.5,
            .z_loss = 0.1,
            .capacity_factor = capacity};
        const auto want = step_of_documents(11, moe, mode, in_pieces);
        const auto got = step_of_documents(16, moe, mode, in_pieces);
        EXPECT_NEAR(got.loss, want.loss, 1e-5);
        for (std::size_t i = 0; i < want.loads.size(); ++i) {
          EXPECT_TRUE(at::equal(got.loads[i].counts, want.loads[i].counts));
          EXPECT_NEAR(
              got.loads[i].balance.item<double>(),
              want.loads[i].balance.item<double>(),
              1e-5);
          if (capacity > 0) {
            EXPECT_TRUE(at::equal(got.loads[i].kept, want.loads[i].kept));
            EXPECT_LT(
                want.loads[i].kept.item<std::int64_t>(),
                want.loads[i].counts.sum().item<std::int64_t>());
          }
        }
        for (const auto& [name, gradient] : want.gradients) {
          EXPECT_LE(
              moe_error(got.gradients.at(name), gradient.to(at::kDouble)),
              1e-5)
              << name;
        }
      }
    }
  }
}

TEST(MoeRecompute, IsBitwiseTheSameAndCountsOnce) {
  for (const MoeOptions& moe :
       {MoeOptions{}, MoeOptions{.aux_loss = 0.1, .capacity_factor = 0.8}}) {
    std::vector<std::vector<at::Tensor>> runs;
    for (const auto mode :
         {ActivationCheckpoint::none, ActivationCheckpoint::full}) {
      Llama model = make_moe(
          shape_of("qwen3_moe"),
          {.activation_checkpoint = mode, .moe = moe});
      const at::Tensor loss = model(moe_tokens(1), moe_tokens(2));
      loss.backward();
      std::vector<at::Tensor> run{loss.detach()};
      for (const at::Tensor& p : model->parameters()) {
        run.push_back(p.grad());
      }
      for (const RouterOf& of : model->routers()) {
        const RouterLoad load = of.router->take_load();
        EXPECT_EQ(load.counts.sum().item<std::int64_t>(), 3 * 11 * 3);
        EXPECT_EQ(load.kept.defined(), moe.capacity_factor > 0);
        run.push_back(load.counts);
        EXPECT_FALSE(of.router->take_load().counts.defined());
      }
      runs.push_back(run);
    }
    ASSERT_EQ(runs[0].size(), runs[1].size());
    for (std::size_t i = 0; i < runs[0].size(); ++i) {
      EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
    }
  }
}

// A second run multiplies by q, k, v, o, the router, the shared gate and up,
// and for each expert by gate_up, but by no down: that makes the block's
// result.
TEST(MoeRecompute, ASecondRunMakesNoResultOfItsPart) {
  ModelConfig config = shape_of("moe");
  config.moe.dense_layers = 0;
  const auto products = [&](const char* of, ActivationCheckpoint mode) {
    Llama model = make_moe(config, {.activation_checkpoint = mode});
    testing::CountedOperation counted(of);
    model(moe_tokens(1), moe_tokens(2)).backward();
    return counted.take();
  };
  using enum ActivationCheckpoint;
  EXPECT_EQ(
      products("aten::mm", full) - products("aten::mm", none),
      2 * (4 + 1 + 2 + 8));
  EXPECT_EQ(products("aten::addmm", full), products("aten::addmm", none));
  EXPECT_EQ(
      products("aten::mm", selective) - products("aten::mm", none),
      2 * (1 + 2 + 8));
}

// Hooks that read results run where there are any: in the first run.
TEST(MoeRecompute, HooksReadResultsInTheFirstRun) {
  for (const auto mode :
       {ActivationCheckpoint::full, ActivationCheckpoint::selective}) {
    Llama model = make_moe(shape_of("moe"), {.activation_checkpoint = mode});
    std::vector<nn::HookHandle> hooks;
    std::map<std::string, int> calls;
    for (const auto& item : model->named_modules()) {
      if (item.key().starts_with("model.layers.1.mlp")) {
        auto* const module = dynamic_cast<nn::Module*>(item.value().get());
        hooks.push_back(module->add_forward_hook([&calls, name = item.key()](
                                                     nn::Module&,
                                                     const nn::TensorList&,
                                                     const nn::TensorList& r) {
          ++calls[name.substr(std::string("model.layers.1.").size())];
          for (const at::Tensor& result : r) {
            EXPECT_FALSE(result.isnan().any().item<bool>()) << name;
          }
        }));
      }
    }
    model(moe_tokens(1), moe_tokens(2)).backward();
    EXPECT_EQ(calls["mlp"], 1);
    EXPECT_EQ(calls["mlp.experts"], 1);
    EXPECT_EQ(calls["mlp.shared_experts.down_proj"], 1);
    EXPECT_EQ(calls["mlp.shared_experts.up_proj"], 2);
  }
}

// Scores that differ only in the last bit may be ordered differently the second
// time. Here the router's weight changes in between, so all of them do.
TEST(Pitfalls, M1_ARecomputeNeverRoutesAgain) {
  for (const auto mode :
       {ActivationCheckpoint::full, ActivationCheckpoint::selective}) {
    Llama model = make_moe(
        shape_of("mixtral"),
        {.activation_checkpoint = mode, .moe = {.capacity_factor = 1.0}});
    std::map<std::string, at::Tensor> parameters;
    for (const auto& p : nn::named_parameters(*model)) {
      parameters[p.name] = p.tensor;
    }
    const at::Tensor loss = model(moe_tokens(1), moe_tokens(2));
    std::vector<at::Tensor> before;
    for (const RouterOf& of : model->routers()) {
      before.push_back(of.router->take_load().counts);
      const at::NoGradGuard no_grad;
      parameters.at(of.name + ".weight").neg_();
    }
    loss.backward();
    // Experts without a token have no gradient, whatever their new score.
    std::size_t layer = 0;
    for (const RouterOf& of : model->routers()) {
      EXPECT_FALSE(of.router->take_load().counts.defined()) << of.name;
      const std::string experts =
          of.name.substr(0, of.name.size() - 4) + "experts.gate_up_proj";
      const at::Tensor used =
          parameters.at(experts).grad().abs().sum({1, 2}).gt(0);
      EXPECT_TRUE(at::equal(used, before[layer++].gt(0))) << of.name;
    }
  }
}

// Counts what ranks would wait for each other in.
class CountedExchange : public nn::LocalExchange {
 public:
  nn::ExchangePlanPtr begin_plan(
      const at::Tensor& counts,
      std::int64_t num_rows) override {
    ++num_plans;
    return LocalExchange::begin_plan(counts, num_rows);
  }
  std::unique_ptr<nn::RowTransfer> start(
      const nn::ExchangePlanPtr& plan,
      Direction direction,
      const nn::TransferInput& input) override {
    ++num_transfers;
    return LocalExchange::start(plan, direction, input);
  }
  void finish_plan(const nn::ExchangePlanPtr& /*plan*/) override {
    ++num_waits;
  }

  int num_plans = 0;
  int num_waits = 0;  ///< of the host, outside of a transfer
  int num_transfers = 0;
};

TEST(Pitfalls, M10_ARecomputePlansNoExchangeAgain) {
  for (const auto mode :
       {ActivationCheckpoint::none,
        ActivationCheckpoint::selective,
        ActivationCheckpoint::full}) {
    const auto exchange = std::make_shared<CountedExchange>();
    Llama model = make_moe(
        shape_of("mixtral"),
        {.activation_checkpoint = mode, .moe = {.exchange = exchange}});
    model(moe_tokens(1), moe_tokens(2)).backward();
    EXPECT_EQ(exchange->num_plans, 2);  // of as many layers
    EXPECT_EQ(exchange->num_waits, 0);
    // Rows are dispatched with weights, results combined, and both gradients.
    // A second run combines no results: nothing reads them.
    const int of_layer = mode == ActivationCheckpoint::none ? 4 : 5;
    EXPECT_EQ(exchange->num_transfers, 2 * of_layer);
  }
}

TEST(MoeRouting, EvaluationCountsNothing) {
  Llama model = make_moe(shape_of("mixtral"));
  {
    const at::NoGradGuard no_grad;
    model(moe_tokens(1), moe_tokens(2));
  }
  EXPECT_FALSE(model->routers()[0].router->take_load().counts.defined());
}

TEST(MoeRouting, ForcedBalanceIsBalanced) {
  Llama model = make_moe(shape_of("mixtral"), {.moe = {.force_balance = true}});
  model->routers()[0].router->set_measures_balance(true);
  model(moe_tokens(1), moe_tokens(2)).backward();
  const RouterLoad load = model->routers()[0].router->take_load();
  EXPECT_LE((load.counts.max() - load.counts.min()).item<std::int64_t>(), 1);
  EXPECT_EQ(load.measured, 1);
  EXPECT_NEAR(load.balance.item<double>(), 1.0, 0.02);
}

TEST(MoeRouting, ForcedBalanceFitsEachBatch) {
  Llama model = make_moe(shape_of("mixtral"), {.moe = {.force_balance = true}});
  auto& router = *model->routers()[0].router;
  {
    // The state that it keeps of this is for graphs, too.
    const c10::InferenceMode inference;
    router.forward(at::ones({6, router.parameters()[0].size(1)}), nullptr);
  }
  for (const std::int64_t tokens : {6, 3, 6}) {
    const at::Tensor x =
        at::ones({tokens, router.parameters()[0].size(1)}).requires_grad_();
    const nn::Routing routing = router.forward(x, nullptr);
    EXPECT_EQ(routing.experts.size(0), tokens);
    EXPECT_EQ(
        routing.counts.sum().item<std::int64_t>(),
        routing.experts.numel());
    routing.weights.sum().backward();
    EXPECT_TRUE(x.grad().defined());
  }
}

TEST(MoeRouting, CapacityDropsWhatIsBeyondIt) {
  ModelConfig config = shape_of("mixtral");
  config.layers = 1;
  Llama model = make_moe(config, {.moe = {.capacity_factor = 0.5}});
  model(moe_tokens(1), moe_tokens(2)).backward();
  const RouterLoad load = model->routers()[0].router->take_load();
  // ceil(0.5 * 33 * 3 / 8) each.
  const at::Tensor kept = load.counts.clamp_max(7).sum();
  EXPECT_EQ(load.kept.item<std::int64_t>(), kept.item<std::int64_t>());
  EXPECT_LT(
      load.kept.item<std::int64_t>(),
      load.counts.sum().item<std::int64_t>());
  for (const at::Tensor& p : model->parameters()) {
    EXPECT_TRUE(p.grad().isfinite().all().item<bool>());
  }
}

TEST(MoeRouting, TheBiasMovesAgainstTheLoad) {
  Llama model = make_moe(shape_of("moe"));
  ASSERT_EQ(model->routers().size(), 1U);
  EXPECT_EQ(model->routers()[0].name, "model.layers.1.mlp.gate");
  RouterImpl& router = *model->routers()[0].router;
  router.bias().zero_();
  router.update_bias(at::tensor({9, 0, 4, 4, 4, 4, 4, 3}, at::kLong), 0.125);
  EXPECT_TRUE(at::equal(
      router.bias(),
      at::tensor({-.125F, .125F, 0.F, 0.F, 0.F, 0.F, 0.F, .125F})));
}

std::vector<std::string> entry_names(
    const std::string& family,
    const std::string& name,
    const std::vector<std::int64_t>& shape) {
  std::vector<std::string> names;
  for (const StoredEntry& entry : hf_entries(shape_of(family), name, shape)) {
    names.push_back(entry.name);
  }
  return names;
}

TEST(MoeNames, AreHuggingFacesPerExpert) {
  using ::testing::ElementsAre;
  const std::string p = "model.layers.3.mlp.";
  EXPECT_THAT(
      entry_names("qwen3_moe", p + "experts.gate_up_proj", {2, 6, 5}),
      ElementsAre(
          p + "experts.0.gate_proj.weight",
          p + "experts.0.up_proj.weight",
          p + "experts.1.gate_proj.weight",
          p + "experts.1.up_proj.weight"));
  EXPECT_EQ(
      hf_entries(
          shape_of("qwen3_moe"),
          p + "experts.gate_up_proj",
          {2, 6, 5})[3]
          .shape,
      (std::vector<std::int64_t>{3, 5}));
  const std::string m = "model.layers.3.block_sparse_moe.";
  EXPECT_THAT(
      entry_names("mixtral", p + "experts.gate_up_proj", {1, 6, 5}),
      ElementsAre(m + "experts.0.w1.weight", m + "experts.0.w3.weight"));
  EXPECT_THAT(
      entry_names("mixtral", p + "experts.down_proj", {2, 5, 3}),
      ElementsAre(m + "experts.0.w2.weight", m + "experts.1.w2.weight"));
  EXPECT_THAT(
      entry_names("mixtral", p + "gate.weight", {8, 5}),
      ElementsAre(m + "gate.weight"));
  EXPECT_THAT(
      entry_names("qwen3_moe", p + "gate_proj.weight", {8, 5}),
      ElementsAre(p + "gate_proj.weight"));
  EXPECT_THAT(
      entry_names("qwen3_moe", "lm_head.norm.weight", {5}),
      ElementsAre("model.norm.weight"));
}

// The published sizes.
TEST(MoeFlops, CountActiveParameters) {
  const ModelConfig mixtral = preset("mixtral_8x7b");
  EXPECT_EQ(num_parameters(mixtral), 46702792704);
  EXPECT_EQ(num_active_parameters(mixtral), 12879925248);
  EXPECT_EQ(num_expert_parameters(mixtral), 32LL * 8 * 3 * 4096 * 14336);
  const ModelConfig qwen = preset("qwen3_30b_a3b");
  EXPECT_EQ(num_parameters(qwen), 30532122624);
  EXPECT_EQ(num_expert_parameters(qwen), 48LL * 128 * 3 * 2048 * 768);
  EXPECT_EQ(num_expert_parameters(preset("llama3_1b")), 0);
  EXPECT_NEAR(double(num_active_parameters(qwen)), 3.35e9, 0.02e9);
  EXPECT_LT(flops_per_token(qwen, 4096), 30e9);
}

std::string moe_message(ModelConfig config) {
  try {
    config.validate();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::config);
    return e.message();
  }
  return "did not throw";
}

TEST(MoeErrors, FieldsAreNamed) {
  ModelConfig c = shape_of("mixtral");
  c.family = "deepseek_v3";
  EXPECT_THAT(
      moe_message(c),
      ::testing::HasSubstr("multi-head latent attention"));
  c = shape_of("mixtral");
  c.family = "llama";
  EXPECT_EQ(
      moe_message(c),
      "model.num_experts: the family llama has no experts; remove the key, or "
      "use the family moe");
  c = shape_of("mixtral");
  c.moe.shared_experts = 1;
  EXPECT_THAT(
      moe_message(c),
      ::testing::StartsWith("model.shared_experts: the family mixtral"));
  c = shape_of("qwen3_moe");
  c.moe.experts_per_token = 9;
  EXPECT_EQ(
      moe_message(c),
      "model.experts_per_token: expected 1 to num_experts = 8, got 9");
  c = shape_of("moe");
  c.moe.num_experts = 0;
  EXPECT_EQ(
      moe_message(c),
      "model.num_experts: the family moe expected at least 1, got 0");
  c = shape_of("moe");
  c.moe.dense_layers = 3;
  EXPECT_EQ(
      moe_message(c),
      "model.dense_layers: expected at most layers = 2, got 3");
  EXPECT_EQ(moe_message(shape_of("moe")), "did not throw");
}

// Each part of an expert would add the bias.
TEST(MoeErrors, PartsOfExpertsWithBiasesAreRefused) {
  LlamaOptions options;
  const ModelConfig config = preset("gpt_oss_tiny");
  options.moe.local_ffn_dim = config.moe.ffn_dim;
  EXPECT_NO_THROW(Llama(config, options));
  options.moe.local_ffn_dim = config.moe.ffn_dim / 2;
  try {
    Llama(config, options);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(
        error.message(),
        "parallelism.expert_tensor_parallel_degree: expected 1 for experts "
        "with biases, as the family gpt_oss has, found parts of a width of "
        "48; use parallelism.expert_parallel_degree");
  }
}

}  // namespace
}  // namespace flatshard::models
