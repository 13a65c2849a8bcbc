// Recomputed parts keep their tensors in host memory: no value changes.
#include "flatshard/core/error.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/optim/sgd.h"
#include "tests/runtime/tensor_training.h"
#include "tests/support/case_name.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace flatshard::testing {
namespace {

using models::ActivationCheckpoint;

constexpr auto kFull = ActivationCheckpoint::full;
constexpr auto kSelective = ActivationCheckpoint::selective;

class ActivationOffload : public ::testing::TestWithParam<TensorRun> {};

TEST_P(ActivationOffload, IsBitwiseIdentical) {
  TensorRun offloaded = GetParam();
  offloaded.offload = true;
  const TensorResult got = train_tensor(offloaded);
  const TensorDistance distance =
      tensor_distance(got, train_tensor(GetParam()));
  EXPECT_EQ(distance.largest, 0) << distance.where;
  EXPECT_GT(got.host_nbytes, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Pairs,
    ActivationOffload,
    ::testing::Values(
        TensorRun{.strategy = "zero0", .checkpoint = kFull},
        TensorRun{
            .strategy = "zero1",
            .dp = 2,
            .microbatches = 3,
            .checkpoint = kFull,
            .keep_attention = true},
        TensorRun{
            .strategy = "zero2",
            .dp = 2,
            .checkpoint = kSelective,
            .batch = 2},
        TensorRun{
            .strategy = "zero3",
            .dp = 2,
            .tp = 2,
            .microbatches = 2,
            .checkpoint = kFull,
            .keep_attention = true,
            .mlp_chunk_tokens = 2,
            .chunk_tokens = 5},
        TensorRun{
            .strategy = "zero2",
            .dp = 1,
            .tp = 2,
            .checkpoint = kSelective,
            .mlp_chunk_tokens = 3},
        TensorRun{
            .strategy = "hsdp",
            .replicate = 2,
            .dp = 2,
            .microbatches = 2,
            .checkpoint = kFull},
        TensorRun{
            .strategy = "zero3",
            .cp = 2,
            .microbatches = 2,
            .checkpoint = kFull,
            .keep_attention = true},
        TensorRun{
            .model = "experts",
            .strategy = "zero3",
            .dp = 2,
            .ep = 2,
            .microbatches = 2,
            .checkpoint = kFull},
        TensorRun{.model = "experts", .dp = 2, .checkpoint = kSelective},
        TensorRun{
            .model = "experts",
            .dp = 2,
            .ep = 2,
            .microbatches = 2,
            .checkpoint = kFull,
            .checkpointed_layers = 1,
            .keep_attention = true},
        TensorRun{
            .model = "gemma",
            .dp = 4,
            .checkpoint = kFull,
            .post_forward_ranks = 2},
        TensorRun{
            .model = "sinks",
            .dp = 2,
            .checkpoint = kFull,
            .precision = Precision()}),
    testing::kCaseName);

/// A small model on one rank. Its first units (embedding, blocks, head) may be
/// frozen.
struct Model {
  Model(RankContext& context, bool offload, std::size_t num_frozen = 0)
      : llama(
            models::ModelConfig{
                .dim = 16,
                .layers = 3,
                .heads = 4,
                .kv_heads = 2,
                .head_dim = 4,
                .ffn_dim = 24,
                .vocab_size = 31,
                .max_seq_len = 8},
            models::LlamaOptions{
                .activation_checkpoint = kFull,
                .keep_attention = true}) {
    FullyShardOptions options{
        .seed = 5,
        .runtime = {.offload_activations = offload, .trace = true}};
    for (const auto& unit : llama->unit_modules()) {
      for (at::Tensor& p : unit->parameters()) {
        p.set_requires_grad(options.units.size() >= num_frozen);
      }
      options.units.push_back(unit.get());
    }
    runtime = fully_shard(*llama, context.mesh({{"dp", 1}}), options);
  }

  at::Tensor loss() {
    const at::Tensor tokens = at::arange(16).view({2, 8});
    return llama(tokens, tokens + 1);
  }
  const KeptActivations& kept() { return *runtime->executor().kept(); }
  std::int64_t count(ActionKind kind) {
    const RuntimeTrace trace = runtime->trace();
    return std::ranges::count(trace.actions, kind, &Action::kind);
  }
  std::vector<at::Tensor> gradients() {
    std::vector<at::Tensor> gradients;
    for (ParamGroup* group : runtime->groups()) {
      if (group->trainable()) {
        gradients.push_back(group->gradients().reduced().local().clone());
      }
    }
    return gradients;
  }

  models::Llama llama;
  std::shared_ptr<Runtime> runtime;
};

void expect_equal(
    const std::vector<at::Tensor>& got,
    const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].equal(want[i])) << "group " << i;
  }
}

void on_one_rank(const std::function<void(RankContext&)>& test) {
  run_ranks(1, test);
}

TEST(ActivationOffload, AnEvaluationMovesNothing) {
  on_one_rank([](RankContext& context) {
    Model model(context, true);
    {
      const at::NoGradGuard no_grad;
      model.loss();
    }
    EXPECT_EQ(model.kept().num_calls(), 0U);
    EXPECT_EQ(model.kept().host_nbytes(), 0);
    EXPECT_EQ(model.count(ActionKind::download), 0);
  });
}

TEST(ActivationOffload, TheLastBlockStaysOnTheDevice) {
  on_one_rank([](RankContext& context) {
    Model model(context, true);
    model.loss().backward();
    EXPECT_EQ(model.count(ActionKind::download), 3);
    EXPECT_EQ(model.count(ActionKind::drain_download), 2);
    EXPECT_EQ(model.count(ActionKind::upload), 2);
    EXPECT_EQ(model.count(ActionKind::release_kept), 3);
    EXPECT_EQ(model.kept().num_calls(), 0U);
  });
}

// Nothing would free what it stored before the next forward.
TEST(ActivationOffload, ABlockWithoutABackwardStoresNothing) {
  on_one_rank([](RankContext& context) {
    Model model(context, true, /*num_frozen=*/3);
    Model other(context, false, /*num_frozen=*/3);
    const at::Tensor loss = model.loss();
    EXPECT_EQ(model.kept().num_calls(), 1U);  // of 3 blocks
    loss.backward();
    EXPECT_EQ(model.kept().num_calls(), 0U);
    other.loss().backward();
    expect_equal(model.gradients(), other.gradients());
  });
}

TEST(ActivationOffload, AForwardWithoutItsBackwardFreesWhatItKept) {
  on_one_rank([](RankContext& context) {
    Model model(context, true);
    model.loss();
    model.loss().backward();
    EXPECT_EQ(model.kept().num_calls(), 0U);
    const std::int64_t nbytes = model.kept().host_nbytes();
    model.loss();
    model.loss().backward();
    EXPECT_EQ(model.kept().host_nbytes(), nbytes);
  });
}

TEST(ActivationOffload, TwoForwardsMayPrecedeTheirBackwards) {
  on_one_rank([](RankContext& context) {
    Model model(context, true);
    Model other(context, false);
    for (Model* each : {&model, &other}) {
      const at::Tensor first = each->loss();
      const at::Tensor second = each->loss();
      first.backward();
      second.backward();
    }
    expect_equal(model.gradients(), other.gradients());
    EXPECT_EQ(model.kept().num_calls(), 0U);
  });
}

TEST(ActivationOffload, ARetainedGraphReadsItAgain) {
  on_one_rank([](RankContext& context) {
    Model model(context, true);
    Model other(context, false);
    for (Model* each : {&model, &other}) {
      const at::Tensor loss = each->loss();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      EXPECT_ANY_THROW(loss.backward());
      each->runtime->reset();
      each->loss().backward();
    }
    expect_equal(model.gradients(), other.gradients());
    EXPECT_EQ(model.kept().num_calls(), 0U);
  });
}

/// Throws once, in a backward.
class Thrower : public GradientObserver {
 public:
  explicit Thrower(UnitId unit) : unit_(unit) {}
  void gradients_ready(Unit& unit, const SlotView&) override {
    if (unit.id() == unit_ && !std::exchange(thrown_, true)) {
      throw std::runtime_error("thrown by the test");
    }
  }

 private:
  UnitId unit_;
  bool thrown_ = false;
};

TEST(ActivationOffload, L7_AnExceptionEmptiesTheStack) {
  on_one_rank([](RankContext& context) {
    Model model(context, true);
    Model other(context, false);
    model.runtime->add_observer(std::make_shared<Thrower>(
        model.runtime->unit_of(*model.llama->blocks()[2])));
    EXPECT_ANY_THROW(model.loss().backward());
    EXPECT_GT(model.kept().num_calls(), 0U);
    model.loss().backward();
    other.loss().backward();
    expect_equal(model.gradients(), other.gradients());
    EXPECT_EQ(model.kept().num_calls(), 0U);
  });
}

TEST(ActivationOffload, GraphsAreRefused) {
  on_one_rank([](RankContext& context) {
    models::Llama llama(models::ModelConfig{
        .dim = 16,
        .layers = 1,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 4,
        .ffn_dim = 24,
        .vocab_size = 31,
        .max_seq_len = 8});
    FullyShardOptions options{
        .runtime = {
            .offload_activations = true,
            .graphs = {.enabled = true, .emulate_on_cpu = true}}};
    try {
      static_cast<void>(
          fully_shard(*llama, context.mesh({{"dp", 1}}), options));
      FAIL() << "expected an error";
    } catch (const Error& e) {
      EXPECT_THAT(
          e.what(),
          ::testing::HasSubstr("GraphOptions::enabled with "
                               "offload_activations"));
    }
  });
}

}  // namespace
}  // namespace flatshard::testing
