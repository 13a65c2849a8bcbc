#include "flatshard/device/capability.h"

#include "flatshard/core/error.h"
#include "flatshard/device/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Capability, EachGenerationHasWhatTheTableSays) {
  const auto features = [](int sm) {
    std::string found;
    for (const GpuFeatureRow& row : gpu_features()) {
      found += !gpu_has(sm, row.feature)       ? '-'
               : gpu_is_asked(sm, row.feature) ? 'a'
                                               : 'x';
    }
    return found;
  };
  // bfloat16; tensorwise, rowwise, blockwise, mxfp8; experts, cuDNN, graphs.
  EXPECT_EQ(features(75), "--------");
  EXPECT_EQ(features(80), "x------x");
  EXPECT_EQ(features(86), "x------x");
  EXPECT_EQ(features(89), "xx-----x");
  EXPECT_EQ(features(90), "xxxx-xxx");
  EXPECT_EQ(features(100), "xxaaxxxx");
  EXPECT_EQ(features(103), "xxaaxxxx");
  EXPECT_EQ(features(120), "xxaaa--x");
}

TEST(Capability, TheDescriptionNamesTheFallbackOfWhatIsMissing) {
  const std::string a100 = describe_gpu_features(80);
  EXPECT_THAT(
      a100,
      AllOf(
          HasSubstr("rowwise        no (sm_90 or later): planes are decoded to "
                    "bfloat16 with emulate = true, else refused"),
          HasSubstr("for experts  no (sm_90 to sm_109): one matmul per expert"),
          HasSubstr("bfloat16                    yes\n")));
  EXPECT_THAT(
      describe_gpu_features(120),
      HasSubstr("mxfp8          where cuBLASLt has them"));
}

TEST(Capability, CodeOfABuildRunsOnItsFamilyAndPtxOnWhatComesLater) {
  EXPECT_TRUE(build_fits("80-real", 80));
  EXPECT_TRUE(build_fits("80-real", 86));
  EXPECT_FALSE(build_fits("86-real", 80));
  EXPECT_FALSE(build_fits("80-real", 90));
  EXPECT_TRUE(build_fits("80", 90));
  EXPECT_TRUE(build_fits("80-virtual", 120));
  EXPECT_FALSE(build_fits("90-virtual", 89));
  // Code that is made for one GPU, or for its family.
  EXPECT_TRUE(build_fits("90a", 90));
  EXPECT_FALSE(build_fits("90a", 100));
  EXPECT_FALSE(build_fits("100a", 103));
  EXPECT_TRUE(build_fits("100f", 103));
  EXPECT_FALSE(build_fits("100f", 120));
  EXPECT_FALSE(build_fits("", 90));
  constexpr auto kAll =
      "80-real,86-real,89-real,90a-real,100a-real,103a-real,120";
  for (const int sm : {80, 86, 87, 89, 90, 100, 103, 120, 121}) {
    EXPECT_TRUE(build_fits(kAll, sm)) << sm;
  }
  EXPECT_FALSE(build_fits(kAll, 75));
}

TEST(Capability, AnUnfitGpuIsNamedWithWhatToDo) {
  EXPECT_EQ(why_gpu_is_unfit("NVIDIA A100", 80, 80, "80-real,90a"), "");
  EXPECT_THAT(
      why_gpu_is_unfit("Tesla T4", 75, 75, "75"),
      AllOf(
          HasSubstr("Tesla T4 has compute capability 7.5 (sm_75)"),
          HasSubstr("require sm_80 or later")));
  EXPECT_THAT(
      why_gpu_is_unfit("NVIDIA A100", 80, 80, "90a"),
      AllOf(
          HasSubstr("NVIDIA A100 is sm_80"),
          HasSubstr("only for 90a"),
          HasSubstr("FLATSHARD_GPUS=80 (or all)")));
  // A pretended capability chooses fallbacks, but code has to run on the real
  // device.
  EXPECT_EQ(why_gpu_is_unfit("NVIDIA H100", 80, 90, "90a"), "");
  EXPECT_THAT(
      why_gpu_is_unfit("NVIDIA H100", 80, 90, "80-real"),
      HasSubstr("is sm_90"));
}

TEST(Capability, AnOlderGpuIsPretendedAndNeverANewerOne) {
  EXPECT_EQ(pretended_sm(90, nullptr), 90);
  EXPECT_EQ(pretended_sm(90, ""), 90);
  EXPECT_EQ(pretended_sm(90, "80"), 80);
  EXPECT_EQ(pretended_sm(90, "75"), 75);
  EXPECT_EQ(pretended_sm(90, "100"), 90);
  for (const char* const text : {"8.0", "sm_80", "-80", "8", "80a", "99999"}) {
    try {
      pretended_sm(90, text);
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::config);
      EXPECT_THAT(
          error.message(),
          AllOf(
              HasSubstr("FLATSHARD_PRETEND_SM"),
              HasSubstr("such as 80"),
              HasSubstr(text)));
    }
  }
}

TEST(Capability, OfACpuThereIsNone) {
  EXPECT_NO_THROW(check_gpu(at::kCPU));
  EXPECT_THROW((void)compute_capability(at::kCPU), Error);
}

TEST(Capability, TheGpuOfThisMachineFitsThisBuild) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU, or a build without CUDA";
  }
  EXPECT_NO_THROW(check_gpu({at::kCUDA, 0}));
  EXPECT_TRUE(gpu_has(at::Device(at::kCUDA, 0), GpuFeature::bfloat16));
  EXPECT_THAT(std::string(built_for_gpus()), Not(::testing::IsEmpty()));
}

TEST(Capability, ThePageOfGpusHasTheTable) {
  std::ifstream file(FLATSHARD_SOURCE_DIR "/docs/reference/gpus.md");
  if (!file) {
    GTEST_SKIP() << "the sources are not on this machine";
  }
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(page, HasSubstr(gpu_features_markdown()));
}

}  // namespace
}  // namespace flatshard
