#pragma once

#include "flatshard/train/run/trainer.h"
#include "tests/data/small_corpus.h"
#include "tests/train/small_config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace flatshard::testing {

/// Returns the settings of a run below `folder` that trains on the dataset of
/// write_byte_corpus there.
inline Settings byte_run(
    const std::filesystem::path& folder,
    const std::string& run,
    const Settings& more) {
  Settings all{
      fmt::format("run.output_dir={}", (folder / run).string()),
      "run.seed=1",
      "model.ffn_dim=64",
      "model.vocab_size=257",
      fmt::format("data.train={}", (folder / "corpus").string()),
      "training.seq_len=32"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// Returns a text with a small vocabulary, in an order that can be learnt.
inline std::string learnable_text(int lines) {
  std::string all;
  for (int i = 0; i < lines; ++i) {
    all += "the quick brown fox jumps over the lazy dog.\n";
  }
  return all;
}

/// Trains on one rank. Returns what was printed.
inline std::string train_printed(
    const Config& config,
    bool resume = false,
    const std::string& device = "cpu") {
  ::testing::internal::CaptureStdout();
  try {
    Trainer(config, {}, device, resume).run();
  } catch (...) {
    std::fflush(stdout);
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  std::fflush(stdout);
  return ::testing::internal::GetCapturedStdout();
}

/// Returns the rows of a run's metrics.jsonl that have this field.
inline std::vector<nlohmann::json> metric_rows(
    const std::filesystem::path& run,
    const std::string& field = "step") {
  std::ifstream file(run / "metrics.jsonl");
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(file, line);) {
    auto row = nlohmann::json::parse(line);
    if (row.contains(field)) {
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

/// Returns the losses of the logged steps.
inline std::vector<double> logged_losses(const std::filesystem::path& run) {
  std::vector<double> losses;
  for (const nlohmann::json& row : metric_rows(run, "loss")) {
    losses.push_back(row["loss"]);
  }
  return losses;
}

}  // namespace flatshard::testing
