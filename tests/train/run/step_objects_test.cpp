// Tests the objects of a training step, each separately on one rank.
#include "flatshard/train/data/batches.h"
#include "flatshard/train/metrics/step_meter.h"
#include "flatshard/train/run/from_config.h"
#include "flatshard/train/run/nonfinite_guard.h"
#include "flatshard/train/run/signal_requests.h"

#include "flatshard/core/error.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <limits>
#include <thread>

namespace flatshard {
namespace {

using ::testing::HasSubstr;

Config config_of_batches() {
  Config config;
  config.data.train = {{.path = "random"}};
  config.training.seq_len = 8;
  config.training.local_batch_size = 2;
  config.training.global_batch_size = 6;
  return config;
}

TEST(Batches, HoldsAllMicrobatchesOfAStepAtAddressesThatStay) {
  const Config config = config_of_batches();
  models::ModelConfig model;
  model.vocab_size = 100;
  data::Loader loader = open_train_loader(run_options(config, model).data);
  const data::Loader reference = loader;
  data::Loader moved = loader;
  moved.advance();
  Batches batches(
      run_options(config, model).batches,
      Mesh::single(at::kCPU),
      loader);
  ASSERT_EQ(batches.num_microbatches(), 3);
  const void* address = batches.tokens(1).data_ptr();
  for (const data::Loader& expected : {reference, moved}) {
    batches.load_next();
    for (std::int64_t m = 0; m < 3; ++m) {
      std::vector<std::int64_t> tokens(16);
      std::vector<std::int64_t> targets(16);
      expected.read({.local_batch = 2, .microbatch = m}, tokens, targets);
      const auto check = [](const at::Tensor& got, const auto& wanted) {
        ASSERT_EQ(got.sizes(), (std::vector<std::int64_t>{2, 8}));
        EXPECT_TRUE(at::equal(got.reshape({16}), at::tensor(wanted)));
      };
      check(batches.tokens(m), tokens);
      check(batches.targets(m), targets);
    }
    EXPECT_EQ(batches.tokens(1).data_ptr(), address);
  }
  EXPECT_EQ(loader.state().samples_consumed, 12);
}

TEST(Batches, RanksThatShareSequencesHaveRunsOfTheirTokens) {
  const Config config = config_of_batches();
  models::ModelConfig model;
  model.vocab_size = 100;
  const auto options = run_options(config, model);
  data::Loader alone = open_train_loader(options.data);
  Batches all(options.batches, Mesh::single(at::kCPU), alone);
  all.load_next();
  testing::run_ranks(4, [&](testing::RankContext& context) {
    data::Loader loader = open_train_loader(options.data);
    const auto mesh = context.mesh({{"dp", 1}, {"cp", 4, AxisRole::sequence}});
    Batches batches(options.batches, mesh, loader);
    batches.load_next();
    ASSERT_EQ(batches.num_microbatches(), 3);
    for (std::int64_t m = 0; m < 3; ++m) {
      const auto check = [&](const at::Tensor& own, const at::Tensor& whole) {
        EXPECT_EQ(own.sizes(), (std::vector<std::int64_t>{2, 2}));
        EXPECT_TRUE(own.flatten().equal(
            whole.flatten().chunk(4)[static_cast<std::size_t>(context.rank)]));
      };
      check(batches.tokens(m), all.tokens(m));
      check(batches.targets(m), all.targets(m));
      EXPECT_FALSE(batches.target_share(m).defined());
    }
  });
}

TEST(Batches, ErrorsNameTheOption) {
  Config config = config_of_batches();
  config.data.train = {{.path = "/none/corpus"}};
  models::ModelConfig model;
  model.vocab_size = 100;
  try {
    open_train_loader(run_options(config, model).data);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("[data.train]"));
  }
}

TEST(SignalRequests, AreTakenOnce) {
  SignalRequests requests(Mesh::single(at::kCPU), /*log_freq=*/10);
  EXPECT_TRUE(requests.due(1));
  Requests asked = requests.take(/*step_ms=*/1);
  EXPECT_FALSE(asked.save);
  EXPECT_EQ(asked.stop_signal, 0);
  ::raise(SIGUSR1);
  EXPECT_TRUE(requests.take(1).save);
  EXPECT_FALSE(requests.take(1).save);
  ::raise(SIGINT);
  asked = requests.take(1);
  EXPECT_FALSE(asked.save);
  EXPECT_EQ(asked.stop_signal, SIGINT);
}

TEST(SignalRequests, OneThatReachesARankAfterTheOthersLookIsTheSame) {
  SignalRequests requests(Mesh::single(at::kCPU), /*log_freq=*/10);
  ::raise(SIGUSR1);
  EXPECT_TRUE(requests.take(/*step_ms=*/1).save);
  ::raise(SIGUSR1);
  std::this_thread::sleep_for(std::chrono::milliseconds(1001));
  EXPECT_FALSE(requests.take(1).save);
  ::raise(SIGUSR1);
  EXPECT_TRUE(requests.take(1).save);
}

NonfiniteGuard guard_of(config::OnNonfinite action) {
  return {action, {.mesh = Mesh::single(at::kCPU)}};
}

const at::Tensor& nan_norm() {
  static const at::Tensor norm =
      at::full({}, std::numeric_limits<float>::quiet_NaN());
  return norm;
}

TEST(NonfiniteGuard, ToStopLooksAtNormsLater) {
  NonfiniteGuard guard = guard_of(config::OnNonfinite::stop);
  EXPECT_TRUE(guard.accepts(1, at::ones({}), /*now=*/false));
  EXPECT_TRUE(guard.accepts(2, nan_norm(), false));
  EXPECT_TRUE(guard.accepts(3, nan_norm(), false));
  try {
    guard.accepts(4, at::ones({}), /*now=*/true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("step 2 is not finite, as was seen in step 4"));
  }
  guard.check_kept(4);  // reported once
  EXPECT_FALSE(guard.accepts(5, nan_norm(), true));
}

TEST(NonfiniteGuard, ToGoOnLooksAtOnce) {
  for (const auto action :
       {config::OnNonfinite::skip, config::OnNonfinite::rewind}) {
    NonfiniteGuard guard = guard_of(action);
    EXPECT_TRUE(guard.accepts(1, at::ones({}), /*now=*/false));
    EXPECT_FALSE(guard.accepts(2, nan_norm(), false))
        << config::word_of(action);
    guard.check_kept(2);
  }
}

TEST(StepMeter, WaitsAreNotTheHostsTime) {
  StepMeter meter({.tokens = 100, .num_ranks = 4, .flops_per_token = 10});
  EXPECT_EQ(meter.step_ms(), 0);
  for (int i = 0; i < 2; ++i) {
    meter.begin_step();
    EXPECT_EQ(meter.data([] { return 1; }), 1);
    meter.device_wait([] {});
    meter.end_step();
  }
  StepMetrics metrics;
  meter.measure(metrics);
  EXPECT_EQ(metrics.step_ms, meter.step_ms());
  EXPECT_GE(metrics.data_ms, 0);
  EXPECT_GE(metrics.host_ms, 0);
  EXPECT_LE(metrics.data_ms + metrics.host_ms, metrics.step_ms);
  EXPECT_DOUBLE_EQ(metrics.tokens_per_s, 100 / (metrics.step_ms * 1e-3));
  EXPECT_DOUBLE_EQ(metrics.tokens_per_s_per_rank, metrics.tokens_per_s / 4);
  EXPECT_DOUBLE_EQ(
      metrics.tflops_per_rank,
      metrics.tokens_per_s_per_rank * 10 * 1e-12);
  EXPECT_FALSE(metrics.mfu);
}

}  // namespace
}  // namespace flatshard
