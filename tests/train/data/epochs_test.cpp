#include "flatshard/train/data/epochs.h"

#include <gtest/gtest.h>

#include <vector>

#include "flatshard/train/config/run_config.h"
#include "tests/data/small_corpus.h"
#include "tests/support/temp_folder.h"

namespace flatshard {
namespace {

constexpr std::int64_t kSeqLen = 10;

data::Loader open(const Config& config) {
  return {
      data::open_token_sources(
          config.data.train,
          "train",
          /*seed=*/1,
          /*vocab_size=*/1000),
      {.seq_len = kSeqLen, .global_batch_size = 4, .vocab_size = 1000}};
}

std::vector<DataEpochs> epochs_of(const Config& config) {
  return data_epochs(config.data.train, open(config), config.training.steps);
}

class Epochs : public ::testing::Test {
 protected:
  Epochs() {
    // 6 and 20 sequences of 10 tokens and their targets, of one vocabulary.
    write("a", {31, 30}, /*first_token=*/140);
    write("b", {201}, /*first_token=*/0);
    config_.training.steps = 12;
    config_.training.seq_len = kSeqLen;
    config_.training.global_batch_size = 4;
  }
  void write(
      const char* name,
      const std::vector<std::uint32_t>& lengths,
      std::uint32_t first_token) {
    data::write_small_corpus(
        folder_ / name,
        data::TokenType::uint16,
        /*shard_tokens=*/1000,
        lengths,
        first_token);
  }
  std::string path(const char* name) const { return (folder_ / name).string(); }

  const TempFolder folder_;
  Config config_;
};

TEST_F(Epochs, OfOneDataset) {
  config_.data.train = {{.path = path("a")}};
  const auto found = epochs_of(config_);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].samples, 6);
  EXPECT_EQ(found[0].steps, 1.5);
  EXPECT_EQ(found[0].epochs, 8);
  EXPECT_EQ(
      to_string(found[0]),
      "data: " + path("a") +
          ": one epoch has 6 samples, 1.5 steps; the run has 8 epochs");
}

TEST_F(Epochs, OfAMixtureByItsWeights) {
  config_.data.train = {
      {.path = path("a"), .weight = 1},
      {.path = path("b"), .weight = 3}};
  const auto found = epochs_of(config_);
  ASSERT_EQ(found.size(), 2U);
  // A quarter of the 4 samples of each step, and three quarters.
  EXPECT_NEAR(found[0].steps, 6.0, 1e-6);
  EXPECT_NEAR(found[0].epochs, 2.0, 1e-6);
  EXPECT_EQ(found[1].samples, 20);
  EXPECT_NEAR(found[1].steps, 20.0 / 3, 1e-6);
}

TEST_F(Epochs, RandomTokensHaveNone) {
  config_.data.train = {{.path = "random"}};
  EXPECT_TRUE(epochs_of(config_).empty());
}

}  // namespace
}  // namespace flatshard
