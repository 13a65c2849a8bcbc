// Runs whose samples hold whole documents.
#include "flatshard/core/error.h"
#include "flatshard/data/prepare.h"
#include "flatshard/train/trainer.h"
#include "tests/support/message_of.h"
#include "tests/support/temp_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>

namespace flatshard {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

class PackedRun : public ::testing::Test {
 protected:
  PackedRun() {
    std::string rows;
    for (int i = 0; i < 200; ++i) {
      const std::string text(
          static_cast<std::size_t>(1 + i * i % 40),
          static_cast<char>('a' + i % 5));
      rows += "{\"text\": \"" + text + "\"}\n";
    }
    data::prepare_corpus(
        {.inputs = {folder_.write("rows.jsonl", rows).string()},
         .output = folder_ / "corpus",
         .validation_fraction = 0.2});
  }

  Config config(const std::vector<std::string>& overrides) const {
    const std::string toml = fmt::format(
        R"(
[run]
output_dir = "{}"
seed = 1
[model]
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 64
vocab_size = 257
[data]
train = "{}"
packing = "documents"
[training]
steps = 8
seq_len = 32
local_batch_size = 2
global_batch_size = 4
[lr_scheduler]
name = "constant"
[precision]
compute = "float32"
[checkpoint]
interval = 4
[validation]
freq = 4
sequences = 7
[metrics]
log_freq = 1
)",
        (folder_ / "run").string(),
        (folder_ / "corpus").string());
    return parse_config(toml, "test.toml", overrides);
  }

  /// Trains on one rank; returns what was printed.
  std::string train(
      const std::vector<std::string>& overrides = {},
      bool resume = false) const {
    ::testing::internal::CaptureStdout();
    std::string failure = message_of(
        [&] { Trainer(config(overrides), {}, "cpu", resume).run(); });
    std::fflush(stdout);
    std::string printed = ::testing::internal::GetCapturedStdout();
    return failure == "no error" ? printed : failure;
  }

  /// The numbers of metrics.jsonl that a run is compared by.
  std::vector<json> rows() const {
    std::ifstream file(folder_ / "run/metrics.jsonl");
    std::vector<json> found;
    for (std::string line; std::getline(file, line);) {
      const json row = json::parse(line);
      for (const char* value : {"loss", "grad_norm", "validation_loss"}) {
        if (row.contains(value)) {
          found.push_back({row["step"], value, row[value]});
        }
      }
    }
    return found;
  }

  const TempFolder folder_;
};

TEST_F(PackedRun, ResumesInTheMiddleOfAnEpoch) {
  EXPECT_THAT(
      train(),
      ::testing::ContainsRegex("data: .*corpus: [0-9]+ documents \\([0-9]+ of "
                               "them cut\\) in [0-9]+ samples, 9[0-9]\\.[0-9] "
                               "% full"));
  const auto whole = rows();
  EXPECT_EQ(whole.size(), 8U * 2 + 2);
  train({"checkpoint.load_step=4"}, /*resume=*/true);
  const auto all = rows();
  ASSERT_EQ(all.size(), whole.size() + 4 * 2 + 1);
  EXPECT_EQ(
      (std::vector<json>(all.end() - 9, all.end())),
      (std::vector<json>(whole.end() - 9, whole.end())));
  EXPECT_THAT(
      train(
          {"data.packing=stream", "checkpoint.load_step=4"},
          /*resume=*/true),
      AllOf(
          HasSubstr("belongs to data.packing = \"documents\" with "
                    "data.documents_per_sample = 16"),
          HasSubstr("got data.packing = \"stream\"")));
}

TEST_F(PackedRun, GraphsChangeNoBit) {
  train();
  const auto eager = rows();
  for (const char* impl : {"unit", "full_iteration"}) {
    std::filesystem::remove_all(folder_ / "run");
    const std::string printed = train(
        {fmt::format("cuda_graph.impl={}", impl), "debug.emulate_graphs=true"});
    EXPECT_EQ(rows(), eager) << impl << "\n" << printed;
    EXPECT_THAT(printed, HasSubstr("graph")) << impl;
  }
}

TEST_F(PackedRun, KeysAreChecked) {
  EXPECT_THAT(
      message_of([&] {
        config({"data.packing=stream", "data.documents_per_sample=4"});
      }),
      HasSubstr("data.documents_per_sample is set, but data.packing = "
                "\"stream\" does not use it"));
  EXPECT_THAT(
      train({"data.train=random", "validation.freq=0"}),
      HasSubstr("random tokens have no documents"));
  EXPECT_THAT(
      message_of([&] { config({"data.packing=document"}); }),
      HasSubstr("documents"));
}

}  // namespace
}  // namespace flatshard
