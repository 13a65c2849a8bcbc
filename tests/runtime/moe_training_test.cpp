// Models with experts, sharded: N ranks against one.
#include "tests/runtime/moe_training.h"
#include "tests/support/case_name.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace flatshard::testing {
namespace {

using models::ActivationCheckpoint;

class MoeTraining : public ::testing::TestWithParam<MoeRun> {};

INSTANTIATE_TEST_SUITE_P(
    Cases,
    MoeTraining,
    ::testing::Values(
        MoeRun{.name = "Zero0", .strategy = "zero0"},
        MoeRun{
            .name = "Zero1Clips",
            .strategy = "zero1",
            .microbatches = 3,
            .max_norm = 0.5},
        MoeRun{
            .name = "Zero2",
            .strategy = "zero2",
            .checkpoint = ActivationCheckpoint::full},
        MoeRun{.name = "Zero3"},
        MoeRun{
            .name = "Zero3Recomputes",
            .microbatches = 3,
            .checkpoint = ActivationCheckpoint::full,
            .capacity_factor = 1.0,
            .max_norm = 0.5},
        MoeRun{
            .name = "Zero3RecomputesExperts",
            .checkpoint = ActivationCheckpoint::selective,
            .reshard_after_forward = false},
        MoeRun{.name = "Zero3On4", .mesh = {4}},
        MoeRun{
            .name = "Hsdp",
            .strategy = "hsdp",
            .mesh = {2, 2},
            .checkpoint = ActivationCheckpoint::full},
        MoeRun{
            .name = "Hfsdp",
            .strategy = "hfsdp",
            .mesh = {2, 2},
            .max_norm = 0.5},
        MoeRun{
            .name = "Zero0Travels",
            .strategy = "zero0",
            .mesh = {1, 2},
            .exchange = MoeExchange::collective},
        MoeRun{
            .name = "Zero1Travels",
            .strategy = "zero1",
            .mesh = {2, 2},
            .max_norm = 0.5,
            .exchange = MoeExchange::collective},
        MoeRun{
            .name = "Zero2Travels",
            .strategy = "zero2",
            .mesh = {1, 4},
            .microbatches = 3,
            .checkpoint = ActivationCheckpoint::full,
            .exchange = MoeExchange::collective},
        MoeRun{
            .name = "Zero3Travels",
            .mesh = {1, 2},
            .exchange = MoeExchange::collective},
        MoeRun{
            .name = "Zero3TravelsAndDrops",
            .mesh = {2, 2},
            .checkpoint = ActivationCheckpoint::selective,
            .capacity_factor = 1.0,
            .max_norm = 0.5,
            .exchange = MoeExchange::collective},
        MoeRun{
            .name = "HsdpTravels",
            .strategy = "hsdp",
            .mesh = {2, 1, 2},
            .checkpoint = ActivationCheckpoint::full,
            .max_norm = 0.5,
            .exchange = MoeExchange::collective},
        MoeRun{
            .name = "HfsdpTravels",
            .strategy = "hfsdp",
            .mesh = {2, 1, 2},
            .exchange = MoeExchange::collective},
        MoeRun{
            .name = "Zero3TravelsToParts",
            .mesh = {1, 2, 2},
            .checkpoint = ActivationCheckpoint::full,
            .capacity_factor = 1.0,
            .max_norm = 0.5,
            .exchange = MoeExchange::collective,
            .cuts_width = true},
        MoeRun{
            .name = "Zero3IsCopiedAndClips",
            .mesh = {1, 2},
            .checkpoint = ActivationCheckpoint::full,
            .max_norm = 0.5,
            .exchange = MoeExchange::copies}),
    testing::kCaseName);

TEST_P(MoeTraining, EqualsOneRank) {
  const MoeRun& run = GetParam();
  const MoeResult want = train_moe(moe_reference(run));
  const MoeResult got = train_moe(run);
  const MoeDistance distance = moe_distance(got, want);
  EXPECT_LE(distance.largest, moe_tolerance(run)) << distance.where;
  ASSERT_EQ(want.biases.size(), 2U);
  for (const at::Tensor& bias : want.biases) {
    EXPECT_GT(bias.abs().max().item<double>(), 0);
  }
  EXPECT_EQ(want.losses.size(), 3U * run.sequences());
}

// Experts run between the graphs of attention and of routers' scores.
TEST(MoeGraphs, WhatStandsBeforeAChoiceIsReplayed) {
  struct Case {
    MoeRun run;
    // Per step and microbatch: forwards and backwards of three attentions, a
    // dense layer, two routers and their shared experts. A recomputed region is
    // replayed once more.
    int replays = 16;
  };
  constexpr int kReplayedSteps = 2;
  const Case cases[] = {
      {.run = {.name = "alone", .mesh = {1}, .microbatches = 3}},
      {.run = {.name = "zero3", .max_norm = 0.2}},
      {.run =
           {.name = "ep 2",
            .mesh = {1, 2},
            .microbatches = 3,
            .exchange = MoeExchange::collective}},
      {.run =
           {.name = "ep 2 by copies, recomputed",
            .mesh = {2, 2},
            .checkpoint = ActivationCheckpoint::full,
            .max_norm = 0.2,
            .exchange = MoeExchange::copies},
       .replays = 24},
      {.run =
           {.name = "ep 2 under HSDP, feed-forward halves recomputed",
            .strategy = "hsdp",
            .mesh = {2, 1, 2},
            .checkpoint = ActivationCheckpoint::selective,
            .exchange = MoeExchange::collective},
       .replays = 21}};
  for (const auto& [plain, replays] : cases) {
    MoeRun graphs = plain;
    graphs.graphs = true;
    const MoeResult got = train_moe(graphs);
    const MoeDistance distance = moe_distance(got, train_moe(plain));
    EXPECT_EQ(distance.largest, 0) << plain.name << ": " << distance.where;
    EXPECT_EQ(got.num_replays, kReplayedSteps * plain.microbatches * replays)
        << plain.name;
  }
}

// Experts of which each rank has a part of the width: 20 steps give the bits of
// eager ones.
TEST(MoeGraphs, PartsOfBlocksWithCutExpertsAreReplayed) {
  struct Scope {
    std::set<std::string> regions;
    // Per step: forwards and backwards of three attentions, two routers and
    // their shared experts. The order of rows has no backward.
    int replays;
  };
  constexpr int kSteps = 20;
  const Scope scopes[] = {
      {{"attn"}, 6},
      {{"attn", "moe_router", "moe_preprocess"}, 16},
      {{"moe_router"}, 8}};
  for (const double capacity : {0.0, 1.0}) {
    const MoeRun plain{
        .mesh = {1, 2, 2},
        .capacity_factor = capacity,
        .max_norm = 0.2,
        .exchange = MoeExchange::collective,
        .cuts_width = true,
        .steps = kSteps};
    const MoeResult want = train_moe(plain);
    for (const auto& [regions, replays] : scopes) {
      MoeRun graphs = plain;
      graphs.graphs = true;
      graphs.regions = regions;
      const MoeResult got = train_moe(graphs);
      const MoeDistance distance = moe_distance(got, want);
      EXPECT_EQ(distance.largest, 0) << distance.where;
      EXPECT_EQ(got.num_replays, (kSteps - 1) * replays);
    }
  }
}

}  // namespace
}  // namespace flatshard::testing
