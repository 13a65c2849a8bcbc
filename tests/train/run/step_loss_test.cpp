// The loss of a step is the mean over the trained tokens of all ranks and
// microbatches, however unevenly masks and packed documents spread them. Ranks
// may share sequences.
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/train/data/batches.h"
#include "flatshard/train/run/evaluation.h"
#include "flatshard/train/run/from_config.h"
#include "flatshard/train/run/microbatches.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/train_state.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_config.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;

constexpr std::int64_t kSeqLen = 16;
constexpr std::int64_t kGlobalBatch = 12;
constexpr std::int64_t kVocab = 61;  // as small_config has it
constexpr int kSteps = 2;

// Sums over the tokens of a step. The rate of SGD is 1.
const double kStepTolerance = testing::sum_tolerance(
    {.addends = kGlobalBatch * kSeqLen,
     .in_a_row = testing::sums_of_steps(/*layers=*/2, kSteps)});

// Tokens of a document that are trained, after its first one.
constexpr std::array<std::uint32_t, 4> kTrained{0, 1, 4, 15};

using Overrides = testing::Settings;

/// Returns a split of documents with kSeqLen tokens each, or of 2 to 40.
/// @param masked  a document has between no trained token and only such.
data::SplitMeta write_split(
    const std::filesystem::path& folder,
    const std::string& name,
    bool masked,
    bool varied) {
  data::SplitWriter writer(
      folder,
      name,
      data::TokenType::uint16,
      1 << 20,
      masked);
  for (std::uint32_t document = 0; document < 40; ++document) {
    const std::uint32_t length =
        varied ? 2 + document * document * 7 % 39 : kSeqLen;
    std::vector<std::uint32_t> tokens;
    std::vector<std::uint8_t> mask;
    for (std::uint32_t i = 0; i < length; ++i) {
      tokens.push_back((document * 31 + i * i * 7) % (kVocab - 1));
      mask.push_back(i >= 1 && i <= kTrained[document % 4] ? 1 : 0);
    }
    writer.append(
        tokens,
        masked ? std::span<const std::uint8_t>(mask)
               : std::span<const std::uint8_t>());
    writer.end_document();
  }
  return writer.finish();
}

void write_corpus(
    const std::filesystem::path& folder,
    bool masked,
    bool varied = false) {
  std::filesystem::create_directories(folder);
  const data::CorpusMeta meta{
      .vocab_size = kVocab,
      .end_of_document = kVocab - 1,
      .tokenizer = data::kNoTokenizer,
      .input_hash = "0",
      .splits = {
          write_split(folder, "train", masked, varied),
          write_split(folder, "validation", masked, varied)}};
  FileWriter file(folder / "meta.json");
  file.write(meta.to_json());
  file.close();
}

Config config_of(
    const std::filesystem::path& corpus,
    int world,
    int microbatches,
    const Overrides& overrides = {}) {
  return resolve_config(
      testing::small_config(
          {fmt::format("data.train={}", corpus.string()),
           fmt::format("training.steps={}", kSteps),
           fmt::format("training.seq_len={}", kSeqLen),
           fmt::format(
               "training.local_batch_size={}",
               std::max<std::int64_t>(
                   1,
                   kGlobalBatch / (world * microbatches))),
           fmt::format("training.global_batch_size={}", kGlobalBatch),
           "validation.freq=1",
           "validation.sequences=10",
           "optimizer.name=sgd",
           "optimizer.lr=1.0"},
          overrides),
      world);
}

struct Outcome {
  std::vector<double> losses;  ///< of steps: the mean of the ranks' parts
  std::vector<double> norms;   ///< of the gradients of steps, on each rank
  double validation = 0;
  double least_weight = 1;  ///< of a microbatch in the first step, of any rank
  double most_weight = 1;
  bool weighted = false;
  std::vector<float> weights;  ///< all of them, after the steps
};

Outcome train(
    const std::filesystem::path& corpus,
    int world,
    int microbatches,
    const Overrides& overrides = {}) {
  const Config config = config_of(corpus, world, microbatches, overrides);
  const TempFolder folder;
  const auto file = folder / "model.safetensors";
  Outcome outcome{.losses = std::vector<double>(kSteps)};
  std::mutex mutex;
  run_ranks(world, [&](RankContext& context) {
    const models::ModelConfig shape = model_config(config);
    const auto mesh = context.mesh(mesh_axes(config.parallelism));
    data::Loader loader = open_train_loader(run_options(config, shape).data);
    Batches batches(run_options(config, shape).batches, mesh, loader);
    ASSERT_EQ(batches.num_microbatches(), microbatches);
    TrainState state = make_train_state(config, shape, mesh, microbatches);
    Microbatches steps(
        state.model,
        state.runtime,
        mesh,
        batches,
        {.overlap = overlap_options(
             config.parallelism,
             config.activation_checkpoint.mode,
             shape)});
    for (int step = 0; step < kSteps; ++step) {
      batches.load_next();
      const at::Tensor loss = steps.forward_backward();
      const auto norm =
          grad_norm_and_scale(state.runtime->groups(), 1.0).norm.item<double>();
      // So that the weights show the gradients.
      state.optimizer->step(1.0);
      state.optimizer->zero_grad();
      state.runtime->finish_step();
      const std::lock_guard lock(mutex);
      outcome.losses[static_cast<std::size_t>(step)] +=
          loss.item<double>() / world;
      outcome.norms.push_back(norm);
      for (int m = 0; m < microbatches && step == 0; ++m) {
        const at::Tensor weight = batches.loss_weight(m);
        outcome.weighted = weight.defined();
        if (weight.defined()) {
          const auto w = weight.item<double>();
          outcome.least_weight = std::min(outcome.least_weight, w);
          outcome.most_weight = std::max(outcome.most_weight, w);
        }
      }
    }
    const ValidationMetrics validation =
        Evaluation(
            run_options(config, shape).evaluation,
            open_validation_sets(run_options(config, shape).data),
            mesh,
            state.model)
            .run(kSteps);
    const auto groups = state.runtime->all_groups();
    save_weights(
        {groups.begin(), groups.end()},
        file,
        {{"format", "pt"}},
        models::hf_entries_of(shape),
        {});
    if (context.rank == 0) {
      outcome.validation = validation.loss;
    }
  });
  const SafetensorsReader saved(file);
  for (const SafetensorsEntry& entry : saved.entries()) {
    std::vector<float> values(entry.nbytes() / sizeof(float));
    saved.read(entry, 0, std::as_writable_bytes(std::span(values)));
    outcome.weights.insert(outcome.weights.end(), values.begin(), values.end());
  }
  return outcome;
}

double largest_difference(
    const std::vector<float>& a,
    const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return most;
}

void expect_equal(const Outcome& outcome, const Outcome& expected) {
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(outcome.losses[step], expected.losses[step], kStepTolerance);
  }
  EXPECT_EQ(
      std::set(outcome.norms.begin(), outcome.norms.end()).size(),
      std::size_t{kSteps});
  EXPECT_NEAR(
      *std::ranges::max_element(outcome.norms),
      *std::ranges::max_element(expected.norms),
      kStepTolerance);
  EXPECT_NEAR(outcome.validation, expected.validation, kStepTolerance);
  EXPECT_LT(
      largest_difference(outcome.weights, expected.weights),
      kStepTolerance);
}

TEST(MaskedLoss, IsTheMeanOverTheTrainedTokensOfTheStep) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true);
  // One microbatch of one rank: a mean over its trained tokens.
  const Outcome expected = train(folder / "corpus", 1, 1);
  EXPECT_DOUBLE_EQ(expected.most_weight, 1);
  for (const int world : {1, 2, 4}) {
    for (const int microbatches : {1, 3}) {
      SCOPED_TRACE(fmt::format("{} ranks x {}", world, microbatches));
      const Outcome outcome = train(folder / "corpus", world, microbatches);
      expect_equal(outcome, expected);
      if (world * microbatches == 12) {
        // A sample each: without trained tokens, and far above the mean.
        EXPECT_EQ(outcome.least_weight, 0);
        EXPECT_GT(outcome.most_weight, 2);
      }
    }
  }
}

const char* const kPacked = "data.packing=documents";

TEST(PackedSteps, DoNotDependOnTheSplitOrRecompute) {
  for (const bool masked : {false, true}) {
    const TempFolder folder;
    write_corpus(folder / "corpus", masked, /*varied=*/true);
    const Outcome expected = train(folder / "corpus", 1, 1, {kPacked});
    EXPECT_GT(
        std::abs(train(folder / "corpus", 1, 1).losses[0] - expected.losses[0]),
        1e-3);
    for (const auto& [world, microbatches] :
         {std::pair{1, 3}, std::pair{2, 1}, std::pair{2, 3}, std::pair{4, 3}}) {
      SCOPED_TRACE(fmt::format("{} ranks x {}", world, microbatches));
      expect_equal(
          train(folder / "corpus", world, microbatches, {kPacked}),
          expected);
    }
    for (const char* mode : {"full", "selective"}) {
      SCOPED_TRACE(mode);
      expect_equal(
          train(
              folder / "corpus",
              2,
              1,
              {kPacked, fmt::format("activation_checkpoint.mode={}", mode)}),
          expected);
    }
  }
}

TEST(PackedSteps, TwoMicrobatchesAtOnceAreTheSame) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true, /*varied=*/true);
  const Overrides experts{
      kPacked,
      "model.family=moe",
      "model.num_experts=4",
      "model.moe_ffn_dim=16",
      "model.dense_layers=1"};
  Overrides overlapped = experts;
  overlapped.insert(
      overlapped.end(),
      {"parallelism.expert_parallel_degree=2",
       "parallelism.overlap_expert_parallel=true"});
  expect_equal(
      train(folder / "corpus", 2, 3, overlapped),
      train(folder / "corpus", 1, 1, experts));
}

/// Ranks that share sequences, and what else they do.
struct Shared {
  int ranks = 1;
  int data_ranks = 1;
  int microbatches = 1;
  Overrides set;
};

Outcome train_shared(
    const std::filesystem::path& corpus,
    const Shared& shared,
    Overrides model) {
  model.push_back(fmt::format(
      "training.local_batch_size={}",
      kGlobalBatch / (shared.data_ranks * shared.microbatches)));
  model.insert(model.end(), shared.set.begin(), shared.set.end());
  return train(corpus, shared.ranks, shared.microbatches, model);
}

const char* const kTwoRanks = "parallelism.context_parallel_degree=2";
const char* const kFourRanks = "parallelism.context_parallel_degree=4";
// As on hosts of one and of two ranks.
const char* const kGathersKeys =
    "parallelism.context_parallel_method=a2a+all_gather";
const char* const kOneForHeads = "parallelism.context_parallel_a2a_degree=1";
const char* const kTwoForHeads = "parallelism.context_parallel_a2a_degree=2";

const std::vector<Shared> kGrids{
    {2, 1, 1, {kTwoRanks}},
    // More ranks than heads of keys.
    {4, 1, 3, {kFourRanks, "activation_checkpoint.mode=full"}},
    {4, 2, 3, {kTwoRanks, "parallelism.strategy=zero2"}},
    {4, 1, 1, {kTwoRanks, "parallelism.tensor_parallel_degree=2"}},
    {4, 1, 3, {kFourRanks, kGathersKeys, kTwoForHeads}},
    {4,
     2,
     1,
     {kTwoRanks,
      "parallelism.data_parallel_replicate_degree=2",
      "activation_checkpoint.mode=selective"}}};

void expect_shared(
    const std::filesystem::path& corpus,
    const std::vector<Shared>& grids,
    const Overrides& model) {
  std::map<int, Outcome> whole;  // with these microbatches
  for (const Shared& grid : grids) {
    const int parts = grid.data_ranks * grid.microbatches;
    if (!whole.contains(parts)) {
      whole[parts] = train(corpus, 1, parts, model);
    }
    SCOPED_TRACE(fmt::format(
        "{} ranks x {}, {}",
        grid.ranks,
        grid.microbatches,
        fmt::join(grid.set, " ")));
    expect_equal(train_shared(corpus, grid, model), whole[parts]);
  }
}

TEST(ContextParallel, GridsTrainAsOneRank) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/false);
  expect_shared(folder / "corpus", kGrids, {});
  for (const char* strategy : {"zero0", "zero1"}) {
    expect_shared(
        folder / "corpus",
        {{2,
          1,
          1,
          {kTwoRanks, fmt::format("parallelism.strategy={}", strategy)}}},
        {});
  }
}

TEST(ContextParallel, PackedAndMaskedDocumentsTrainAsOnOneRank) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true, /*varied=*/true);
  expect_shared(folder / "corpus", kGrids, {kPacked});
}

// Gemma 3 has windows and norms of heads, gpt_oss windows, sinks and experts.
TEST(ContextParallel, FamiliesTrainAsOnOneRank) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true, /*varied=*/true);
  const Overrides window{"model.sliding_window=5"};
  const std::pair<Overrides, Overrides> families[] = {
      {{"model.family=gemma3", "model.sliding_window_pattern=2"}, {}},
      {{"model.family=gpt_oss",
        "model.num_experts=4",
        "model.experts_per_token=2"},
       {kPacked}}};
  for (const auto& [family, more] : families) {
    Overrides model = family;
    model.insert(model.end(), window.begin(), window.end());
    expect_shared(folder / "corpus", {kGrids[0], kGrids[3]}, model);
    model.insert(model.end(), more.begin(), more.end());
    expect_shared(folder / "corpus", {kGrids[0]}, model);
  }
}

// Recompute may store attention, and run the feed-forward part and the loss in
// chunks.
TEST(ContextParallel, RecomputeChangesNothing) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true);
  expect_shared(
      folder / "corpus",
      {{2,
        1,
        2,
        {kTwoRanks,
         "activation_checkpoint.mode=full",
         "activation_checkpoint.save=attention"}},
       {4,
        2,
        1,
        {kTwoRanks,
         "activation_checkpoint.mode=full",
         "activation_checkpoint.mlp_chunk_tokens=5",
         "activation_checkpoint.loss_chunk_tokens=7"}}},
      {});
}

// One rank has the only target of a step's sample.
TEST(ContextParallel, G11_OneTargetIsOnOneRank) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true);
  expect_shared(
      folder / "corpus",
      {{2, 1, 12, {kTwoRanks}},
       {4, 1, 12, {kFourRanks}},
       {2, 1, 12, {kTwoRanks, kGathersKeys, kOneForHeads}}},
      {});
}

// The auxiliary losses count the tokens of all ranks, and their weight does not
// depend on the targets of a rank.
TEST(ContextParallel, G12_ExpertsTrainAsOnOneRank) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true, /*varied=*/true);
  const Overrides experts{
      "model.family=moe",
      "model.num_experts=4",
      "model.moe_ffn_dim=16",
      "model.shared_experts=1",
      "moe.aux_loss=0.5",
      "moe.z_loss=0.1"};
  Overrides packed = experts;
  packed.emplace_back(kPacked);
  const char* const divided = "parallelism.expert_parallel_degree=2";
  const char* const cut = "parallelism.expert_tensor_parallel_degree=2";
  const char* const shared = "parallelism.tensor_parallel_degree=2";
  const std::vector<Shared> grids{
      {2, 1, 1, {kTwoRanks, "activation_checkpoint.mode=full"}},
      {4, 2, 1, {kTwoRanks, cut}},
      {4, 1, 1, {kTwoRanks, shared}},
      // Ranks that share a sequence have the same experts,
      {8, 2, 1, {kFourRanks, divided}},
      // or other ones.
      {2, 1, 1, {kTwoRanks, divided}},
      {2,
       1,
       3,
       {kTwoRanks,
        divided,
        "parallelism.token_exchange=copies",
        "parallelism.context_parallel_comm=copies"}},
      {4, 2, 1, {kTwoRanks, "parallelism.expert_parallel_degree=4"}},
      {4,
       2,
       1,
       {kTwoRanks, divided, "parallelism.data_parallel_replicate_degree=2"}},
      {4, 1, 1, {kTwoRanks, divided, shared}},
      {4, 2, 1, {kTwoRanks, divided, cut, "parallelism.strategy=zero1"}},
      // On several hosts, too.
      {4,
       1,
       1,
       {kFourRanks,
        kGathersKeys,
        kTwoForHeads,
        "parallelism.expert_parallel_degree=4"}},
      {4, 2, 1, {kTwoRanks, kGathersKeys, kOneForHeads, cut}},
      {4,
       2,
       3,
       {kTwoRanks, divided, "parallelism.overlap_expert_parallel=true"}}};
  expect_shared(folder / "corpus", grids, experts);
  expect_shared(folder / "corpus", grids, packed);
}

TEST(MaskedLoss, WithoutMasksThereAreNoWeights) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/false);
  EXPECT_FALSE(train(folder / "corpus", 2, 3).weighted);
}

TEST(MaskedLoss, AValidationWithoutTrainedTokensIsAnError) {
  const TempFolder folder;
  write_corpus(folder / "corpus", /*masked=*/true);
  const Config config = [&] {
    Config first = config_of(folder / "corpus", 1, 1);
    first.validation.sequences = 1;
    return first;
  }();
  const auto mesh = Mesh::single(at::kCPU);
  const models::ModelConfig shape = model_config(config);
  TrainState state = make_train_state(config, shape, mesh, 1);
  Evaluation evaluation(
      run_options(config, shape).evaluation,
      open_validation_sets(run_options(config, shape).data),
      mesh,
      state.model);
  EXPECT_THAT(
      message_of([&] { evaluation.run(1); }),
      ::testing::AllOf(
          HasSubstr("the first 1 samples of"),
          HasSubstr("have no token that is trained"),
          HasSubstr("raise validation.sequences")));
}

}  // namespace
}  // namespace flatshard
