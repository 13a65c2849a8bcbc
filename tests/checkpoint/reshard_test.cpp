// A checkpoint is the same whatever wrote it, and fits whatever reads it.
#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/format/checkpoint_folder.h"
#include "tests/checkpoint/some_groups.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace flatshard::testing {
namespace {

using ::testing::IsEmpty;

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t n) { return engine_() % n; }
  template <class T>
  const T& one_of(const std::vector<T>& items) {
    return items[below(items.size())];
  }

 private:
  std::mt19937_64 engine_;
};

std::vector<SomeGroup> random_specs(Random& random) {
  // Scalars, nothing at all, fewer rows than ranks, no multiple of anything.
  const std::vector<std::vector<std::int64_t>> shapes{
      {},
      {0},
      {3, 0, 2},
      {1},
      {2, 3},
      {7},
      {33, 5},
      {5, 3, 2},
      {257, 3},
      {1000},
      {131, 17}};
  std::vector<SomeGroup> specs(1 + random.below(3));
  int number = 0;
  for (SomeGroup& spec : specs) {
    for (std::size_t n = 1 + random.below(4); n > 0; --n) {
      GroupParameter parameter{
          .names = {fmt::format("layer.{}.weight", number)},
          .shape = random.one_of(shapes),
          .init = InitSpec::normal(0, 1)};
      if (random.below(4) == 0) {  // a tied one
        parameter.names.push_back(fmt::format("head.{}", number));
      }
      ++number;
      spec.parameters.push_back(std::move(parameter));
    }
    spec.trainable = random.below(4) != 0;
  }
  return specs;
}

Sharding random_sharding(Random& random) {
  const std::vector<Sharding> shardings{
      {"zero0", {{"dp", 2}}},
      {"zero0", {{"dp", 3}}},
      {"zero1", {{"dp", 2}}},
      {"zero2", {{"dp", 3}}},
      {"zero3", {{"dp", 1}}},
      {"zero3", {{"dp", 2}}},
      {"zero3", {{"dp", 3}}},
      {"zero3", {{"dp", 5}}},
      {"zero3", {{"a", 2}, {"b", 2}}},
      {"hsdp", {{"outer", 2}, {"dp", 2}}},
      {"hsdp", {{"outer", 3}, {"dp", 1}}},
      {"hfsdp", {{"outer", 2}, {"dp", 2}}},
      {"hsdp_zero1", {{"outer", 2}, {"dp", 2}}},
      {"hsdp_zero2", {{"outer", 2}, {"dp", 2}}}};
  Sharding sharding = random.one_of(shardings);
  sharding.granularity = random.one_of(std::vector<Granularity>{
      Granularity::element(),
      Granularity::row(),
      Granularity::tensor()});
  return sharding;
}

TEST(Reshard, WhatOneMeshWroteAnyOtherReads) {
  constexpr int kSeeds = 60;
  for (int seed = 0; seed < kSeeds; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const auto specs = random_specs(random);
    Sharding writer = random_sharding(random);
    Sharding reader = random_sharding(random);
    if (random.below(2) == 0) {
      // bfloat16 compute weights with float32 main weights.
      writer.precision = Precision{.reduce = at::kBFloat16};
      reader.precision = Precision{.reduce = at::kBFloat16};
    }
    SCOPED_TRACE(fmt::format(
        "seed {}: {} -> {}",
        seed,
        writer.to_string(),
        reader.to_string()));
    const TempFolder folder;
    run_ranks(writer.world(), [&](RankContext& context) {
      const auto mesh = context.mesh(writer.axes);
      const SomeGroups model(specs, writer, mesh);
      model.fill();
      Checkpointer checkpointer(
          mesh,
          model.groups,
          model.optimizer.get(),
          {.folder = folder.path(),
           .max_file_nbytes = seed % 3 == 0 ? 100u : 1u << 20});
      checkpointer.save(4, {{"loader", "here"}});
      checkpointer.wait();
      for (const SaveResult& result : checkpointer.take_results()) {
        EXPECT_FALSE(result.error.has_value()) << result.error->what();
      }
    });
    // Nothing was written twice: replicas share.
    const Manifest manifest = read_manifest(step_folder(folder.path(), 4));
    EXPECT_EQ(manifest.strategy, writer.strategy);
    run_ranks(reader.world(), [&](RankContext& context) {
      const auto mesh = context.mesh(reader.axes);
      const SomeGroups model(specs, reader, mesh);
      model.fill_with(-1);
      const LoadedCheckpoint loaded = load_checkpoint(
          step_folder(folder.path(), 4),
          model.groups,
          model.optimizer.get());
      EXPECT_EQ(loaded.step, 4);
      EXPECT_EQ(loaded.state.at("loader"), "here");
      EXPECT_THAT(model.wrong(), IsEmpty());
      EXPECT_EQ(model.optimizer->num_steps(), 9);
      for (std::size_t i = 0; i < model.optimizer->groups().size(); ++i) {
        EXPECT_EQ(
            model.optimizer->num_updates(i, 0),
            static_cast<std::int64_t>(i) + 1);
      }
    });
    if (HasFailure()) {
      return;
    }
  }
}

}  // namespace
}  // namespace flatshard::testing
