#pragma once

#include "flatshard/data/corpus.h"
#include "flatshard/data/loader.h"
#include "flatshard/data/token_source.h"
#include "tests/support/temp_folder.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace flatshard::testing {

namespace fs = std::filesystem;

// A run of the program ends long before. When it does not, that is the bug.
constexpr int kTimeoutS = 60;
constexpr int kTimedOut = 124;

struct Result {
  int code = -1;
  std::string output;  ///< standard output and error together

  /// Returns the lines with errors.
  std::vector<std::string> errors() const {
    static const std::regex kError(R"(^(\[rank[^\]]*\] )*error: .*)");
    std::vector<std::string> found;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
      if (std::regex_match(line, kError)) {
        found.push_back(line);
      }
    }
    return found;
  }
};

// `shell` may contain `$PROGRAM`.
/// Returns where a program that may be killed writes its line counts, if any. A
/// broken file then affects no other program's counts.
inline std::string counts_of_cut_off() {
  return (std::filesystem::temp_directory_path() / "flatshard_counts").string();
}

inline Result sh(const std::string& shell) {
  const TempFolder folder;
  const auto script = folder.write("script", shell);
  const std::string command = fmt::format(
      "PROGRAM='{}' OMP_NUM_THREADS=1 timeout -s KILL {} sh '{}' 2>&1 "
      "</dev/null",
      FLATSHARD_PROGRAM,
      kTimeoutS,
      script.string());
  std::FILE* pipe = ::popen(command.c_str(), "r");
  Result result;
  std::array<char, 4096> buffer{};
  while (const auto n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    result.output.append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  result.code =
      WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

inline std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns every file below a folder and its content.
inline std::map<std::string, std::string> snapshot(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) {
      files[fs::relative(entry.path(), folder).string()] = read(entry.path());
    }
  }
  return files;
}

inline std::string config_text(const fs::path& folder) {
  return fmt::format(
      R"([run]
output_dir = "{0}/run"
[model]
dim = 32
layers = 2
heads = 4
ffn_dim = 64
vocab_size = 257
[data]
train = "{0}/corpus"
[training]
steps = 6
seq_len = 33
local_batch_size = 2
[optimizer]
lr = 1e-2
[precision]
compute = "float32"
[metrics]
log_freq = 1
)",
      folder.string());
}

// `corpus` in the folder, of 2000 lines. `more` are options of `data prepare`.
inline void prepare_corpus(
    const TempFolder& folder,
    const std::string& more = {}) {
  std::string text;
  for (int i = 0; i < 2000; ++i) {
    text += fmt::format("line {} of a text, {}\n", i % 10, i * i % 101);
  }
  folder.write("texts/a.txt", text);
  const Result prepared = sh(fmt::format(
      "\"$PROGRAM\" data prepare --input '{0}/texts' --output '{0}/corpus' {1}",
      folder.path().string(),
      more));
  ASSERT_EQ(prepared.code, 0) << prepared.output;
}

// A dataset and a finished run on it, created once for all tests.
class BadInput : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TempFolder;
    std::string text;
    for (int i = 0; i < 400; ++i) {
      text += fmt::format("line {} of a text\n", i % 10);
    }
    shared_->write("texts/a.txt", text);
    const Result prepared = sh(fmt::format(
        "\"$PROGRAM\" data prepare --input '{0}/texts' --output '{0}/corpus'",
        shared_->path().string()));
    ASSERT_EQ(prepared.code, 0) << prepared.output;
    shared_->write("run.toml", config_text(shared_->path()));
    const Result run = sh(fmt::format(
        "\"$PROGRAM\" train '{}/run.toml' --nproc 2 --device cpu",
        shared_->path().string()));
    ASSERT_EQ(run.code, 0) << run.output;
  }
  static void TearDownTestSuite() { delete shared_; }

  void SetUp() override {
    ASSERT_TRUE(shared_ != nullptr && fs::exists(*shared_ / "run"));
    fs::copy(
        shared_->path(),
        folder_.path(),
        fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    folder_.write("run.toml", config_text(folder_.path()));
    earlier_ = snapshot(folder_ / "run");
    ASSERT_EQ(earlier_.size(), 4U);  // with sources/corpus/meta.json
  }

  std::string train(const std::string& more, int ranks = 2) const {
    return fmt::format(
        "\"$PROGRAM\" train '{}/run.toml' --device cpu --nproc {} {}",
        folder_.path().string(),
        ranks,
        more);
  }

  static void expect_one_error(const Result& result) {
    EXPECT_NE(result.code, 0) << result.output;
    EXPECT_NE(result.code, kTimedOut) << result.output;
    EXPECT_LT(result.code, 128) << "a signal\n" << result.output;
    EXPECT_EQ(result.errors().size(), 1U) << result.output;
  }

  // Fails before it has anything to write.
  std::string refused(const std::string& more, int ranks = 2) const {
    const Result result = sh(train(more, ranks));
    expect_one_error(result);
    EXPECT_EQ(snapshot(folder_ / "run"), earlier_) << more;
    return result.output;
  }

  // Fails after it started to write: the complete earlier run was moved away,
  // and no temporary file stays.
  void expect_earlier_run_kept() const {
    const auto now = snapshot(folder_ / "run");
    EXPECT_EQ(now.at("earlier/1/config.toml"), earlier_.at("config.toml"));
    EXPECT_EQ(now.at("earlier/1/metrics.jsonl"), earlier_.at("metrics.jsonl"));
    EXPECT_EQ(
        now.at("earlier/1/model.safetensors"),
        earlier_.at("model.safetensors"));
    for (const auto& [name, content] : now) {
      EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
    }
    const std::string metrics = now.at("metrics.jsonl");
    EXPECT_TRUE(metrics.empty() || metrics.back() == '\n') << metrics;
  }

  // Makes the tokens of rank 1 in step `step`, counted from 0, too large.
  void damage_tokens_of_rank_1(int step) const {
    const auto source = data::open_token_sources(
                            {{.path = (folder_ / "corpus").string()}},
                            "train",
                            0,
                            257)[0]
                            .source;
    data::Loader loader(
        source,
        {.seed = 0, .seq_len = 33, .global_batch_size = 4, .vocab_size = 257});
    for (int i = 0; i < step; ++i) {
      loader.advance();
    }
    const auto sequences =
        loader.sequences({.rank = 1, .world = 2, .local_batch = 2});
    const auto meta = data::CorpusMeta::load(folder_ / "corpus");
    const fs::path shard =
        folder_ / "corpus" / meta.find_split("train")->shard_file(0);
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    // In the middle, where the token belongs to a single sequence.
    file.seekp((sequences.front() * 33 + 16) * 2);
    file.write("\xff\xff", 2);
  }

  static inline TempFolder* shared_ = nullptr;
  TempFolder folder_;
  std::map<std::string, std::string> earlier_;
};

}  // namespace flatshard::testing
