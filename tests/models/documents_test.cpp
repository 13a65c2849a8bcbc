// Documents that share rows against documents one by one.
#include "flatshard/nn/documents.h"
#include "flatshard/models/llama.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "tests/support/sum_order.h"

#include <map>
#include <numeric>

namespace flatshard::models {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kPackedVocab = 31;
constexpr std::int64_t kPackedSeqLen = 16;
// Sums over 32 tokens of all documents or of one, forward and backward of 2
// layers.
const double kPackedTolerance = testing::sum_tolerance(
    {.addends = 32, .in_a_row = testing::sums_of_steps(2, 1)});

Llama packed_model(
    ActivationCheckpoint checkpoint,
    bool experts,
    std::int64_t chunk_tokens,
    bool windows = false,
    bool sinks = false,
    std::optional<nn::RopeType> rope = {},
    bool keep_attention = false) {
  ModelConfig config{
      .dim = 24,
      .layers = 2,
      .heads = 6,
      .kv_heads = 2,
      .ffn_dim = 40,
      .vocab_size = kPackedVocab,
      .max_seq_len = kPackedSeqLen,
      .rope_theta = 1000.0,
      .initializer_range = 0.2};  // so that attention matters
  if (windows) {
    config.family = "gemma2";
    config.block = family_defaults("gemma2").block;
    config.block.attention.window = 3;
    config.block.attention.window_pattern = {true, false};
    config.block.attention.query_pre_attn_scalar = 9.0;
    config.block.attention.soft_cap = 0.5;
  }
  if (rope) {  // some documents are longer than the original length
    config.family = *rope == nn::RopeType::longrope ? "phi3" : "llama";
    config.rope_scaling = {
        .type = *rope,
        .factor = 4.0,
        .original_max_positions = 6,
        .attention_factor = 1.25,
        .short_factors = {1.0, 1.5},
        .long_factors = {2.0, 6.0}};
  }
  if (experts) {
    config.family = "moe";
    config.block.attention.qk_norm = QkNorm::head;
    config.moe = {
        .num_experts = 4,
        .experts_per_token = 2,
        .ffn_dim = 16,
        .shared_experts = 1,
        .dense_layers = 1};
  }
  if (sinks) {
    config.family = "gpt_oss";
    config.block = family_defaults("gpt_oss").block;
    config.block.attention.window = 3;
    config.moe = {.num_experts = 4};
  }
  Llama model(
      config,
      LlamaOptions{
          .activation_checkpoint = checkpoint,
          .keep_attention = keep_attention,
          .loss = {
              .reduction = nn::LossReduction::sum,
              .chunk_tokens = chunk_tokens}});
  nn::materialize(
      *model,
      at::kCPU,
      at::kFloat,
      nn::random_fill(at::make_generator<at::CPUGeneratorImpl>(4)));
  return model;
}

std::map<std::string, at::Tensor> take_gradients(Llama& model) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : model->named_parameters()) {
    at::Tensor parameter = item.value();
    gradients[item.key()] = parameter.grad().clone();
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

struct DocumentsCase {
  ActivationCheckpoint checkpoint = ActivationCheckpoint::none;
  bool experts = false;
  std::int64_t chunk_tokens = 0;
  bool windows = false;
  bool sinks = false;
  std::optional<nn::RopeType> rope = {};
  bool keep_attention = false;
};

class DocumentsOf : public ::testing::TestWithParam<DocumentsCase> {};

TEST_P(DocumentsOf, OneRowTrainAsOneByOne) {
  const auto& [checkpoint, experts, chunk_tokens, windows, sinks, rope, keep] =
      GetParam();
  Llama model = packed_model(
      checkpoint,
      experts,
      chunk_tokens,
      windows,
      sinks,
      rope,
      keep);
  // Two rows; the second ends with padding.
  const std::vector<std::int64_t> lengths{7, 1, 8, 5, 6, 5};
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const at::Tensor tokens =
      at::randint(kPackedVocab, {2, kPackedSeqLen}, generator, at::kLong);
  const at::Tensor targets =
      at::randint(kPackedVocab, {2, kPackedSeqLen}, generator, at::kLong);
  targets[1].narrow(0, 11, 5).fill_(-100);
  targets[0][3] = -100;  // masked
  const auto documents = nn::Documents::of(lengths, kPackedSeqLen, at::kCPU);
  EXPECT_EQ(documents.max_length, 8);

  const at::Tensor packed = model(tokens, targets, documents);
  packed.backward();
  const auto got = take_gradients(model);

  double expected = 0;
  std::int64_t end = 0;
  for (const std::int64_t length : lengths) {
    end += length;
    const auto part = [&](const at::Tensor& all) {
      return all.view({-1}).narrow(0, end - length, length).unsqueeze(0);
    };
    const at::Tensor loss = model(part(tokens), part(targets));
    loss.backward();
    expected += loss.item<double>();
  }
  const auto wanted = take_gradients(model);

  EXPECT_NEAR(packed.item<double>() / expected, 1, kPackedTolerance);
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [name, gradient] : wanted) {
    const double scale = gradient.abs().max().item<double>();
    EXPECT_GT(scale, 0) << name;
    EXPECT_LE(
        (got.at(name) - gradient).abs().max().item<double>(),
        kPackedTolerance * scale)
        << name;
  }
  // Documents that attend to each other train otherwise.
  const at::NoGradGuard no_grad;
  EXPECT_GT(
      std::abs(model(tokens, targets).item<double>() - expected),
      1e-3 * expected);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    DocumentsOf,
    ::testing::Values(
        DocumentsCase{},
        DocumentsCase{.checkpoint = ActivationCheckpoint::full},
        DocumentsCase{
            .checkpoint = ActivationCheckpoint::selective,
            .chunk_tokens = 5},
        DocumentsCase{.windows = true},
        DocumentsCase{.experts = true},
        DocumentsCase{.sinks = true},
        DocumentsCase{.rope = nn::RopeType::longrope},
        DocumentsCase{.rope = nn::RopeType::dynamic},
        DocumentsCase{
            .checkpoint = ActivationCheckpoint::full,
            .rope = nn::RopeType::dynamic},
        DocumentsCase{
            .checkpoint = ActivationCheckpoint::full,
            .keep_attention = true},
        DocumentsCase{
            .checkpoint = ActivationCheckpoint::full,
            .sinks = true,
            .keep_attention = true},
        DocumentsCase{
            .checkpoint = ActivationCheckpoint::full,
            .experts = true,
            .keep_attention = true}));

TEST(Documents, PlacesThatAreNotUsedChangeNothing) {
  Llama model = packed_model(ActivationCheckpoint::none, false, 0);
  const at::Tensor tokens = at::arange(kPackedSeqLen).unsqueeze(0);
  const std::vector<std::int64_t> lengths{9, 7};
  auto documents = nn::Documents::of(lengths, kPackedSeqLen, at::kCPU);
  const at::NoGradGuard no_grad;
  const at::Tensor expected = model(tokens, tokens, documents);
  documents.offsets =
      at::cat({documents.offsets, at::full({5}, kPackedSeqLen, at::kInt)});
  documents.max_length = kPackedSeqLen;
  EXPECT_TRUE(at::equal(model(tokens, tokens, documents), expected));
}

TEST(Documents, AreChecked) {
  const auto refusal = [](const std::vector<std::int64_t>& lengths,
                          std::size_t places = 4,
                          std::size_t num_tokens = 8) -> std::string {
    std::vector<std::int32_t> offsets(places + 1);
    std::vector<std::int32_t> positions(num_tokens);
    try {
      nn::write_documents(lengths, 4, offsets, positions);
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_EQ(refusal({1, 3, 4}), "none");
  EXPECT_THAT(refusal({1, 3, 4}, 2), HasSubstr("at most 2 documents, got 3"));
  EXPECT_THAT(
      refusal({3, 2, 3}),
      HasSubstr("document 1: expected at least one token and its end in row 0 "
                "of 4 tokens, got 2 tokens from token 3"));
  EXPECT_THAT(refusal({0}), HasSubstr("document 0"));
  EXPECT_THAT(refusal({4}), HasSubstr("expected documents of 8 tokens"));
  EXPECT_THAT(refusal({4, 4, 1}), HasSubstr("document 2"));
  Llama model = packed_model(ActivationCheckpoint::none, false, 0);
  const std::vector<std::int64_t> lengths{4};
  try {
    model(
        at::zeros({1, 8}, at::kLong),
        at::Tensor(),
        nn::Documents::of(lengths, 4, at::kCPU));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("documents of 8 tokens"));
  }
}

}  // namespace
}  // namespace flatshard::models
