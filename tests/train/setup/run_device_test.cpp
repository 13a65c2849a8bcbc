#include "flatshard/train/setup/run_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/device/capability.h"

namespace flatshard {
namespace {

std::string refusal(const std::string& device) {
  try {
    choose_device(device, {});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(DeviceChoice, ABuildForCpusNamesWhatItLacks) {
  if (!built_for_gpus().empty()) {
    GTEST_SKIP() << "built with CUDA";
  }
  EXPECT_THAT(
      refusal("cuda"),
      ::testing::AllOf(
          ::testing::HasSubstr("--device cuda: expected CUDA code"),
          ::testing::HasSubstr("FLATSHARD_CUDA=on")));
  EXPECT_EQ(refusal("auto"), "");
  EXPECT_EQ(refusal("cpu"), "");
}

TEST(DeviceChoice, AnUnknownDeviceIsNamed) {
  EXPECT_THAT(
      refusal("tpu"),
      ::testing::HasSubstr("expected auto, cpu or cuda, got 'tpu'"));
}

}  // namespace
}  // namespace flatshard
