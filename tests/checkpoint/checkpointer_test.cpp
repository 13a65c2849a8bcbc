#include "flatshard/checkpoint/checkpointer.h"

#include "flatshard/checkpoint/load.h"
#include "flatshard/core/error.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/manifest.h"
#include "tests/checkpoint/some_groups.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

namespace flatshard::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

GroupParameter parameter(
    const std::string& name,
    std::vector<std::int64_t> shape) {
  return {
      .names = {name},
      .shape = std::move(shape),
      .init = InitSpec::normal(0, 1)};
}

std::vector<SomeGroup> two_groups() {
  return {
      {.parameters = {parameter("a.weight", {40, 9}), parameter("a.bias", {9})},
       .trainable = true},
      {.parameters = {parameter("b.weight", {1000, 7})}, .trainable = true}};
}

/// One rank's model with its mesh and checkpointer.
struct Saver {
  Saver(
      RankContext& context,
      const fs::path& folder,
      std::int64_t keep_latest = 0,
      std::chrono::milliseconds timeout = std::chrono::minutes(1))
      : mesh(context.mesh()),
        model(two_groups(), {}, mesh),
        checkpointer(
            mesh,
            model.groups,
            model.optimizer.get(),
            {.folder = folder,
             .keep_latest = keep_latest,
             .timeout = timeout}) {
    model.fill();
  }

  std::vector<SaveResult> wait() {
    checkpointer.wait();
    return checkpointer.take_results();
  }

  std::shared_ptr<Mesh> mesh;
  SomeGroups model;
  Checkpointer checkpointer;
};

void write_checkpoint(int world, const fs::path& folder) {
  run_ranks(world, [&](RankContext& context) {
    Saver saver(context, folder);
    saver.checkpointer.save(1, {});
    for (const SaveResult& result : saver.wait()) {
      ASSERT_FALSE(result.error.has_value()) << result.error->what();
    }
  });
}

/// Returns the error of loading the checkpoint of step 1 on two ranks. The
/// model must stay unchanged.
std::vector<std::string> refused(
    const fs::path& folder,
    const std::vector<SomeGroup>& specs,
    const Sharding& sharding = {"zero3", {{"dp", 2}}},
    const LoadOptions& options = {}) {
  std::vector<std::string> errors(2);
  run_ranks(2, [&](RankContext& context) {
    const auto mesh = context.mesh();
    const SomeGroups model(specs, sharding, mesh);
    model.fill_with(-1);
    try {
      load_checkpoint(
          step_folder(folder, 1),
          model.groups,
          model.optimizer.get(),
          options);
    } catch (const Error& error) {
      errors[context.rank] = error.message();
      EXPECT_TRUE(model.all_are(-1)) << error.message();
    }
  });
  return errors;
}

TEST(Checkpointer, SavesWhatWasThereWhenItWasAsked) {
  const TempFolder folder;
  run_ranks(2, [&](RankContext& context) {
    Saver saver(context, folder.path());
    saver.checkpointer.save(1, {});
    saver.checkpointer.wait_for_copies();
    saver.model.fill_with(5);  // the next update
    saver.checkpointer.save(2, {});
    saver.checkpointer.wait_for_copies();
    saver.model.fill_with(6);
    saver.checkpointer.save(3, {});  // waits for the first one's buffer
    EXPECT_EQ(saver.wait().size(), 3u);
    const auto load = [&](std::int64_t step) {
      load_checkpoint(
          step_folder(folder.path(), step),
          saver.model.groups,
          saver.model.optimizer.get());
    };
    load(1);
    EXPECT_THAT(saver.model.wrong(), IsEmpty());
    load(2);
    EXPECT_TRUE(saver.model.all_are(5));
    load(3);
    EXPECT_TRUE(saver.model.all_are(6));
  });
  EXPECT_EQ(latest_checkpoint(folder.path()), 3);
}

TEST(Checkpointer, WritesTheStrategyOfEachGroup) {
  const TempFolder folder;
  run_ranks(2, [&](RankContext& context) {
    const auto mesh = context.mesh();
    const SomeGroups zero3(two_groups(), {}, mesh);
    const SomeGroups zero1(
        {{.parameters = {parameter("c.weight", {8, 8})}}},
        {.strategy = "zero1"},
        mesh);
    std::vector<ParamGroup*> groups = zero3.groups;
    groups.push_back(zero1.groups.front());
    Checkpointer checkpointer(
        mesh,
        groups,
        /*optimizer=*/nullptr,
        {.folder = folder.path()});
    checkpointer.save(1, {});
    checkpointer.wait();
  });
  EXPECT_EQ(
      read_manifest(step_folder(folder.path(), 1)).strategy,
      "zero1 (1 of 3 groups), zero3 (2 of 3 groups)");
}

TEST(Checkpointer, KeepsTheLatest) {
  const TempFolder folder;
  run_ranks(2, [&](RankContext& context) {
    Saver saver(context, folder.path(), /*keep_latest=*/2);
    for (const std::int64_t step : {10, 20, 30, 40}) {
      saver.checkpointer.save(step, {});
    }
    const auto results = saver.wait();
    ASSERT_EQ(results.size(), 4u);
    if (context.rank == 0) {
      EXPECT_THAT(results[2].removed, ElementsAre(10));
    }
  });
  EXPECT_THAT(list_checkpoints(folder.path()), ElementsAre(30, 40));
}

TEST(Checkpointer, ReplacesAStepThatIsThere) {
  const TempFolder folder;
  run_ranks(2, [&](RankContext& context) {
    Saver saver(context, folder.path());
    saver.model.fill_with(1);
    saver.checkpointer.save(1, {});
    saver.checkpointer.wait_for_copies();
    saver.model.fill();
    saver.checkpointer.save(1, {});
    EXPECT_EQ(saver.wait().size(), 2u);
    load_checkpoint(
        step_folder(folder.path(), 1),
        saver.model.groups,
        saver.model.optimizer.get());
    EXPECT_THAT(saver.model.wrong(), IsEmpty());
  });
}

TEST(Checkpointer, AFailureOfOneRankIsOneOfAll) {
  const TempFolder folder;
  const fs::path shared = folder / "shared";
  const fs::path lost = folder / "lost";
  run_ranks(3, [&](RankContext& context) {
    // Rank 2 writes to another folder, and the folder disappears.
    const bool unlucky = context.rank == 2;
    Saver saver(context, unlucky ? lost : shared);
    saver.mesh->world().barrier();
    if (unlucky) {
      fs::remove(lost);
      std::ofstream(lost) << "a file";
    }
    saver.checkpointer.save(7, {});
    const auto results = saver.wait();
    ASSERT_EQ(results.size(), 1u);
    ASSERT_TRUE(results[0].error.has_value());
    EXPECT_THAT(
        results[0].error->message(),
        AllOf(HasSubstr("rank 2: "), HasSubstr(lost.string())));
    // The next one may succeed.
    if (unlucky) {
      fs::remove(lost);
      fs::create_directory_symlink(shared, lost);
    }
    saver.checkpointer.save(8, {});
    EXPECT_FALSE(saver.wait().at(0).error.has_value());
  });
  EXPECT_THAT(list_checkpoints(shared), ElementsAre(8));
  for (const auto& entry : fs::directory_iterator(shared)) {
    EXPECT_THAT(
        entry.path().filename().string(),
        ::testing::AnyOf("step-8", "latest"));
  }
}

// Rank 0 times out while it waits for the parts of the other ranks. They wait
// for its verdict with a longer timeout.
TEST(Checkpointer, AFailureOfRank0EndsTheWaitOfTheOthers) {
  const TempFolder folder;
  run_ranks(3, [&](RankContext& context) {
    Saver saver(
        context,
        folder.path(),
        /*keep_latest=*/0,
        std::chrono::milliseconds(context.rank == 0 ? 200 : 20'000));
    if (context.rank < 2) {  // rank 2 saves nothing
      saver.checkpointer.save(7, {});
      const auto results = saver.wait();
      ASSERT_EQ(results.size(), 1u);
      ASSERT_TRUE(results[0].error.has_value());
      EXPECT_THAT(
          results[0].error->message(),
          HasSubstr("rank 2 to write its part of the checkpoint of step 7"));
    }
    saver.mesh->world().barrier();
  });
  EXPECT_THAT(list_checkpoints(folder.path()), ::testing::IsEmpty());
}

TEST(Checkpointer, RemovesWhatADeadProcessLeft) {
  const TempFolder folder;
  fs::create_directories(partial_folder(folder.path(), 3, "dead"));
  write_checkpoint(2, folder.path());
  EXPECT_FALSE(fs::exists(partial_folder(folder.path(), 3, "dead")));
}

TEST(Checkpointer, B33_RanksWithoutAPieceSaveToo) {
  const TempFolder folder;
  const std::vector<SomeGroup> specs{
      {.parameters = {parameter("a", {3}), parameter("empty", {0, 2})},
       .trainable = true}};
  const Sharding five{"zero3", {{"dp", 5}}, Granularity::tensor()};
  run_ranks(5, [&](RankContext& context) {
    const auto mesh = context.mesh();
    const SomeGroups model(specs, five, mesh);
    model.fill();
    Checkpointer checkpointer(
        mesh,
        model.groups,
        model.optimizer.get(),
        {.folder = folder.path()});
    checkpointer.save(1, {});
    checkpointer.wait();
    const auto results = checkpointer.take_results();
    ASSERT_EQ(results.size(), 1u);
    EXPECT_FALSE(results[0].error.has_value()) << results[0].error->what();
  });
  run_ranks(1, [&](RankContext& context) {
    const SomeGroups model(specs, {}, context.mesh());
    load_checkpoint(
        step_folder(folder.path(), 1),
        model.groups,
        model.optimizer.get());
    EXPECT_THAT(model.wrong(), IsEmpty());
  });
}

TEST(LoadCheckpoint, R14_LoadingTheStateIsNotAStep) {
  const TempFolder folder;
  write_checkpoint(2, folder.path());
  run_ranks(1, [&](RankContext& context) {
    const SomeGroups model(two_groups(), {}, context.mesh());
    load_checkpoint(
        step_folder(folder.path(), 1),
        model.groups,
        model.optimizer.get());
    EXPECT_EQ(model.optimizer->num_updates(0, 0), 1);
    EXPECT_EQ(model.optimizer->num_updates(0, 1), 2);
    EXPECT_EQ(model.optimizer->num_updates(1, 0), 2);
    EXPECT_EQ(model.optimizer->num_steps(), 9);
    EXPECT_THAT(model.wrong(), IsEmpty());
  });
}

// A parameter has other states. Excluding it would leave out its weights.
TEST(LoadCheckpoint, RefusesAnotherAlgorithm) {
  const TempFolder folder;
  write_checkpoint(2, folder.path());
  run_ranks(2, [&](RankContext& context) {
    const SomeGroups model(
        two_groups(),
        {"zero3", {{"dp", 2}}},
        context.mesh());
    const auto refused_with = [&](const ParameterRule& rule) {
      Optimizer other(model.groups, ParameterRules{.rules = {rule}});
      try {
        load_checkpoint(step_folder(folder.path(), 1), model.groups, &other);
      } catch (const Error& error) {
        return error.message();
      }
      return std::string("no error");
    };
    EXPECT_THAT(
        refused_with({.pattern = "a.bias", .algorithm = Algorithm::sgd}),
        AllOf(
            HasSubstr("the checkpoint has exp_avg of a.bias, the model does "
                      "not; another optimizer wrote it"),
            HasSubstr("(checkpoint.exclude = \"optimizer\")"),
            Not(HasSubstr("xclude it"))));
    // The checkpoint has this state of no parameter.
    EXPECT_THAT(
        refused_with(
            {.pattern = ".", .algorithm = Algorithm::sgd, .momentum = 0.5}),
        AllOf(
            HasSubstr("the model has momentum of a."),
            HasSubstr("the checkpoint does not; another optimizer wrote it"),
            HasSubstr("(checkpoint.exclude = \"optimizer\")")));
  });
}

TEST(LoadCheckpoint, RefusesAnotherModel) {
  const TempFolder folder;
  write_checkpoint(3, folder.path());
  EXPECT_THAT(refused(folder.path(), two_groups()), ElementsAre("", ""));

  auto more = two_groups();
  more[0].parameters.push_back(parameter("a.bios", {9}));
  for (const std::string& error : refused(folder.path(), more)) {
    EXPECT_THAT(
        error,
        AllOf(
            HasSubstr(folder.path().string()),
            HasSubstr("the model has weight of a.bios, the checkpoint does "
                      "not; its nearest name is 'a.bias'")));
  }
  auto fewer = two_groups();
  fewer[0].parameters.pop_back();
  for (const std::string& error : refused(folder.path(), fewer)) {
    EXPECT_THAT(
        error,
        HasSubstr("the checkpoint has exp_avg of a.bias, the model does not"));
  }
  auto turned = two_groups();
  turned[0].parameters[0].shape = {9, 40};
  for (const std::string& error : refused(folder.path(), turned)) {
    EXPECT_THAT(
        error,
        HasSubstr("weight of a.weight: expected shape [9, 40], got [40, 9]"));
  }
  Sharding half{"zero3", {{"dp", 2}}};
  half.precision.compute = at::kBFloat16;
  half.precision.main_params = at::kBFloat16;
  for (const std::string& error : refused(folder.path(), two_groups(), half)) {
    EXPECT_THAT(
        error,
        HasSubstr("weight of a.weight: expected dtype BF16, got F32"));
  }
}

TEST(LoadCheckpoint, LeavesOutWhatIsExcluded) {
  const TempFolder folder;
  write_checkpoint(2, folder.path());
  auto changed = two_groups();
  changed[0].parameters[1] = parameter("a.other", {5});
  const LoadOptions options{.exclude = {"a.b*", "a.other"}};
  EXPECT_THAT(
      refused(folder.path(), changed, {"zero3", {{"dp", 2}}}, options),
      ElementsAre("", ""));
  run_ranks(1, [&](RankContext& context) {
    const SomeGroups model(changed, {}, context.mesh());
    model.fill_with(-1);
    load_checkpoint(
        step_folder(folder.path(), 1),
        model.groups,
        model.optimizer.get(),
        options);
    for (const OwnedBox& run :
         owned_boxes(model.groups, model.optimizer.get())) {
      const bool kept = run.names.front() == "a.other";
      EXPECT_TRUE(run.values.equal(
          kept ? at::full_like(run.values, -1) : SomeGroups::expected(run)))
          << run.names.front();
    }
  });
}

// The other rank reads nothing from the damaged file and must not load either.
TEST(LoadCheckpoint, DamageOnOneRankStopsAll) {
  const TempFolder folder;
  write_checkpoint(2, folder.path());
  const fs::path path =
      step_folder(folder.path(), 1) / "shard-00002-of-00002.safetensors";
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x7f');
  }
  const auto errors = refused(folder.path(), two_groups());
  EXPECT_THAT(
      errors[1],
      AllOf(HasSubstr(path.string()), HasSubstr("damaged: expected digest")));
  EXPECT_THAT(
      errors[0],
      HasSubstr("load checkpoint: rank 1 failed, and therefore all ranks"));

  fs::resize_file(path, 3000);
  for (const std::string& error : refused(folder.path(), two_groups())) {
    EXPECT_NE(error, "");
  }
  fs::remove(step_folder(folder.path(), 1) / kManifestName);
  for (const std::string& error : refused(folder.path(), two_groups())) {
    EXPECT_THAT(error, HasSubstr("manifest.json"));
  }
}

TEST(LoadCheckpoint, WeightsOnlyFromATrainedOne) {
  const TempFolder folder;
  write_checkpoint(2, folder.path());
  run_ranks(1, [&](RankContext& context) {
    const SomeGroups model(two_groups(), {}, context.mesh());
    load_checkpoint(step_folder(folder.path(), 1), model.groups, nullptr);
    for (const OwnedBox& run : owned_boxes(model.groups, nullptr)) {
      EXPECT_TRUE(run.values.equal(SomeGroups::expected(run)));
    }
  });
}

}  // namespace
}  // namespace flatshard::testing
