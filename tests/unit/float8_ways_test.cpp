// Other ways of FP8 planes to a kernel: graphs of steps, planes that do not
// rest, copies of what peers hold. None changes a bit.
#include "tests/support/message_of.h"
#include "tests/unit/float8_training.h"

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
  if (changed.whole_step) {
    EXPECT_EQ(got.graphs.captures, 1);
    EXPECT_EQ(
        got.graphs.step_replays,
        changed.steps - Float8Case::kWarmupSteps);
    EXPECT_THAT(got.graphs.fallbacks, IsEmpty());
  }
}

// Each pair of a recipe and a way, of a recipe and a strategy, and of a way and
// a strategy stands in one of them.
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
    [](const auto& info) { return info.param.name; });

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

TEST(Float8Ways, GraphsOfRegionsAreRefused) {
  run_ranks(1, [](RankContext& context) {
    models::Llama llama = make_llama(ActivationCheckpoint::none);
    FullyShardOptions options{
        .float8_of =
            [](const std::string&, const std::vector<std::int64_t>&) {
              return std::optional(Float8Format{});
            },
        .runtime = {.graphs = {.enabled = true, .emulate_on_cpu = true}}};
    EXPECT_THAT(
        message_of([&] {
          const auto unused =
              fully_shard(*llama, context.mesh(), std::move(options));
        }),
        HasSubstr("GraphOptions::regions with FP8 weights"));
  });
}

}  // namespace
}  // namespace flatshard::testing
