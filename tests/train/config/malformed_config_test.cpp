// Every config is read or rejected with an Error: nothing else is thrown,
// nothing crashes.
#include "tests/train/config/malformed_config.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/run_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <set>

namespace flatshard {
namespace {

constexpr int kConfigs = 20000;
constexpr int kOverrides = 5000;
constexpr std::uint64_t kSeed = 20240607;

// Returns every key with a good value.
std::string good_config() {
  Config config;
  config.data.train = {{.path = "corpus"}, {.path = "more", .weight = 2.5}};
  config.model.dim = 192;
  config.model.layers = 4;
  config.model.heads = 6;
  config.model.kv_heads = 3;
  config.model.ffn_dim = 512;
  config.model.vocab_size = 257;
  config.model.rope_theta = 1e4;
  config.training.seq_len = 255;
  return to_toml(config);
}

struct Tally {
  int read = 0;
  int refused = 0;
  std::set<std::string> messages;
};

template <class F>
void count(const F& parse, const std::string& input, Tally& tally) {
  try {
    parse();
    ++tally.read;
  } catch (const Error& error) {
    EXPECT_TRUE(
        error.code() == ErrorCode::config || error.code() == ErrorCode::usage)
        << error.what() << "\n"
        << input;
    EXPECT_FALSE(error.message().empty());
    EXPECT_LT(error.message().size(), 1500U) << input;
    ++tally.refused;
    tally.messages.insert(error.message());
  } catch (const std::exception& other) {
    ADD_FAILURE() << "not an Error: " << other.what() << "\nfor:\n" << input;
  }
}

TEST(MalformedConfig, IsReadOrRefusedByName) {
  const std::string good = good_config();
  parse_config(good, "good.toml");
  testing::MalformedConfigs configs(good, kSeed);
  Tally tally;
  for (int i = 0; i < kConfigs; ++i) {
    const std::string text = configs.next();
    count(
        [&] { resolve_config(parse_config(text, "run.toml"), 2); },
        text,
        tally);
  }
  std::printf(
      "%d configs: %d refused with %zu different messages, %d read\n",
      kConfigs,
      tally.refused,
      tally.messages.size(),
      tally.read);
  EXPECT_GT(tally.refused, kConfigs / 2);
}

TEST(MalformedConfig, OverridesToo) {
  const std::string good = good_config();
  std::string all;
  for (const ConfigKey& key : config_keys()) {
    all += fmt::format("{}=1\n", key.full_name);
  }
  testing::MalformedConfigs configs(all, kSeed + 1);
  Tally tally;
  std::mt19937_64 random(kSeed + 2);
  for (int i = 0; i < kOverrides; ++i) {
    const std::string text = configs.next();
    // One line of it.
    const auto at = text.empty() ? 0 : random() % text.size();
    const auto begin = text.rfind('\n', at);
    const auto first = begin == std::string::npos ? 0 : begin + 1;
    const auto end = text.find('\n', first);
    const std::string item =
        text.substr(first, end == std::string::npos ? end : end - first);
    count(
        [&] { resolve_config(parse_config(good, "good.toml", {item}), 2); },
        item,
        tally);
  }
  std::printf(
      "%d overrides: %d refused, %d read\n",
      kOverrides,
      tally.refused,
      tally.read);
  EXPECT_GT(tally.refused, kOverrides / 4);
}

// A text that is nested too deep, or so long that it could be, never reaches a
// parser that calls itself for each level.
TEST(MalformedConfig, DeepNestingIsRefused) {
  for (const std::size_t depth : {1000U, 100000U}) {
    const std::string cases[] = {
        "a = " + std::string(depth, '['),
        "a = " + std::string(depth, '[') + std::string(depth, ']'),
        [&] {
          std::string text = "a";
          for (std::size_t i = 0; i < depth; ++i) {
            text += ".a";
          }
          return text + " = 1";
        }(),
        [&] {
          std::string text = "a = ";
          for (std::size_t i = 0; i < depth; ++i) {
            text += "{a=";
          }
          return text;
        }()};
    for (const std::string& text : cases) {
      EXPECT_THROW(parse_config(text, "run.toml"), Error) << depth;
    }
  }
}

}  // namespace
}  // namespace flatshard
