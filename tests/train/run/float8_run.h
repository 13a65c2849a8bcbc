#pragma once

#include "flatshard/core/error.h"
#include "flatshard/train/run/trainer.h"
#include "tests/data/small_corpus.h"
#include "tests/support/temp_folder.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <string>
#include <vector>

namespace flatshard {

/// Small runs on one rank, to try [float8] with.
class Float8Trainer : public ::testing::Test {
 protected:
  Float8Trainer() {
    std::string text;
    for (int i = 0; i < 300; ++i) {
      text += "the quick brown fox jumps over the lazy dog.\n";
    }
    data::write_byte_corpus(folder_ / "corpus", {text}, 0.2);
  }

  Config config(const std::string& run, std::vector<std::string> overrides)
      const {
    const std::string toml = fmt::format(
        R"(
[run]
output_dir = "{}"
seed = 1
save_weights = false
[model]
dim = 128
layers = 2
heads = 4
kv_heads = 4
ffn_dim = 128
vocab_size = 257
[data]
train = "{}"
[training]
steps = 200
seq_len = 24
local_batch_size = 2
[optimizer]
lr = 3e-3
[metrics]
log_freq = 1
)",
        (folder_ / run).string(),
        (folder_ / "corpus").string());
    return parse_config(toml, "test.toml", overrides);
  }

  struct Outcome {
    std::string output;
    std::vector<double> losses;
  };

  Outcome train(
      const std::string& run,
      std::vector<std::string> overrides,
      bool resume = false) const {
    ::testing::internal::CaptureStdout();
    Outcome outcome;
    try {
      Trainer(config(run, std::move(overrides)), {}, "cpu", resume).run();
    } catch (...) {
      std::fflush(stdout);
      ::testing::internal::GetCapturedStdout();
      throw;
    }
    std::fflush(stdout);
    outcome.output = ::testing::internal::GetCapturedStdout();
    std::ifstream file(folder_ / run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.contains("loss")) {
        outcome.losses.push_back(row["loss"].get<double>());
      }
    }
    return outcome;
  }

  std::string refusal(std::vector<std::string> overrides) const {
    try {
      config("run", std::move(overrides));
    } catch (const Error& error) {
      return error.what();
    }
    ADD_FAILURE() << "expected an error";
    return {};
  }

  TempFolder folder_;
};

}  // namespace flatshard
