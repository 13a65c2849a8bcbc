#include "flatshard/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "tests/data/expect_error.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;

/// Sequence i is i * seq_len, i * seq_len + 1, ...
class CountingSource : public TokenSource {
 public:
  CountingSource(std::int64_t num_sequences, std::int64_t vocab_size)
      : num_sequences_(num_sequences), vocab_size_(vocab_size) {}

  std::int64_t num_sequences(std::int64_t) const override {
    return num_sequences_;
  }
  void read(std::int64_t index, const Sequence& out) const override {
    std::iota(
        out.tokens.begin(),
        out.tokens.end(),
        index * static_cast<std::int64_t>(out.tokens.size()));
    std::iota(out.targets.begin(), out.targets.end(), out.tokens.front() + 1);
  }
  std::int64_t vocab_size() const override { return vocab_size_; }
  std::string describe() const override { return "counting"; }

 private:
  std::int64_t num_sequences_;
  std::int64_t vocab_size_;
};

constexpr std::int64_t kVocab = 1 << 20;

Loader make_loader(
    std::int64_t num_sequences,
    std::int64_t global_batch,
    bool shuffle = true) {
  return Loader(
      std::make_shared<CountingSource>(num_sequences, kVocab),
      {.seed = 11,
       .seq_len = 4,
       .global_batch_size = global_batch,
       .vocab_size = kVocab,
       .shuffle = shuffle});
}

/// Returns the step's tokens of all ranks and microbatches, in rank-major
/// order.
std::vector<std::int64_t>
whole_step(const Loader& loader, int world, std::int64_t local_batch) {
  std::vector<std::int64_t> all;
  const auto numel = static_cast<std::size_t>(local_batch * 4);
  std::vector<std::int64_t> tokens(numel);
  std::vector<std::int64_t> targets(numel);
  const auto count = loader.num_microbatches(world, local_batch);
  for (int rank = 0; rank < world; ++rank) {
    for (std::int64_t m = 0; m < count; ++m) {
      loader.read(
          {.rank = rank,
           .world = world,
           .local_batch = local_batch,
           .microbatch = m},
          tokens,
          targets);
      all.insert(all.end(), tokens.begin(), tokens.end());
    }
  }
  return all;
}

TEST(Loader, AStepDependsOnSeedAndStepAlone) {
  Loader reference = make_loader(101, 24);
  for (int step = 0; step < 12; ++step) {
    const auto expected = whole_step(reference, 1, 24);
    for (const int world : {1, 2, 3, 4, 8}) {
      for (const std::int64_t local_batch : {1, 2, 3, 4, 6, 12}) {
        if (24 % (world * local_batch) != 0) {
          continue;
        }
        Loader loader = make_loader(101, 24);
        for (int i = 0; i < step; ++i) {
          loader.advance();
        }
        EXPECT_EQ(whole_step(loader, world, local_batch), expected)
            << "step " << step << " world " << world << " local batch "
            << local_batch;
      }
    }
    reference.advance();
  }
}

TEST(Loader, EveryEpochSeesEverySequenceOnce) {
  constexpr std::int64_t kSequences = 30;
  Loader loader = make_loader(kSequences, 7);
  std::vector<std::int64_t> seen;
  while (seen.size() < 3 * kSequences) {
    for (const std::int64_t s : loader.sequences({.local_batch = 7})) {
      seen.push_back(s);
    }
    loader.advance();
  }
  std::vector<std::vector<std::int64_t>> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    epochs.emplace_back(
        seen.begin() + epoch * kSequences,
        seen.begin() + (epoch + 1) * kSequences);
    auto sorted = epochs.back();
    std::sort(sorted.begin(), sorted.end());
    for (std::int64_t i = 0; i < kSequences; ++i) {
      EXPECT_EQ(sorted[static_cast<std::size_t>(i)], i);
    }
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(Loader, TargetsAreTheNextTokens) {
  const Loader loader = make_loader(5, 2);
  std::vector<std::int64_t> tokens(8);
  std::vector<std::int64_t> targets(8);
  loader.read({.local_batch = 2}, tokens, targets);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(targets[i], tokens[i] + 1);
  }
  EXPECT_EQ(tokens[0] % 4, 0);
}

TEST(Loader, ResumeEqualsAnUninterruptedRun) {
  Loader straight = make_loader(37, 8);
  Loader first = make_loader(37, 8);
  for (int i = 0; i < 9; ++i) {
    straight.advance();
    first.advance();
  }
  const LoaderState state = first.state();
  EXPECT_EQ(
      state,
      (LoaderState{
          .seed = 11,
          .seq_len = 4,
          .num_sequences = 37,
          .samples_consumed = 72}));
  Loader resumed = make_loader(37, 8);
  resumed.restore(state);
  for (int i = 0; i < 9; ++i) {
    // On another number of ranks, too.
    EXPECT_EQ(whole_step(resumed, 4, 2), whole_step(straight, 2, 1));
    straight.advance();
    resumed.advance();
  }
}

TEST(Loader, ResumeWithAnotherGlobalBatchGoesOnWhereItWas) {
  Loader first = make_loader(100, 8);
  first.advance();
  Loader wide = make_loader(100, 16);
  wide.restore(first.state());
  auto expected = first.sequences({.local_batch = 8});
  first.advance();
  const auto more = first.sequences({.local_batch = 8});
  expected.insert(expected.end(), more.begin(), more.end());
  EXPECT_EQ(wide.sequences({.local_batch = 16}), expected);
}

TEST(Loader, WithoutShuffleInOrder) {
  Loader loader = make_loader(5, 3, false);
  EXPECT_EQ(
      loader.sequences({.local_batch = 3}),
      (std::vector<std::int64_t>{0, 1, 2}));
  loader.advance();
  EXPECT_EQ(
      loader.sequences({.local_batch = 3}),
      (std::vector<std::int64_t>{3, 4, 0}));
  EXPECT_EQ(loader.epoch(), 0);
  loader.advance();
  EXPECT_EQ(loader.epoch(), 1);
  // Wherever the position is.
  std::vector<std::int64_t> tokens(8);
  std::vector<std::int64_t> targets(8);
  loader.read_samples(4, tokens, targets);
  EXPECT_EQ(tokens, (std::vector<std::int64_t>{16, 17, 18, 19, 0, 1, 2, 3}));
  EXPECT_EQ(targets[7], 4);
  EXPECT_THAT(
      error_message(
          ErrorCode::usage,
          [&] { loader.read_samples(0, tokens, std::span(targets).first(4)); }),
      HasSubstr("multiple of seq_len = 4, got 0, 8 and 4"));
}

/// Sources of 30, 12 and 7 sequences with the shares 0.6, 0.3 and 0.1.
Loader make_mixture(std::int64_t global_batch, double factor = 1) {
  std::vector<WeightedSource> sources;
  for (const auto& [n, weight] :
       {std::pair{30, 6.0}, std::pair{12, 3.0}, std::pair{7, 1.0}}) {
    sources.push_back(
        {std::make_shared<CountingSource>(n, kVocab), weight * factor});
  }
  return Loader(
      std::move(sources),
      {.seed = 11,
       .seq_len = 4,
       .global_batch_size = global_batch,
       .vocab_size = kVocab});
}

TEST(Mixture, SharesHoldAtEveryLength) {
  const std::vector<double> weights{6, 3, 1, 0.01};
  const Mixture mixture(weights);
  std::vector<std::int64_t> counts(4);
  for (std::int64_t i = 0; i < 20000; ++i) {
    const auto [source, index] = mixture(i);
    ASSERT_EQ(index, counts[source]) << i;
    ++counts[source];
    for (std::size_t s = 0; s < 4; ++s) {
      // Half a turn for each side that was split before.
      ASSERT_NEAR(
          static_cast<double>(counts[s]),
          weights[s] / 10.01 * static_cast<double>(i + 1),
          2.0)
          << i;
    }
  }
  // Far out, the pattern still repeats exactly every three samples.
  const Mixture two({1, 2});
  constexpr std::int64_t kFar = (std::int64_t{1} << 61) + 12345;
  for (std::int64_t i = kFar; i < kFar + 100; ++i) {
    const auto [source, index] = two(i);
    EXPECT_EQ(two(i + 3).source, source);
    EXPECT_NEAR(
        static_cast<double>(index),
        static_cast<double>(i) / 3.0 * (source == 0 ? 1 : 2),
        1e10);
  }
  EXPECT_EQ(Mixture({5.0})(7), (Mixture::Turn{0, 7}));
  for (const std::vector<double>& bad : std::vector<std::vector<double>>{
           {1, 0},
           {1, -1},
           {NAN},
           {1, 1e-11},
           {1e11, 1, 1},
           {}}) {
    EXPECT_THAT(
        error_message(ErrorCode::config, [&] { Mixture m(bad); }),
        ::testing::ContainsRegex("weight: |at least one source"));
  }
}

TEST(Loader, AMixtureDependsOnSeedAndStepAlone) {
  Loader reference = make_mixture(24);
  std::map<std::int64_t, int> seen;
  for (int step = 0; step < 30; ++step) {
    const auto expected = whole_step(reference, 1, 24);
    for (const int world : {2, 3, 8}) {
      Loader loader = make_mixture(24, 0.1);  // only ratios matter
      loader.restore(reference.state());
      EXPECT_EQ(whole_step(loader, world, 1), expected) << step;
    }
    for (const std::int64_t s : reference.sequences({.local_batch = 24})) {
      ++seen[s];
    }
    reference.advance();
  }
  // 720 samples: 432, 216 and 72 of the sources, each sequence as often as
  // any other of its source.
  EXPECT_EQ(seen.size(), 49U);
  for (const auto& [sequence, count] : seen) {
    const int times = sequence < 30 ? 432 / 30 : sequence < 42 ? 216 / 12 : 10;
    EXPECT_NEAR(count, times, 1) << sequence;
  }
}

TEST(Loader, AMixtureOfOneIsThatSource) {
  Loader one(
      std::vector<WeightedSource>{
          {std::make_shared<CountingSource>(101, kVocab), 3}},
      {.seed = 11,
       .seq_len = 4,
       .global_batch_size = 24,
       .vocab_size = kVocab});
  EXPECT_EQ(whole_step(one, 1, 24), whole_step(make_loader(101, 24), 1, 24));
  EXPECT_EQ(one.state(), make_loader(101, 24).state());
}

TEST(Loader, RestoreRefusesAnotherMixture) {
  Loader loader = make_mixture(6);
  LoaderState state = loader.state();
  state.parts[1].share /= 2;
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { loader.restore(state); }),
      ::testing::AllOf(
          HasSubstr("15.00% of 12 sequences"),
          HasSubstr("30.00% of 12 sequences"),
          HasSubstr("data.train has other datasets or weights"),
          HasSubstr("checkpoint.exclude")));
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] { loader.restore(make_loader(49, 6).state()); }),
      HasSubstr("belongs to one dataset, got a mixture of 60.00% of 30"));
}

TEST(Loader, SeedsGiveOtherOrders) {
  const auto source = std::make_shared<CountingSource>(1000, kVocab);
  LoaderOptions options{
      .seed = 1,
      .seq_len = 4,
      .global_batch_size = 100,
      .vocab_size = kVocab};
  const auto a = Loader(source, options).sequences({.local_batch = 100});
  options.seed = 2;
  EXPECT_NE(a, Loader(source, options).sequences({.local_batch = 100}));
}

TEST(Loader, ErrorsNameBothNumbers) {
  const auto source = std::make_shared<CountingSource>(10, 257);
  const auto build = [&](LoaderOptions options) {
    return error_message(ErrorCode::config, [&] { Loader(source, options); });
  };
  EXPECT_THAT(
      build({.seq_len = 4, .global_batch_size = 1, .vocab_size = 256}),
      HasSubstr("a vocabulary of 257 tokens, but model.vocab_size is 256"));
  EXPECT_THAT(
      build({.global_batch_size = 1, .vocab_size = 257}),
      HasSubstr("training.seq_len: expected at least 1, got 0"));
  EXPECT_THAT(
      build({.seq_len = 4, .vocab_size = 257}),
      HasSubstr("training.global_batch_size: expected at least 1, got 0"));
  const auto empty = std::make_shared<CountingSource>(0, 257);
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] {
            Loader(
                empty,
                {.seq_len = 4, .global_batch_size = 1, .vocab_size = 257});
          }),
      HasSubstr("needs training.seq_len + 1 = 5 tokens, got counting"));

  const Loader loader = make_loader(10, 6);
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { loader.num_microbatches(4, 1); }),
      HasSubstr(
          "global_batch_size = 6 must be a multiple of local_batch_size * "
          "ranks = 1 * 4"));
  std::vector<std::int64_t> buffer(4);
  EXPECT_THAT(
      error_message(
          ErrorCode::usage,
          [&] { loader.read({.rank = 2, .world = 2}, buffer, buffer); }),
      HasSubstr("expected rank in [0, 2) and microbatch in [0, 3), got 2"));
  EXPECT_THAT(
      error_message(
          ErrorCode::usage,
          [&] { loader.read({.local_batch = 2}, buffer, buffer); }),
      HasSubstr("local_batch * seq_len = 8 elements, got 4 and 4"));
}

TEST(Loader, ATokenBeyondTheVocabularyIsAnError) {
  // A damaged dataset: claims 3 tokens, returns more.
  const auto source = std::make_shared<CountingSource>(2, 3);
  const Loader loader(
      source,
      {.seq_len = 4,
       .global_batch_size = 1,
       .vocab_size = 3,
       .shuffle = false});
  std::vector<std::int64_t> tokens(4);
  std::vector<std::int64_t> targets(4);
  EXPECT_THAT(
      error_message(
          ErrorCode::format,
          [&] { loader.read({}, tokens, targets); }),
      HasSubstr("token 3 at place 3 of sequence 0 (counting) is beyond "
                "model.vocab_size = 3"));
}

TEST(Loader, RestoreRefusesAnotherOrder) {
  Loader loader = make_loader(10, 2);
  LoaderState state = loader.state();
  state.seed = 12;
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { loader.restore(state); }),
      HasSubstr("run.seed = 12, got 11"));
  state = loader.state();
  state.seq_len = 8;
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { loader.restore(state); }),
      HasSubstr("training.seq_len = 8, got 4"));
  state = loader.state();
  state.num_sequences = 9;
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { loader.restore(state); }),
      HasSubstr("a dataset of 9 sequences, got one of 10"));
}

}  // namespace
}  // namespace flatshard::data
