#include "flatshard/core/nearest_name.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flatshard {
namespace {

const std::vector<std::string> kKeys{
    "steps",
    "seq_len",
    "local_batch_size",
    "global_batch_size",
    "max_norm",
    "bfloat16",
    "warmup_steps",
    "moe"};

TEST(NearName, IsATypingMistakeAway) {
  EXPECT_EQ(near_name("step", kKeys), "steps");
  EXPECT_EQ(near_name("setps", kKeys), "steps");
  EXPECT_EQ(near_name("max_nrom", kKeys), "max_norm");
  EXPECT_EQ(near_name("local_batchsize", kKeys), "local_batch_size");
}

TEST(NearName, IsAnAbbreviation) {
  EXPECT_EQ(near_name("warmup", kKeys), "warmup_steps");
  EXPECT_EQ(near_name("bf16", kKeys), "bfloat16");
  EXPECT_EQ(near_name("training_seq_len", kKeys), "seq_len");
  // Two names are equally near.
  EXPECT_EQ(near_name("batch_size", kKeys), "");
}

TEST(NearName, IsEmptyWithNothingNear) {
  EXPECT_EQ(near_name("mask_prompts", kKeys), "");
  EXPECT_EQ(near_name("lora", kKeys), "");
  EXPECT_EQ(near_name("", kKeys), "");
  EXPECT_EQ(near_name("steps", std::vector<std::string>{}), "");
}

}  // namespace
}  // namespace flatshard
