#pragma once

#include "tests/support/message_of.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_run.h"

#include <string>
#include <vector>

namespace flatshard {

/// Small runs on one rank, to try [float8] with.
class Float8Trainer : public ::testing::Test {
 protected:
  Float8Trainer() {
    data::write_byte_corpus(
        folder_ / "corpus",
        {testing::learnable_text(300)},
        0.2);
  }

  Config config(const std::string& run, const testing::Settings& overrides)
      const {
    return testing::small_config(
        testing::byte_run(
            folder_.path(),
            run,
            {"run.save_weights=false",
             "model.dim=128",
             "model.kv_heads=4",
             "model.ffn_dim=128",
             "training.steps=200",
             "training.seq_len=24",
             "training.local_batch_size=2",
             "optimizer.lr=3e-3",
             "precision.compute=bfloat16"}),
        overrides);
  }

  struct Outcome {
    std::string output;
    std::vector<double> losses;
  };

  Outcome train(
      const std::string& run,
      const testing::Settings& overrides,
      bool resume = false) const {
    Outcome outcome{
        .output = testing::train_printed(config(run, overrides), resume)};
    outcome.losses = testing::logged_losses(folder_ / run);
    return outcome;
  }

  std::string refusal(const testing::Settings& overrides) const {
    return testing::message_of([&] { config("run", overrides); });
  }

  TempFolder folder_;
};

}  // namespace flatshard
