// Runs with [float8].
#include "tests/train/run/float8_run.h"

#include <gmock/gmock.h>

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

double last_mean(const std::vector<double>& losses) {
  constexpr int kNum = 50;
  double sum = 0;
  for (std::size_t i = losses.size() - kNum; i < losses.size(); ++i) {
    sum += losses[i];
  }
  return sum / kNum;
}

// The text is learnt by heart in 200 steps, from ln 257 = 5.5 on.
TEST_F(Float8Trainer, EachRecipeLearnsLikeBfloat16) {
  const double bf16 = last_mean(train("bf16", {}).losses);
  EXPECT_LT(bf16, 0.5);
  for (const std::string recipe :
       {"tensorwise", "rowwise", "blockwise", "mxfp8"}) {
    const Outcome fp8 = train(recipe, {"float8.recipe=" + recipe});
    EXPECT_THAT(
        fp8.output,
        HasSubstr(
            "float8: 14 parameters with 77.5 % of the elements, " + recipe +
            " (emulated), derived columns; bfloat16: 2 (257 rows are not a "
            "multiple of "));
    ASSERT_EQ(fp8.losses.size(), 200U) << recipe;
    EXPECT_NEAR(last_mean(fp8.losses), bf16, 0.1) << recipe;
  }
}

TEST_F(Float8Trainer, OptionsChooseWeights) {
  const Outcome some = train(
      "some",
      {"training.steps=2",
       "float8.recipe=rowwise",
       "float8.column_plane=stored",
       "float8.gather_parts=module",
       "model.layers=3",
       "float8.keep_first_last=true"});
  EXPECT_THAT(some.output, HasSubstr("float8: 7 parameters with "));
  EXPECT_THAT(some.output, HasSubstr("(excluded by '*layers.0.*')"));
  const Outcome down = train(
      "down",
      {"training.steps=2",
       "float8.recipe=mxfp8",
       "float8.exclude=*down_proj*, *.q_proj.*"});
  EXPECT_THAT(down.output, HasSubstr("float8: 10 parameters"));
  EXPECT_THAT(down.output, HasSubstr("2 (excluded by '*down_proj*')"));
}

TEST_F(Float8Trainer, ARecipeThatFitsNoWeightIsAWarning) {
  const auto warnings = [&](const std::string& run,
                            const std::string& excluded) {
    ::testing::internal::CaptureStderr();
    const Outcome trained = train(
        run,
        {"training.steps=1",
         "float8.recipe=rowwise",
         "float8.exclude=" + excluded});
    EXPECT_EQ(trained.losses.size(), 1U);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(
      warnings("none", "*_proj*"),
      AllOf(
          HasSubstr(
              "warning: float8.recipe = \"rowwise\" applies to no weight"),
          HasSubstr("14 (excluded by '*_proj*')"),
          HasSubstr("Change float8.exclude")));
  EXPECT_THAT(warnings("some", "*q_proj*"), Not(HasSubstr("float8")));
}

TEST_F(Float8Trainer, DiagnosticsLookAtFp8WeightsToo) {
  const auto with = [&](const std::string& run, bool diagnostics) {
    std::vector<std::string> overrides{
        "training.steps=3",
        "float8.recipe=rowwise",
        "float8.column_plane=stored",
        "activation_checkpoint.mode=selective"};
    if (diagnostics) {
      for (const char* name :
           {"nan_check", "overlap_check", "poison", "strict"}) {
        overrides.push_back(fmt::format("diagnostics.{}=true", name));
      }
      overrides.emplace_back("diagnostics.norms_freq=1");
    }
    return train(run, overrides).losses;
  };
  const auto losses = with("plain", false);
  ASSERT_EQ(losses.size(), 3U);
  EXPECT_EQ(with("watched", true), losses);
}

// Checkpoints store main weights, whichever dtype was all-gathered.
TEST_F(Float8Trainer, ACheckpointGoesOnWithAnotherRecipe) {
  const auto go_on = [&](int steps, const std::string& recipe) {
    return train(
        "run",
        {"checkpoint.interval=2",
         fmt::format("training.steps={}", steps),
         "lr_scheduler.name=constant",
         "float8.recipe=" + recipe},
        steps > 2);
  };
  go_on(2, "tensorwise");
  go_on(4, "none");
  const Outcome run = go_on(6, "mxfp8");
  ASSERT_EQ(run.losses.size(), 6U);
  EXPECT_LT(run.losses.back(), run.losses.front());
}

TEST_F(Float8Trainer, WhatDoesNotFitIsRefusedByName) {
  EXPECT_THAT(
      refusal({"float8.recipe=rowwise", "precision.compute=float32"}),
      HasSubstr("float8.recipe = \"rowwise\" with precision.compute = "
                "\"float32\": "));
  EXPECT_THAT(
      refusal(
          {"float8.recipe=rowwise",
           "cuda_graph.impl=unit",
           "activation_checkpoint.mode=full"}),
      HasSubstr("no graph recomputes FP8 weights"));
  EXPECT_THAT(
      refusal({"float8.recipe=blockwise", "float8.column_plane=stored"}),
      HasSubstr("float8.column_plane = \"stored\" with float8.recipe = "
                "\"blockwise\": stored is for rowwise and mxfp8"));
  EXPECT_THAT(refusal({"float8.recipe=e4m3"}), HasSubstr("float8.recipe"));
  EXPECT_THAT(
      refusal({"float8.exclude=*"}) + refusal({"float8.emulate=true"}),
      HasSubstr("runs with FP8 weights; set float8.recipe"));
}

}  // namespace
}  // namespace flatshard
