// Runs whose samples consist of complete documents.
#include "flatshard/core/error.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/train/tools/evaluate.h"
#include "flatshard/train/tools/stored_model.h"
#include "tests/support/message_of.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>

namespace flatshard {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Settings;

class PackedRun : public ::testing::Test {
 protected:
  PackedRun() {
    std::vector<std::string> texts;
    for (int i = 0; i < 200; ++i) {
      const std::string text(
          static_cast<std::size_t>(1 + i * i % 40),
          static_cast<char>('a' + i % 5));
      texts.push_back(text);
    }
    data::write_byte_corpus(folder_ / "corpus", texts, 0.2);
  }

  Config config(const Settings& overrides) const {
    return testing::small_config(
        testing::byte_run(
            folder_.path(),
            "run",
            {"data.packing=documents",
             "training.steps=8",
             "training.local_batch_size=2",
             "training.global_batch_size=4",
             "lr_scheduler.name=constant",
             "checkpoint.interval=4",
             "validation.freq=4",
             "validation.sequences=7"}),
        overrides);
  }

  /// Trains on one rank; returns what was printed, or the error.
  std::string train(const Settings& overrides = {}, bool resume = false) const {
    std::string printed;
    const std::string failure = message_of(
        [&] { printed = testing::train_printed(config(overrides), resume); });
    return failure == "no error" ? printed : failure;
  }

  /// Returns the numbers of metrics.jsonl that a run is compared by.
  std::vector<json> rows() const {
    std::vector<json> found;
    for (const json& row : testing::metric_rows(folder_ / "run")) {
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
                               "them split\\) in [0-9]+ samples, "
                               "9[0-9]\\.[0-9] % full"));
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

/// Writes a dataset of 3 chats: prompts of 100 tokens, and answers of
/// `num_trained` tokens.
void write_chats(const std::filesystem::path& folder, int num_trained) {
  constexpr int kPrompt = 100;
  std::filesystem::create_directories(folder);
  data::CorpusMeta meta{
      .vocab_size = 257,
      .end_of_document = 256,
      .tokenizer = data::kNoTokenizer,
      .input_hash = "0"};
  for (const char* split : {"train", "validation"}) {
    data::SplitWriter writer(
        folder,
        split,
        data::TokenType::uint16,
        1 << 20,
        /*masked=*/true);
    for (std::uint32_t chat = 0; chat < 3; ++chat) {
      std::vector<std::uint32_t> tokens(kPrompt + 8, 97 + chat);
      std::vector<std::uint8_t> mask(tokens.size(), 0);
      std::fill_n(mask.begin() + kPrompt, num_trained, 1);
      writer.append(tokens, mask);
      writer.end_document();
    }
    meta.splits.push_back(writer.finish());
  }
  std::ofstream(folder / "meta.json") << meta.to_json();
}

// Prompts fill three samples of each chat. The answers are in two more.
TEST_F(PackedRun, StepsWithoutATrainedTokenChangeNoWeight) {
  write_chats(folder_ / "chats", 5);
  const std::vector<std::string> overrides{
      fmt::format("data.train={}", (folder_ / "chats").string()),
      "training.steps=11",
      "training.local_batch_size=1",
      "training.global_batch_size=1",
      "optimizer.weight_decay=0.5",
      "diagnostics.norms_freq=1",
      "validation.freq=0"};
  ::testing::internal::CaptureStderr();
  const std::string printed = train(overrides);
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      AllOf(
          HasSubstr("data.train: 9 of the 11 samples of "),
          HasSubstr("have no trained token")));
  EXPECT_THAT(printed, HasSubstr("  loss: none  grad_norm: 0.0000"));
  int num_trained = 0;
  int num_untrained = 0;
  int num_changes = 0;
  json norms;
  for (const json& row : testing::metric_rows(folder_ / "run")) {
    if (row.contains("loss")) {
      EXPECT_FALSE(row.contains("not_finite"));
      (row["loss"].is_null() ? num_untrained : num_trained) += 1;
    }
    if (row.contains("weight_norms")) {
      num_changes += !norms.is_null() && norms != row["weight_norms"] ? 1 : 0;
      norms = row["weight_norms"];
    }
  }
  EXPECT_EQ(num_trained, 2);
  EXPECT_EQ(num_untrained, 9);
  EXPECT_GE(num_changes, 1);
  EXPECT_LE(num_changes, 2);

  // In one stream of tokens.
  auto stream = overrides;
  stream.emplace_back("data.packing=stream");
  ::testing::internal::CaptureStderr();
  train(stream);
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("of the 10 samples of "));

  write_chats(folder_ / "prompts", 0);
  EXPECT_THAT(
      train(
          {fmt::format("data.train={}", (folder_ / "prompts").string()),
           "validation.freq=0"}),
      AllOf(
          HasSubstr("data.train: none of the 11 samples of "),
          HasSubstr("raise training.seq_len")));
  EXPECT_THAT(
      train(
          {fmt::format("data.validation={}", (folder_ / "prompts").string())}),
      HasSubstr("data.validation: the first 7 samples of the validation "
                "split"));
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

TEST_F(PackedRun, IsEvaluatedByDocument) {
  train();
  EvaluateOptions options{
      .model = folder_ / "run",
      .data = (folder_ / "corpus").string(),
      .seq_len = 32,
      .batch_size = 3,
      .per_document = true,
      .device = "cpu"};
  const auto corpus = data::Corpus::open(folder_ / "corpus", "validation");
  models::Llama model = load_model(open_model(folder_ / "run", -1), at::kCPU);
  const Evaluated packed = evaluate(options);  // as the run packed them
  ASSERT_EQ(
      static_cast<std::int64_t>(packed.documents.size()),
      corpus->num_documents());
  double nats = 0;
  std::int64_t tokens = 0;
  std::int64_t bytes = 0;
  for (const DocumentLoss& found : packed.documents) {
    const std::int64_t begin = corpus->document_begin(found.index);
    const std::int64_t length = corpus->document_begin(found.index + 1) - begin;
    // Every token but the first is a target. The last is not a byte.
    EXPECT_EQ(found.tokens, length - 1);
    EXPECT_EQ(found.bytes, length - 2);
    if (length <= 32) {
      std::vector<std::int64_t> whole(static_cast<std::size_t>(length));
      corpus->read(begin, whole);
      const at::Tensor all = at::tensor(whole, at::kLong).unsqueeze(0);
      const double alone =
          model(all.narrow(1, 0, length - 1), all.narrow(1, 1, length - 1))
              .item<double>();
      // Matmuls of the rows of one document or of a sample.
      const double tolerance = testing::sum_tolerance(
          {.addends = 64,  // the width of a layer
           .in_a_row = testing::sums_of_forward(/*layers=*/2),
           .size = alone});
      EXPECT_NEAR(found.loss(), alone, tolerance) << found.index;
    }
    nats += found.nats;
    tokens += found.tokens;
    bytes += *found.bytes;
  }
  EXPECT_NEAR(packed.metrics.loss, nats / double(tokens), 1e-6);
  EXPECT_NEAR(
      packed.metrics.bits_per_byte.value(),
      nats / double(bytes) / std::log(2.0),
      1e-6);

  options.packing = data::Packing::stream;
  const Evaluated stream = evaluate(options);
  std::int64_t of_stream = 0;
  for (const DocumentLoss& found : stream.documents) {
    of_stream += found.tokens;
  }
  EXPECT_EQ(of_stream, stream.sequences * 32);
  EXPECT_NE(stream.metrics.loss, packed.metrics.loss);
}

}  // namespace
}  // namespace flatshard
