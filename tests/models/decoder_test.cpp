// Tokens that run one by one against full sequences.
#include "flatshard/models/decoder.h"

#include <gtest/gtest.h>

#include <numeric>

#include "flatshard/core/error.h"
#include "flatshard/models/generate.h"
#include "tests/support/sum_order.h"

namespace flatshard::models {
namespace {

constexpr std::int64_t kDecodedVocab = 31;
constexpr std::int64_t kDecodedContext = 24;
constexpr std::int64_t kDecodedWindow = 5;
// Matmuls of one row and of many, over 40 elements in 3 layers.
const double kDecodedTolerance = testing::sum_tolerance(
    {.addends = 40, .in_a_row = testing::sums_of_forward(3)});

/// Returns the blocks of a family, with few layers of small sizes.
ModelConfig decoded_config(std::string_view family) {
  ModelConfig config = family_defaults(family);
  config.dim = 24;
  config.layers = 3;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.ffn_dim = 40;
  config.vocab_size = kDecodedVocab;
  config.max_seq_len = kDecodedContext;
  config.initializer_range = 0.2;  // so that attention matters
  AttentionOptions& attention = config.block.attention;
  if (attention.window > 0 || family == "mistral") {
    attention.window = kDecodedWindow;
  }
  if (attention.window_pattern.size() > 2) {
    attention.window_pattern = {true, true, false};
  }
  if (family.ends_with("moe")) {
    config.moe = {.num_experts = 4, .ffn_dim = 16};
  } else if (family == "mixtral" || family == "gpt_oss") {
    config.moe = {.num_experts = 4};  // of the width ffn_dim
  }
  return config;
}

Llama decoded_model(
    const ModelConfig& config,
    at::Device device = at::kCPU,
    at::ScalarType dtype = at::kFloat) {
  Llama model(config, LlamaOptions{.plain_attention = true});
  const auto fill =
      nn::random_fill(at::make_generator<at::CPUGeneratorImpl>(7));
  nn::materialize(
      *model,
      device,
      dtype,
      [&](const std::string& name, const InitSpec& spec, at::Tensor& out) {
        at::Tensor host = at::empty(out.sizes(), at::kFloat);
        fill(name, spec, host);
        out.copy_(host);
      });
  return model;
}

std::vector<std::int64_t> decoded_tokens(std::int64_t count, int seed) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back((i * i * 7 + i * 3 + seed * 11 + 1) % kDecodedVocab);
  }
  return tokens;
}

/// Returns the logits after a full sequence, without a cache.
at::Tensor whole_logits(Llama& model, const std::vector<std::int64_t>& tokens) {
  const at::NoGradGuard no_grad;
  const at::Device device = model->parameters().front().device();
  return model(at::tensor(tokens, at::kLong).unsqueeze(0).to(device))
      .select(0, 0)
      .select(0, static_cast<std::int64_t>(tokens.size()) - 1);
}

double decoded_error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor g = got.cpu().to(at::kDouble);
  const at::Tensor e = want.cpu().to(at::kDouble);
  return ((g - e).norm() / e.norm()).item<double>();
}

/// Feeds tokens of three sequences of unequal lengths one by one, and compares
/// each answer with a forward of the full sequence.
void expect_whole_answers(Llama& model, double tolerance) {
  constexpr std::int64_t kMost = kDecodedContext;
  const std::vector<std::int64_t> lengths{4, 9, 1};
  std::vector<std::vector<std::int64_t>> sequences;
  Decoder decoder(model, {.rows = 3, .max_tokens = kMost});
  for (std::int64_t row = 0; row < 3; ++row) {
    sequences.push_back(
        decoded_tokens(lengths[static_cast<std::size_t>(row)], int(row)));
    EXPECT_LE(
        decoded_error(
            decoder.begin(row, sequences.back()),
            whole_logits(model, sequences.back())),
        tolerance);
  }
  // The longest becomes full on the way, and drops its older half.
  for (std::int64_t i = 0; i < kMost - 4; ++i) {
    std::vector<std::int64_t> next;
    for (std::size_t row = 0; row < 3; ++row) {
      next.push_back((i * 5 + std::int64_t(row) * 13) % kDecodedVocab);
      auto& sequence = sequences[row];
      sequence.push_back(next.back());
      if (std::int64_t(sequence.size()) > kMost) {
        sequence.erase(sequence.begin(), sequence.end() - kMost / 2);
      }
    }
    const at::Tensor logits = decoder.append(next);
    ASSERT_EQ(logits.sizes().vec(), (std::vector<std::int64_t>{3, 31}));
    for (std::int64_t row = 0; row < 3; ++row) {
      EXPECT_LE(
          decoded_error(
              logits[row],
              whole_logits(model, sequences[static_cast<std::size_t>(row)])),
          tolerance)
          << "row " << row << " after " << i << " tokens";
    }
  }
}

class DecoderOf : public ::testing::TestWithParam<std::string_view> {};

INSTANTIATE_TEST_SUITE_P(
    Families,
    DecoderOf,
    ::testing::ValuesIn(family_names()),
    [](const auto& info) { return std::string(info.param); });

TEST_P(DecoderOf, AnswersAsWholeSequencesDo) {
  Llama model = decoded_model(decoded_config(GetParam()));
  expect_whole_answers(model, kDecodedTolerance);
}

TEST(Decoder, RunsSequencesAgainWhoseRotationsChange) {
  for (const nn::RopeType type :
       {nn::RopeType::dynamic, nn::RopeType::longrope}) {
    ModelConfig config =
        decoded_config(type == nn::RopeType::longrope ? "phi3" : "llama");
    config.rope_scaling = nn::RopeScaling{
        .type = type,
        .factor = 4.0,
        .original_max_positions = 12,
        .short_factors = {1.0, 1.1, 1.2, 1.3},
        .long_factors = {1.0, 1.5, 2.5, 4.0}};
    Llama model = decoded_model(config);
    expect_whole_answers(model, kDecodedTolerance);
  }
}

TEST(Decoder, OnAGpuAnswersAsWholeSequencesDo) {
  if (!at::hasCUDA()) {
    GTEST_SKIP() << "no GPU";
  }
  for (const std::string_view family : family_names()) {
    SCOPED_TRACE(family);
    Llama whole = decoded_model(decoded_config(family), at::kCUDA);
    expect_whole_answers(whole, 1e-4);
    const ModelConfig config = decoded_config(family);
    if (config.moe.num_experts > 0) {
      continue;  // a rounding gives a token other experts
    }
    Llama half = decoded_model(config, at::kCUDA, at::kBFloat16);
    // A few roundings to eight bits in other places.
    expect_whole_answers(half, 0.05);
  }
}

TEST(Decoder, HalfPrecisionAnswersAsWholeSequencesDo) {
  Llama model =
      decoded_model(decoded_config("gemma3"), at::kCPU, at::kBFloat16);
  expect_whole_answers(model, 0.05);
}

TEST(Decoder, MemoryIsThatOfTheWindowsAndTheContext) {
  const ModelConfig config = decoded_config("gemma3");
  const Llama model = decoded_model(config);
  const Decoder decoder(model, {.rows = 3, .max_tokens = 20});
  // Two layers with a window and one without, keys and values in float32.
  EXPECT_EQ(
      decoder.cache_nbytes(),
      2 * 3 * (2 * kDecodedWindow + 20) * config.kv_heads * config.head_dim *
          4);
  EXPECT_THROW(Decoder(model, {.rows = 1, .max_tokens = 25}), Error);
  EXPECT_THROW(Decoder(model, {.rows = 0, .max_tokens = 4}), Error);
}

using Texts = std::vector<std::vector<std::int64_t>>;

Texts generated_texts(
    Llama& model,
    const Texts& prompts,
    const GenerationOptions& options) {
  Texts found(prompts.size());
  generate(
      model,
      prompts,
      options,
      [&](std::size_t prompt, const std::vector<std::int64_t>& tokens) {
        EXPECT_TRUE(found.at(prompt).empty());
        found[prompt] = tokens;
      });
  return found;
}

Texts unequal_prompts() {
  return {
      decoded_tokens(3, 1),
      decoded_tokens(30, 2),  // longer than the context
      decoded_tokens(1, 3),
      decoded_tokens(7, 4),
      decoded_tokens(12, 5)};
}

TEST(Generate, GreedyTokensAreThoseWithoutACache) {
  for (const std::string_view family : family_names()) {
    SCOPED_TRACE(family);
    Llama model = decoded_model(decoded_config(family));
    const Texts prompts = unequal_prompts();
    const Texts found = generated_texts(
        model,
        prompts,
        {.max_new_tokens = 15,
         .sample = {.temperature = 0.0},
         .batch_size = 2});
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      std::vector<std::int64_t> context = prompts[i];
      const auto keep = [&](std::int64_t most, std::int64_t kept) {
        if (std::int64_t(context.size()) > most) {
          context.erase(context.begin(), context.end() - kept);
        }
      };
      keep(kDecodedContext, kDecodedContext);
      std::vector<std::int64_t> expected;
      for (int n = 0; n < 15; ++n) {
        expected.push_back(
            whole_logits(model, context).argmax().item<std::int64_t>());
        context.push_back(expected.back());
        keep(kDecodedContext, kDecodedContext / 2);
      }
      EXPECT_EQ(found[i], expected) << "prompt " << i;
    }
  }
}

TEST(Generate, DrawsOfAPromptDoNotDependOnTheOthers) {
  Llama model = decoded_model(decoded_config("llama"));
  const Texts prompts = unequal_prompts();
  GenerationOptions options{
      .max_new_tokens = 12,
      .sample = {.temperature = 1.5, .top_k = 20, .top_p = 0.9},
      .seed = 3,
      .batch_size = 3};
  const Texts together = generated_texts(model, prompts, options);
  EXPECT_EQ(generated_texts(model, prompts, options), together);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(
        generated_texts(model, {prompts[i]}, options).front(),
        together[i])
        << "prompt " << i;
  }
  options.seed = 4;
  EXPECT_NE(generated_texts(model, prompts, options), together);
}

TEST(Generate, APromptEndsAtItsStopToken) {
  Llama model = decoded_model(decoded_config("llama"));
  const Texts prompts = unequal_prompts();
  GenerationOptions options{
      .max_new_tokens = 12,
      .sample = {.temperature = 0.0},
      .batch_size = 2};
  const Texts whole = generated_texts(model, prompts, options);
  options.stop_tokens = {99, whole[0][2]};
  const Texts found = generated_texts(model, prompts, options);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto stop = std::find(whole[i].begin(), whole[i].end(), whole[0][2]);
    const auto end = stop == whole[i].end() ? stop : stop + 1;
    EXPECT_EQ(found[i], std::vector<std::int64_t>(whole[i].begin(), end)) << i;
  }
  EXPECT_LE(found[0].size(), 3U);
}

TEST(Generate, RefusesBadOptions) {
  Llama model = decoded_model(decoded_config("llama"));
  EXPECT_THROW(generated_texts(model, {{1}}, {.max_new_tokens = 0}), Error);
  EXPECT_THROW(generated_texts(model, {{1}}, {.batch_size = 0}), Error);
  EXPECT_THROW(generated_texts(model, {{}}, {}), Error);
  EXPECT_TRUE(generated_texts(model, {}, {}).empty());
}

}  // namespace
}  // namespace flatshard::models
