// Other ways of FP8 planes to a kernel: graphs of steps, planes that are not
// stored, copies of peers' planes. None changes a bit.
#include "tests/runtime/float8_training.h"
#include "tests/support/case_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using float8::Recipe;
using models::ActivationCheckpoint;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void expect_same_with(
    Float8Case plain,
    const std::function<void(Float8Case&)>& change) {
  plain.prefetches_between_steps = false;
  Float8Case changed = plain;
  change(changed);
  changed.max_delay_us = 200;
  const Float8Run got = train_float8(changed);
  expect_same_run(got, train_float8(plain));
  if (!changed.regions.empty()) {
    EXPECT_GT(got.graphs.forward_replays, 0);
    EXPECT_GT(got.graphs.backward_replays, 0);
    EXPECT_THAT(got.graphs.fallbacks, IsEmpty());
  }
  if (changed.whole_step) {
    EXPECT_EQ(got.graphs.captures, 1);
    EXPECT_EQ(
        got.graphs.step_replays,
        changed.steps - Float8Case::kWarmupSteps);
    EXPECT_THAT(got.graphs.fallbacks, IsEmpty());
  }
}

// Each of these pairs is in one of them: recipe and way, recipe and strategy,
// way and strategy.
struct WayCase {
  std::string name;
  Float8Case plain;
  std::function<void(Float8Case&)> change;
};

struct Way {
  std::string name;
  std::function<void(Float8Case&)> change;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all{
      {"graph", [](Float8Case& c) { c.whole_step = true; }},
      {"made", [](Float8Case& c) { c.keep_compute_weights = false; }},
      {"copied", [](Float8Case& c) { c.copy_engines = CopyEngines::all(); }},
      {"copied_forward",
       [](Float8Case& c) {
         c.copy_engines.gathers = CopyEngines::Gathers::forward;
       }},
      {"graph_made", [](Float8Case& c) {
         c.whole_step = true;
         c.keep_compute_weights = false;
       }}};
  return all;
}

using Strategies =
    std::vector<std::pair<std::string, std::vector<std::int64_t>>>;

const Strategies& strategies() {
  static const Strategies all{
      {"zero3", {2}},
      {"zero3", {1}},
      {"zero1", {2}},
      {"hsdp", {2, 2}},
      {"hfsdp", {2, 2}},
      {"zero2", {3}}};
  return all;
}

const std::vector<GatherParts> kParts{
    GatherParts::recomputed,
    GatherParts::module,
    GatherParts::unit};
const std::vector<ActivationCheckpoint> kCheckpoints{
    ActivationCheckpoint::none,
    ActivationCheckpoint::selective};

std::vector<WayCase> way_cases() {
  std::vector<WayCase> all;
  const auto formats = float8_formats();
  for (std::size_t w = 0; w < ways().size(); ++w) {
    for (std::size_t f = 0; f < formats.size(); ++f) {
      // A Latin square: each strategy once for each way and each recipe.
      const auto& [strategy, mesh] =
          strategies()[(w + f) % strategies().size()];
      std::string name =
          ways()[w].name + "_" + name_of_format(formats[f]) + "_" + strategy;
      for (const std::int64_t size : mesh) {
        name += "_" + std::to_string(size);
      }
      all.push_back(
          {.name = name,
           .plain =
               {.format = formats[f],
                .strategy = strategy,
                .mesh = mesh,
                .microbatches = w % 2 == 0 ? 1 : 2,
                .gather_parts = kParts[(w + 2 * f) % kParts.size()],
                .checkpoint = kCheckpoints[(w + f) % kCheckpoints.size()]},
           .change = ways()[w].change});
    }
  }
  return all;
}

class Float8Ways : public ::testing::TestWithParam<WayCase> {};
INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    Float8Ways,
    ::testing::ValuesIn(way_cases()),
    testing::kCaseName);

TEST_P(Float8Ways, ChangeNoBit) {
  expect_same_with(GetParam().plain, GetParam().change);
}

// All of them.
TEST(Float8WaysMatrix, DISABLED_WholeMatrix) {
  for (const Float8Format& format : float8_formats()) {
    for (const auto& [strategy, mesh] : strategies()) {
      for (const GatherParts parts : kParts) {
        for (const ActivationCheckpoint checkpoint : kCheckpoints) {
          for (const Way& way : ways()) {
            SCOPED_TRACE(
                way.name + " " + name_of_format(format) + " " + strategy);
            expect_same_with(
                {.format = format,
                 .strategy = strategy,
                 .mesh = mesh,
                 .microbatches = 2,
                 .gather_parts = parts,
                 .checkpoint = checkpoint},
                way.change);
          }
        }
      }
    }
  }
}

// Blocks and halves of blocks, for each recipe and each way to fill buffers
// with planes. One microbatch: backwards that accumulate cannot be replayed.
std::vector<WayCase> region_cases() {
  std::vector<WayCase> all;
  const auto formats = float8_formats();
  const std::vector<std::set<std::string>> regions{{"block"}, {"attn", "mlp"}};
  for (std::size_t f = 0; f < formats.size(); ++f) {
    for (std::size_t r = 0; r < regions.size(); ++r) {
      const auto& [strategy, mesh] =
          strategies()[(f + 3 * r) % strategies().size()];
      all.push_back(
          {.name = *regions[r].begin() + "_" + name_of_format(formats[f]) +
                   "_" + strategy + "_" + std::to_string(mesh[0]),
           .plain =
               {.format = formats[f],
                .strategy = strategy,
                .mesh = mesh,
                .steps = 5,
                .gather_parts = kParts[(f + r) % kParts.size()],
                .keep_compute_weights = f % 2 == 0},
           .change = [names = regions[r]](Float8Case& c) {
             c.regions = names;
           }});
    }
  }
  // A recomputation inside: its half is run eagerly, the other is a graph.
  all.push_back(
      {.name = "attn_beside_a_recomputation",
       .plain =
           {.format = formats[2],
            .mesh = {2},
            .steps = 5,
            .checkpoint = ActivationCheckpoint::selective},
       .change = [](Float8Case& c) { c.regions = {"attn"}; }});
  return all;
}

class Float8Regions : public ::testing::TestWithParam<WayCase> {};
INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    Float8Regions,
    ::testing::ValuesIn(region_cases()),
    testing::kCaseName);

TEST_P(Float8Regions, ChangeNoBit) {
  expect_same_with(GetParam().plain, GetParam().change);
}

TEST(Float8Ways, RecomputedBlocksRunEagerly) {
  Float8Case c{
      .format = Float8Format{.recipe = Recipe::rowwise, .stored_columns = true},
      .mesh = {2},
      .steps = 6,
      .checkpoint = ActivationCheckpoint::full,
      .prefetches_between_steps = false};
  const Float8Run want = train_float8(c);
  c.regions = {"block"};
  const Float8Run got = train_float8(c);
  expect_same_run(got, want);
  ASSERT_FALSE(got.graphs.fallbacks.empty());
  EXPECT_THAT(
      got.graphs.fallbacks.begin()->first,
      HasSubstr("a recomputed region has FP8 weights"));
}

}  // namespace
}  // namespace flatshard::testing
