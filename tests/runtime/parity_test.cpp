// N ranks give the losses and weights of one rank that runs the N local
// batches as N microbatches in rank order: for every strategy, number of
// microbatches, precision and prefetch depth, with delays on the streams.
#include "flatshard/optim/adamw.h"
#include "tests/runtime/training.h"

#include <gtest/gtest.h>

#include <tuple>

namespace flatshard {
namespace {

using testing::train_plain;
using testing::train_toy;
using testing::TrainingCase;
using testing::TrainingResult;
using testing::weight_distance;

double tolerance(const TrainingCase& c) {
  return testing::training_tolerance(c, c.world());
}

// Losses are summed over the ranks in the order in which these come.
void expect_same_bits(const TrainingResult& a, const TrainingResult& b) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    EXPECT_NEAR(a.losses[i], b.losses[i], 1e-12);
  }
  EXPECT_EQ(weight_distance(a, b), 0);
}

void expect_equal(
    const TrainingResult& a,
    const TrainingResult& b,
    double bound) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    EXPECT_NEAR(a.losses[i], b.losses[i], bound * std::abs(a.losses[i]));
    EXPECT_NEAR(a.norms[i], b.norms[i], bound * std::abs(a.norms[i]));
  }
  EXPECT_LE(weight_distance(a, b), bound);
}

TrainingCase one_rank(TrainingCase c) {
  c.batch_world = c.world();
  c.mesh = {1};
  c.strategy = "zero0";
  c.scaling = GradScaling::mean;
  c.no_sync = false;
  c.max_delay_us = 0;
  return c;
}

struct Layout {
  const char* strategy;
  std::vector<std::int64_t> mesh;
};

std::string name_of(const Layout& layout) {
  std::string name = layout.strategy;
  for (const std::int64_t size : layout.mesh) {
    name += "_" + std::to_string(size);
  }
  return name;
}

class Parity : public ::testing::TestWithParam<Layout> {};

TEST_P(Parity, EqualsOneRankWithMicrobatches) {
  for (const int microbatches : {1, 3}) {
    for (const bool bf16 : {false, true}) {
      TrainingCase c{
          .strategy = GetParam().strategy,
          .mesh = GetParam().mesh,
          .microbatches = microbatches};
      c.max_delay_us = 200;
      if (bf16) {
        c.precision = Precision{.reduce = at::kBFloat16};
      }
      // Each rank multiplies matrices of the shapes that one rank has, so with
      // the same kernels, and two gradients have one sum. The norm is summed
      // over shards in another order: clipping would make the last bit of every
      // weight depend on the number of ranks.
      const bool bitwise = c.world() == 2 && !bf16 && microbatches == 1;
      c.max_norm = bitwise ? 1e9 : 1.0;
      const TrainingResult expected = train_toy(one_rank(c));
      for (const int prefetch : {0, 1, 3}) {
        SCOPED_TRACE(fmt::format(
            "microbatches {} bf16 {} prefetch {}",
            microbatches,
            bf16,
            prefetch));
        c.prefetch = prefetch;
        const TrainingResult result = train_toy(c);
        expect_equal(expected, result, tolerance(c));
        if (bitwise) {
          EXPECT_EQ(weight_distance(expected, result), 0);
          EXPECT_EQ(expected.losses, result.losses);
        }
      }
    }
  }
}

TEST_P(Parity, GathersByCopiesChangeNoBit) {
  const std::string strategy = GetParam().strategy;
  if (strategy.find("zero3") == std::string::npos && strategy != "hsdp" &&
      strategy != "hfsdp") {
    GTEST_SKIP() << "gathers nothing between changes of the weights";
  }
  struct Variant {
    int microbatches;
    int prefetch;
    CopyEngines::Gathers gathers;
    bool evaluate;
  };
  for (const auto& [microbatches, prefetch, gathers, evaluate] :
       {Variant{1, 0, CopyEngines::Gathers::forward, false},
        Variant{1, 3, CopyEngines::Gathers::all, false},
        Variant{1, 1, CopyEngines::Gathers::all, true},
        Variant{3, 3, CopyEngines::Gathers::forward, false}}) {
    TrainingCase c{
        .strategy = strategy,
        .mesh = GetParam().mesh,
        .microbatches = microbatches,
        .steps = 5,
        .prefetch = prefetch};
    c.evaluate = evaluate;
    const TrainingResult expected = train_toy(c);
    c.copy_engines.gathers = gathers;
    c.overlap_optimizer = prefetch > 0;
    c.max_delay_us = 500;
    SCOPED_TRACE(fmt::format(
        "microbatches {} prefetch {} evaluate {}",
        microbatches,
        prefetch,
        evaluate));
    expect_same_bits(expected, train_toy(c));
  }
}

TEST_P(Parity, SlotsOnDemandChangeNoBit) {
  for (const int microbatches : {1, 3}) {
    TrainingCase c{
        .strategy = GetParam().strategy,
        .mesh = GetParam().mesh,
        .microbatches = microbatches,
        .steps = 5};
    const TrainingResult expected = train_toy(c);
    c.slots_on_demand = true;
    c.max_delay_us = 500;
    SCOPED_TRACE(microbatches);
    expect_same_bits(expected, train_toy(c));
  }
}

TEST_P(Parity, ReductionsByCopiesChangeNoBit) {
  if (GetParam().strategy == std::string("zero0")) {
    GTEST_SKIP() << "scatters nothing";
  }
  for (const bool bf16 : {false, true}) {
    TrainingCase c{
        .strategy = GetParam().strategy,
        .mesh = GetParam().mesh,
        .microbatches = bf16 ? 1 : 3,
        .precision =
            bf16 ? Precision{.reduce = at::kBFloat16} : Precision::full()};
    const TrainingResult expected = train_toy(c);
    // So little that every reduction is many pieces.
    c.copy_engines = {CopyEngines::Gathers::all, 4096};
    c.max_delay_us = 300;
    SCOPED_TRACE(bf16);
    expect_same_bits(expected, train_toy(c));
  }
}

TEST_P(Parity, AnOptimizerBesideTheForwardChangesNoBit) {
  for (const char* optimizer : {"adamw", "sgd"}) {
    for (const int prefetch : {0, 3}) {
      TrainingCase c{
          .strategy = GetParam().strategy,
          .mesh = GetParam().mesh,
          .prefetch = prefetch,
          .optimizer = optimizer};
      const TrainingResult expected = train_toy(c);
      c.overlap_optimizer = true;
      c.max_delay_us = 500;
      const TrainingResult result = train_toy(c);
      SCOPED_TRACE(optimizer);
      expect_same_bits(expected, result);
    }
  }
}

TEST_P(Parity, WhatSavesMemoryChangesNoBit) {
  for (const int microbatches : {1, 3}) {
    TrainingCase c{
        .strategy = GetParam().strategy,
        .mesh = GetParam().mesh,
        .microbatches = microbatches,
        .precision = {.reduce = at::kBFloat16},
        // A norm of bfloat16 may be summed up in another order.
        .max_norm = 1e9};
    const TrainingResult expected = train_toy(c);
    c.grads_in_reduce_dtype = true;
    c.keep_compute_weights = false;
    c.max_delay_us = 200;
    const TrainingResult result = train_toy(c);
    SCOPED_TRACE(microbatches);
    expect_same_bits(expected, result);
  }
}

TEST_P(Parity, OffloadChangesNoBit) {
  for (const bool bf16 : {false, true}) {
    for (const bool keeps : {false, true}) {
      const bool overlaps = bf16 == keeps;
      TrainingCase c{
          .strategy = GetParam().strategy,
          .mesh = GetParam().mesh,
          .microbatches = keeps ? 3 : 1,
          .optimizer = overlaps ? "sgd" : "adamw"};
      c.precision =
          bf16 ? Precision{.reduce = at::kBFloat16} : Precision::full();
      c.keep_compute_weights = keeps;
      c.evaluate = !keeps;
      const TrainingResult expected = train_toy(c);
      c.offload = true;
      c.overlap_optimizer = overlaps;
      c.max_delay_us = 200;
      const TrainingResult result = train_toy(c);
      SCOPED_TRACE(fmt::format("bf16 {} keeps {}", bf16, keeps));
      expect_same_bits(expected, result);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    Parity,
    ::testing::Values(
        Layout{"zero0", {2}},
        Layout{"zero1", {2}},
        Layout{"zero2", {2}},
        Layout{"zero3", {2}},
        Layout{"zero0", {3}},
        Layout{"zero1", {3}},
        Layout{"zero2", {5}},
        Layout{"zero3", {1}},
        Layout{"zero3", {3}},
        Layout{"zero3", {5}},
        Layout{"zero3", {8}},
        Layout{"hsdp", {2, 2}},
        Layout{"hfsdp", {2, 2}},
        Layout{"hsdp", {2, 1}},
        Layout{"hfsdp", {1, 2}},
        Layout{"hfsdp", {2, 4}},
        Layout{"zero3", {2, 2}},
        Layout{"zero1", {2, 2}},
        Layout{"zero2", {2, 2}},
        Layout{"hsdp_zero1", {2, 2}},
        Layout{"hsdp_zero2", {2, 2}}),
    [](const auto& info) { return name_of(info.param); });

TEST(CopyEngines, TakeNoCollectiveButOneFenceAfterEachChange) {
  for (const CopyEngines::Gathers asked :
       {CopyEngines::Gathers::none,
        CopyEngines::Gathers::forward,
        CopyEngines::Gathers::all}) {
    testing::run_ranks(2, [&](testing::RankContext& context) {
      const auto log = std::make_shared<CollectiveLog>();
      context.log = log;
      constexpr std::int64_t kDim = 16;
      testing::ToyModel model(kDim, 4, /*with_root_parameter=*/false);
      const auto runtime = fully_shard(
          *model,
          context.mesh(),
          {.units = model->unit_modules(),
           .group = {.precision = Precision::full()},
           .runtime = {.copy_engines = {.gathers = asked}}});
      AdamW optimizer(runtime->groups(), {});
      const auto forward_backward = [&] {
        model(at::ones({2, kDim}), at::zeros({2, kDim})).backward();
      };
      const auto count = [&](CollectiveKind kind) {
        std::int64_t n = 0;
        for (const CollectiveRecord& record : log->records()) {
          n += record.kind == kind &&
               record.communicator.starts_with("dp.gather");
        }
        return n;
      };
      const auto num_groups =
          static_cast<std::int64_t>(runtime->groups().size());
      for (int step = 1; step <= 3; ++step) {
        for (const bool changed : {true, false}) {
          runtime->synchronize();
          log->clear();
          forward_backward();
          runtime->synchronize();
          const std::int64_t gathers = count(CollectiveKind::all_gather);
          if (asked == CopyEngines::Gathers::none) {
            EXPECT_GE(gathers, 2 * num_groups - 1);  // the last stays
          } else if (asked == CopyEngines::Gathers::forward) {
            EXPECT_GE(gathers, num_groups - 1);
            EXPECT_LE(gathers, num_groups);
          } else {
            EXPECT_EQ(gathers, 0);
          }
          EXPECT_EQ(
              count(CollectiveKind::fence),
              asked != CopyEngines::Gathers::none && changed ? num_groups : 0);
        }
        optimizer.step(1e-3);
        optimizer.zero_grad();
      }
    });
  }
}

TEST(Parity, OneRankEqualsPlainAutograd) {
  for (const char* optimizer : {"adamw", "sgd"}) {
    for (const double max_norm : {0.05, 100.0}) {
      TrainingCase c{.microbatches = 3, .optimizer = optimizer};
      c.max_norm = max_norm;
      expect_equal(train_plain(c), train_toy(c), tolerance(c));
    }
  }
}

TEST(Parity, ScalingModesAgree) {
  for (const GradScaling scaling :
       {GradScaling::pre_scaled, GradScaling::sum}) {
    for (const char* strategy : {"zero1", "zero3"}) {
      TrainingCase c{.strategy = strategy, .mesh = {4}, .microbatches = 2};
      c.scaling = scaling;
      expect_equal(train_toy(one_rank(c)), train_toy(c), tolerance(c));
    }
  }
}

TEST(Parity, NoSyncAccumulatesUnsharded) {
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
    TrainingCase c{.strategy = strategy, .mesh = {3}, .microbatches = 3};
    c.no_sync = true;
    expect_equal(train_toy(one_rank(c)), train_toy(c), tolerance(c));
  }
}

TEST(Parity, KeepingWeightsGatheredChangesNothing) {
  TrainingCase c{.mesh = {3}, .microbatches = 2};
  const TrainingResult expected = train_toy(c);
  c.reshard_after_forward = false;
  EXPECT_EQ(weight_distance(expected, train_toy(c)), 0);
}

// Weights that stay sharded among adjacent ranks from forward to backward.
TEST(Parity, PostForwardShardsChangeNoBit) {
  struct Variant {
    const char* strategy;
    std::vector<std::int64_t> mesh;
    int microbatches = 1;
    bool no_sync = false;
    int prefetch = 1;
    bool narrow = false;
    bool keep_compute_weights = true;
    bool on_demand = false;
    bool copies = false;
    bool offload = false;
    bool evaluate = false;
  };
  for (const Variant& v : std::vector<Variant>{
           {"zero3", {4}},
           {"zero3", {4}, 3},
           {"zero3", {4}, 3, true, 3},
           {"zero3", {4}, 2, false, 0, true},
           {"zero3", {4}, 1, false, 2, true, false, true},
           {"zero3", {4}, 2, false, 1, false, true, true, true},
           {"zero3", {4}, 1, false, 1, true, false, false, false, true},
           {"zero3", {4}, 1, false, 1, false, true, true, false, false, true},
           {"zero3", {2, 2}, 2},
           {"hfsdp", {2, 4}, 2},
           {"hsdp", {2, 4}, 2, false, 1, true}}) {
    TrainingCase c{
        .strategy = v.strategy,
        .mesh = v.mesh,
        .microbatches = v.microbatches,
        .steps = 4,
        .prefetch = v.prefetch};
    c.no_sync = v.no_sync;
    c.precision =
        v.narrow ? Precision{.reduce = at::kBFloat16} : Precision::full();
    c.keep_compute_weights = v.keep_compute_weights;
    c.slots_on_demand = v.on_demand;
    c.offload = v.offload;
    c.evaluate = v.evaluate;
    const TrainingResult expected = train_toy(c);
    c.post_forward_ranks = 2;
    c.max_delay_us = 500;
    if (v.copies) {
      c.copy_engines = CopyEngines::all();
    }
    SCOPED_TRACE(fmt::format(
        "{} {} microbatches {}",
        v.strategy,
        c.world(),
        v.microbatches));
    expect_same_bits(expected, train_toy(c));
  }
}

TEST(Parity, GranularityChangesNothing) {
  TrainingCase c{.strategy = "zero3", .mesh = {3}};
  const TrainingResult expected = train_toy(c);
  for (const Granularity& g :
       {Granularity::row(), Granularity::block(2), Granularity::tensor()}) {
    for (const char* strategy : {"zero1", "zero2", "zero3"}) {
      c.granularity = g;
      c.strategy = strategy;
      SCOPED_TRACE(strategy + g.to_string());
      expect_equal(expected, train_toy(c), tolerance(c));
    }
  }
}

TEST(Parity, SubMeshOfALargerMesh) {
  TrainingCase c{.strategy = "zero3", .mesh = {2}};
  const TrainingResult expected = train_toy(c);
  std::mutex mutex;
  std::vector<TrainingResult> replicas(2);
  for (TrainingResult& replica : replicas) {
    replica.losses.assign(c.steps, 0.0);
  }
  testing::run_ranks(4, [&](testing::RankContext& context) {
    const auto mesh = context.mesh({{"replica", 2}, {"dp", 2}});
    testing::train_rank(
        c,
        mesh->sub_mesh({"dp"}),
        mutex,
        replicas[static_cast<std::size_t>(mesh->coordinate("replica"))]);
  });
  for (const TrainingResult& replica : replicas) {
    EXPECT_EQ(weight_distance(expected, replica), 0);
    EXPECT_EQ(expected.losses, replica.losses);
  }
}

TEST(Parity, B40_RootWithoutParametersTrains) {
  TrainingCase c{.mesh = {2}};
  c.with_root_parameter = false;
  c.max_norm = 1e9;
  c.max_delay_us = 1000;
  const TrainingResult result = train_toy(c);
  EXPECT_LT(result.losses.back(), result.losses.front() * 10);
  EXPECT_EQ(weight_distance(train_toy(one_rank(c)), result), 0);
}

TEST(Parity, B46_NoSyncOverTwoAxesLosesNoMicrobatch) {
  for (const char* strategy : {"hsdp", "hfsdp"}) {
    TrainingCase c{.strategy = strategy, .mesh = {2, 2}, .microbatches = 3};
    c.no_sync = true;
    SCOPED_TRACE(strategy);
    expect_equal(train_toy(one_rank(c)), train_toy(c), tolerance(c));
  }
}

TEST(Parity, B61_TwoAxesEqualOneRank) {
  for (const char* strategy : {"hsdp", "hfsdp", "hsdp_zero1", "hsdp_zero2"}) {
    TrainingCase c{.strategy = strategy, .mesh = {2, 2}, .microbatches = 3};
    SCOPED_TRACE(strategy);
    expect_equal(train_toy(one_rank(c)), train_toy(c), tolerance(c));
  }
}

}  // namespace
}  // namespace flatshard
