// The 1F1B schedule of ranks that divide the experts among them.
#include "tests/overlap/overlap_moe.h"
#include "tests/support/message_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>

namespace flatshard::testing {
namespace {

std::vector<MoeOverlapCase> whole_matrix() {
  std::vector<MoeOverlapCase> cases;
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3", "hsdp"}) {
    for (const int ep : {2, 4}) {
      for (const int microbatches : {2, 3, 5}) {
        for (int bits = 0; bits < 8; ++bits) {
          const auto number = static_cast<int>(cases.size());
          const bool gathers = std::string(strategy) == "zero3";
          cases.push_back(
              {.strategy = strategy,
               // Experts that are all-gathered or stay unsharded.
               .edp = ep == 2 && gathers ? 2 : 1,
               .ep = ep,
               .copies = (bits + microbatches + number / 8) % 2 == 0,
               .microbatches = microbatches,
               .options = {
                   .delay_wgrad = (bits & 1) != 0,
                   .recompute = (bits & 2) != 0,
                   .shared_experts = (bits & 4) != 0}});
        }
      }
    }
  }
  return cases;
}

std::set<std::string> pairs_of(const MoeOverlapCase& c) {
  const std::vector<std::string> values{
      c.strategy,
      "ep" + std::to_string(c.ep),
      "m" + std::to_string(c.microbatches),
      c.copies ? "c1" : "c0",
      c.options.delay_wgrad ? "d1" : "d0",
      c.options.recompute ? "r1" : "r0",
      c.options.shared_experts ? "s1" : "s0"};
  std::set<std::string> pairs;
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      pairs.insert(values[i] + values[j]);
    }
  }
  return pairs;
}

// Returns all pairs of two values that some case of the matrix has.
std::vector<MoeOverlapCase> pairwise() {
  const auto all = whole_matrix();
  std::set<std::string> missing;
  for (const MoeOverlapCase& c : all) {
    missing.merge(pairs_of(c));
  }
  std::vector<MoeOverlapCase> chosen;
  while (!missing.empty()) {
    const auto gain = [&](const MoeOverlapCase& c) {
      return std::ranges::count_if(pairs_of(c), [&](const auto& pair) {
        return missing.contains(pair);
      });
    };
    chosen.push_back(*std::ranges::max_element(all, {}, gain));
    for (const auto& pair : pairs_of(chosen.back())) {
      missing.erase(pair);
    }
  }
  return chosen;
}

class OverlapExperts : public ::testing::TestWithParam<MoeOverlapCase> {};

TEST_P(OverlapExperts, P11_EqualPlainAccumulation) {
  MoeOverlapCase plain = GetParam();
  plain.with_runner = false;
  expect_same(train_overlapped_moe(GetParam()), train_overlapped_moe(plain));
}

const auto name_of = [](const auto& info) { return info.param.name(); };
INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    OverlapExperts,
    ::testing::ValuesIn(pairwise()),
    name_of);
// --gtest_also_run_disabled_tests --gtest_filter='DISABLED_Whole*'
INSTANTIATE_TEST_SUITE_P(
    DISABLED_Whole,
    OverlapExperts,
    ::testing::ValuesIn(whole_matrix()),
    name_of);

// Each microbatch has separate graphs: all regions are replayed, where the plan
// has their weights and gradients in that microbatch.
class OverlapGraphs : public ::testing::TestWithParam<MoeOverlapCase> {};

TEST_P(OverlapGraphs, EqualTheScheduleWithoutThem) {
  MoeOverlapCase eager = GetParam();
  eager.steps = 5;
  MoeOverlapCase graphs = eager;
  graphs.regions = {"attn", "mlp", "moe_router"};
  const MoeOverlapResult got = train_overlapped_moe(graphs);
  expect_same(got, train_overlapped_moe(eager));
  const std::int64_t shared =
      eager.options.shared_experts ? eager.layers - eager.dense_layers : 0;
  // Each layer's attn, and its mlp or moe_router.
  const std::int64_t in_a_step =
      std::int64_t{eager.microbatches} * (2 * eager.layers + shared);
  const std::int64_t replays =
      in_a_step * (eager.steps - MoeOverlapCase::kWarmupSteps);
  ASSERT_EQ(got.graphs.size(), static_cast<std::size_t>(eager.world()));
  for (const auto& [rank, stats] : got.graphs) {
    EXPECT_EQ(
        stats.forward_replays,
        (eager.options.recompute ? 2 : 1) * replays);
    EXPECT_EQ(stats.backward_replays, replays);
    EXPECT_THAT(stats.fallbacks, ::testing::IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Some,
    OverlapGraphs,
    ::testing::Values(
        MoeOverlapCase{.ep = 2, .microbatches = 2},
        MoeOverlapCase{
            .strategy = "zero1",
            .edp = 1,
            .ep = 2,
            .copies = true,
            .options = {.shared_experts = true}},
        MoeOverlapCase{
            .edp = 1,
            .ep = 2,
            .options = {.in_flight = 3, .delay_wgrad = true}},
        MoeOverlapCase{
            .edp = 1,
            .ep = 2,
            .options =
                {.delay_wgrad = true,
                 .recompute = true,
                 .shared_experts = true}}),
    name_of);

// Attention runs once, and what follows it twice.
TEST(OverlapSelective, RecomputesWhatFollowsAttention) {
  for (const bool delay : {false, true}) {
    MoeOverlapCase c{
        .edp = 1,
        .ep = 2,
        .options =
            {.delay_wgrad = delay, .recompute = true, .shared_experts = true},
        .steps = 4,
        .selective = true};
    MoeOverlapCase plain = c;
    plain.with_runner = false;
    const MoeOverlapResult want = train_overlapped_moe(plain);
    expect_same(train_overlapped_moe(c), want);
    for (const auto& [region, runs] :
         {std::pair("attn", 1), {"moe_router", 2}}) {
      c.regions = {region};
      const MoeOverlapResult got = train_overlapped_moe(c);
      expect_same(got, want);
      const GraphStats& stats = got.graphs.at(0);
      EXPECT_GT(stats.backward_replays, 0) << region;
      EXPECT_EQ(stats.forward_replays, runs * stats.backward_replays) << region;
      EXPECT_THAT(stats.fallbacks, ::testing::IsEmpty());
    }
  }
}

// Weights that the program unsharded use more buffers than the plan has: in
// that step some are at other addresses.
TEST(OverlapGraphsThat, FindASlotElsewhereRunEagerly) {
  MoeOverlapCase c{
      .layers = 6,
      .steps = 8,
      .before_step = [](MoeOverlapTrainer& trainer, int step) {
        if (step == 4) {
          for (const auto& unit : trainer.llama->unit_modules()) {
            trainer.runtime->gathers().unshard(trainer.runtime->unit_of(*unit));
          }
        }
      }};
  const MoeOverlapResult eager = train_overlapped_moe(c);
  c.regions = {"attn", "moe_router"};
  const MoeOverlapResult graphs = train_overlapped_moe(c);
  expect_same(graphs, eager);
  const GraphStats& stats = graphs.graphs.at(0);
  EXPECT_THAT(
      stats.fallbacks,
      ::testing::Contains(::testing::Key(
          ::testing::HasSubstr("the unit's weights are at other addresses"))));
  EXPECT_GT(stats.forward_replays, 2 * c.microbatches * c.layers);
}

// Microbatches of steps without a runner have one set of graphs again.
TEST(OverlapGraphsThat, OutliveTheirRunnerAreRecordedAnew) {
  constexpr int kOfRunner = 4;
  MoeOverlapCase c{
      .steps = kOfRunner + 4,
      .before_step = [](MoeOverlapTrainer& trainer, int step) {
        if (step == kOfRunner) {
          trainer.runner.reset();
        }
      }};
  const MoeOverlapResult eager = train_overlapped_moe(c);
  c.regions = {"attn"};
  const MoeOverlapResult graphs = train_overlapped_moe(c);
  expect_same(graphs, eager);
  const GraphStats& stats = graphs.graphs.at(0);
  EXPECT_THAT(stats.fallbacks, ::testing::IsEmpty());
  EXPECT_EQ(
      stats.backward_replays,
      (c.steps - 2 * MoeOverlapCase::kWarmupSteps) * c.microbatches * c.layers);
}

TEST(OverlapGraphsThat, DoNotGoWithItAreRefusedByName) {
  const auto refusal = [](const MoeOverlapCase& c) {
    std::string said;
    run_ranks(c.world(), [&](RankContext& context) {
      const std::string message =
          message_of([&] { MoeOverlapTrainer(c, context.mesh(c.axes())); });
      if (context.rank == 0) {
        said = message;
      }
    });
    return said;
  };
  EXPECT_THAT(
      refusal({.regions = {"block"}}),
      ::testing::HasSubstr("expected parts of blocks (attn, moe_router, mlp)"));
  EXPECT_THAT(
      refusal(
          {.regions = {"attn"},
           .change =
               [](FullyShardOptions& sharding) {
                 sharding.float8_of = [](const std::string& name,
                                         const std::vector<std::int64_t>&)
                     -> std::optional<Float8Format> {
                   if (name.find("self_attn") == std::string::npos) {
                     return std::nullopt;
                   }
                   return Float8Format{};
                 };
               }}),
      ::testing::HasSubstr("the planes of each are at other addresses"));
}

/// Returns the all-to-alls of a step of a plan: how many numbers a row has.
std::vector<std::int64_t> rows_of(const PlanStep& step) {
  constexpr std::int64_t kCounts = 1;  // numbers of an expert
  constexpr std::int64_t kRow = 32;
  constexpr std::int64_t kWeight = 1;
  switch (step.node) {
    case PlanNode::attend:
      // A routing is made once. The first layer is dense.
      return step.pass == PlanPass::forward && step.layer > 0
                 ? std::vector{kCounts}
                 : std::vector<std::int64_t>{};
    case PlanNode::dispatch:
      return {kRow, kWeight};
    case PlanNode::combine:
      return {kRow};
    default:
      return {};
  }
}

TEST(OverlapExchange, RanksExchangeWhatThePlanSays) {
  for (const bool recompute : {false, true}) {
    const MoeOverlapCase c{
        .ep = 2,
        .options = {.delay_wgrad = true, .recompute = recompute}};
    std::mutex mutex;
    std::map<int, std::vector<std::string>> collectives;
    run_ranks(c.world(), [&](RankContext& context) {
      MoeOverlapTrainer trainer(c, context.mesh(c.axes()));
      for (int step = 0; step < 2; ++step) {
        trainer.runtime->synchronize();
        context.log->clear();
        trainer.runtime->clear_trace();
        trainer.forward_backward(step);
        trainer.runtime->synchronize();
        std::vector<std::int64_t> want;
        for (const PlanStep& s : trainer.runner->plan()) {
          const auto rows = rows_of(s);
          want.insert(want.end(), rows.begin(), rows.end());
        }
        std::vector<std::int64_t> got;
        int num_gathers = 0;
        std::vector<std::string> all;
        for (const CollectiveRecord& record : context.log->records()) {
          all.push_back(record.communicator + std::to_string(record.numel));
          num_gathers += record.kind == CollectiveKind::all_gather ? 1 : 0;
          if (record.kind == CollectiveKind::all_to_all) {
            got.push_back(record.numel);
          }
        }
        EXPECT_EQ(got, want) << "rank " << context.rank;
        // Each unshard of a layer's unit is an all-gather of its dense weights
        // and an all-gather of its experts.
        int planned = 0;
        for (const Action& action : trainer.runtime->trace().actions) {
          planned += action.kind == ActionKind::gather ? 1 : 0;
        }
        EXPECT_GE(num_gathers, planned);
        std::ranges::sort(all);
        trainer.update();
        const std::lock_guard lock(mutex);
        auto& mine = collectives[context.rank];
        mine.insert(mine.end(), all.begin(), all.end());
      }
    });
    for (const auto& [rank, mine] : collectives) {
      EXPECT_EQ(mine, collectives.at(0)) << "rank " << rank;
    }
  }
}

// Tokens of two microbatches are under way when it comes.
TEST(OverlapExchange, AnExceptionOnAllRanksLeavesTheNextStepRight) {
  for (const bool copies : {false, true}) {
    const MoeOverlapCase c{
        .edp = 1,
        .ep = 2,
        .copies = copies,
        .options = {.delay_wgrad = true, .recompute = true}};
    run_ranks(c.world(), [&](RankContext& context) {
      MoeOverlapTrainer trainer(c, context.mesh(c.axes()));
      const auto gradients = [&] {
        trainer.runtime->synchronize();
        std::vector<at::Tensor> all;
        for (ParamGroup* group : trainer.runtime->groups()) {
          all.push_back(group->gradients().reduced().local().clone());
          group->gradients().zero();
        }
        return all;
      };
      const auto losses = trainer.forward_backward(0);
      const auto right = gradients();
      for (int microbatch = 0; microbatch < c.microbatches; ++microbatch) {
        trainer.before_head = [&](int m) {
          if (m == microbatch) {
            throw std::runtime_error("the test's");
          }
        };
        EXPECT_THROW(trainer.forward_backward(0), std::runtime_error);
        trainer.before_head = [](int) {};
        EXPECT_EQ(trainer.forward_backward(0), losses);
        const auto now = gradients();
        for (std::size_t i = 0; i < right.size(); ++i) {
          EXPECT_TRUE(at::equal(now[i], right[i])) << microbatch << ' ' << i;
        }
      }
    });
  }
}

}  // namespace
}  // namespace flatshard::testing
