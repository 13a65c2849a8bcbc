// Bad input, through the program and over two ranks: it ends within its
// timeout, prints one error that names the option, and keeps the results of an
// earlier run.
#include "tests/cli/bad_input.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/run_config.h"
#include "tests/train/config/malformed_config.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include <csignal>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Options that are refused, and texts that the error has. `{0}` is the folder.
struct Refused {
  std::string name;
  std::string options;
  std::vector<std::string> says;
};

class RefusedOptions : public BadInput,
                       public ::testing::WithParamInterface<Refused> {};

TEST_P(RefusedOptions, AreNamed) {
  folder_.write("garbage.json", "\x01\x02{]");
  folder_.write("list.json", "[1]");
  folder_.write("file", "not a folder");
  const std::string here = folder_.path().string();
  const std::string output =
      refused(fmt::format(fmt::runtime(GetParam().options), here));
  for (const std::string& text : GetParam().says) {
    EXPECT_THAT(output, HasSubstr(text));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Files,
    RefusedOptions,
    ::testing::Values(
        Refused{
            "NoCorpus",
            "--set data.train=/none",
            {"data.train", "'/none'"}},
        Refused{
            "FolderOfTexts",
            "--set data.train={0}/texts",
            {"data.train", "meta.json"}},
        Refused{
            "NoValidation",
            "--set validation.freq=2 --set data.validation=/none",
            {"data.validation"}},
        Refused{
            "NoModel",
            "--set model.hf_config=/none.json",
            {"model.hf_config", "/none.json"}},
        Refused{
            "NoJson",
            "--set model.hf_config={0}/garbage.json",
            {"model.hf_config", "garbage.json", "JSON"}},
        Refused{
            "JsonList",
            "--set model.hf_config={0}/list.json",
            {"model.hf_config", "JSON object"}},
        Refused{
            "OutputIsAFile",
            "--set run.output_dir={0}/file",
            {"run.output_dir", "/file"}},
        Refused{
            "OutputCannotBeMade",
            "--set run.output_dir=/proc/none",
            {"run.output_dir", "/proc/none"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Numbers,
    RefusedOptions,
    ::testing::Values(
        Refused{
            "Vocabulary",
            "--set model.vocab_size=100",
            {"model.vocab_size", "257"}},
        Refused{
            "GlobalBatch",
            "--set training.global_batch_size=6",
            {"training.global_batch_size = 6", "2 * 2"}},
        Refused{
            "LongSequence",
            "--set training.seq_len=100000",
            {"training.seq_len"}},
        Refused{
            "NegativeSequence",
            "--set training.seq_len=-3",
            {"training.seq_len", "-3"}},
        Refused{
            "SequenceBeyond32Bits",
            "--set training.seq_len=99999999999",
            {"training.seq_len"}},
        Refused{"Layers", "--set model.layers=1000000000", {"model.layers"}},
        Refused{"DimOfHeads", "--set model.dim=33", {"model.heads"}},
        Refused{"OddHeadDim", "--set model.dim=36", {"model.head_dim", "even"}},
        Refused{"NormEps", "--set model.norm_eps=0", {"model.norm_eps"}},
        Refused{
            "Memory",
            "--set model.ffn_dim=4000000 --set model.dim=1000000",
            {"memory error", "GiB"}},
        Refused{
            "ReplicatesAndShards",
            "--set parallelism.data_parallel_replicate_degree=2 --set "
            "parallelism.data_parallel_shard_degree=2",
            {"data_parallel_replicate_degree", "2 * 2"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Words,
    RefusedOptions,
    ::testing::Values(
        Refused{
            "Preset",
            "--set model.preset=llama9",
            {"model.preset", "llama3_8b"}},
        Refused{"Strategy", "--set parallelism.strategy=hsdp", {"outer axis"}},
        Refused{
            "Scaling",
            "--set precision.scaling=sum",
            {"precision.scaling", "mean, pre_scaled_sum"}},
        Refused{
            "SgdHasNoEps",
            "--set optimizer.name=sgd --set optimizer.eps=1e-3",
            {"optimizer.eps is set"}},
        Refused{
            "UnusedProfile",
            "--set profiling.step=3",
            {"profiling.step is set"}},
        Refused{
            "UnusedValidation",
            "--set validation.sequences=3",
            {"validation.sequences is set"}},
        Refused{
            "Misspelt",
            "--set diagnostics.poisson=true",
            {"did you mean 'poison'?"}},
        Refused{
            "NoBoolean",
            "--set diagnostics.poison=1",
            {"diagnostics.poison", "true or false"}}),
    [](const auto& info) { return info.param.name; });

TEST_F(BadInput, ACorpusOfFewTokens) {
  folder_.write("small/a.txt", "few");
  const std::string here = folder_.path().string();
  sh(fmt::format(
      "\"$PROGRAM\" data prepare --input '{0}/small' --output '{0}/few'",
      here));
  EXPECT_THAT(
      refused("--set data.train=" + here + "/few"),
      AllOf(
          HasSubstr("data.train"),
          HasSubstr("training.seq_len + 1 = 34 tokens")));
}

TEST_F(BadInput, ConfigsThatAreNoConfigs) {
  folder_.write("empty.toml", "");
  folder_.write(
      "binary.toml",
      std::string(
          "\x00\xff\x7f"
          "ELF",
          6));
  for (const char* file : {"empty.toml", "binary.toml", "none.toml", "texts"}) {
    const Result result = sh(fmt::format(
        "\"$PROGRAM\" train '{}' --nproc 2",
        (folder_ / file).string()));
    expect_one_error(result);
  }
  // A file name cannot have 300 letters.
  expect_one_error(sh("\"$PROGRAM\" train " + std::string(300, 'a')));
}

TEST_F(BadInput, MalformedConfigsThroughTheProgram) {
  constexpr int kTries = 20;
  MalformedConfigs configs(config_text(folder_.path()), 11);
  int tried = 0;
  while (tried < kTries) {
    const std::string text = configs.next();
    try {
      resolve_config(parse_config(text, "run.toml"), 2);
      continue;  // does no harm
    } catch (const Error&) {}
    ++tried;
    folder_.write("bad.toml", text);
    const Result result = sh(fmt::format(
        "\"$PROGRAM\" train '{}/bad.toml' --nproc 2 --device cpu",
        folder_.path().string()));
    expect_one_error(result);
    EXPECT_EQ(result.code, 1) << text;
  }
  EXPECT_EQ(snapshot(folder_ / "run"), earlier_);
}

TEST_F(BadInput, APortInUse) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const Result result = sh(fmt::format(
      "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} "
      "{}",
      ntohs(address.sin_port),
      train("")));
  ::close(listener);
  expect_one_error(result);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("port is in use"), HasSubstr("MASTER_PORT")));
  EXPECT_EQ(snapshot(folder_ / "run"), earlier_);
}

TEST_F(BadInput, ATokenBeyondTheVocabularyOnOneRank) {
  damage_tokens_of_rank_1(3);
  const Result result = sh(train(""));
  expect_one_error(result);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("rank 1/2"),
          HasSubstr("data.train"),
          HasSubstr("token 65535"),
          HasSubstr("model.vocab_size = 257")));
  expect_earlier_run_kept();
  // The start and three steps.
  const std::string metrics = read(folder_ / "run/metrics.jsonl");
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 4);
}

TEST_F(BadInput, ValuesThatAreNotFiniteAreNamed) {
  const Result result =
      sh(train("--set diagnostics.nan_check=true --set optimizer.name=sgd "
               "--set optimizer.lr=1e38 --set training.max_norm=0"));
  expect_one_error(result);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("of parameter "), HasSubstr("at flat element")));
  expect_earlier_run_kept();
}

TEST_F(BadInput, DamagedWeightsAndRunsThatGenerate) {
  const auto generate = [&] {
    return sh(fmt::format(
        "\"$PROGRAM\" generate --run '{}/run' --prompt line --device cpu",
        folder_.path().string()));
  };
  EXPECT_EQ(generate().code, 0);
  const std::string weights = earlier_.at("model.safetensors");
  folder_.write("run/model.safetensors", weights.substr(0, 1000));
  expect_one_error(generate());
  folder_.write("run/model.safetensors", "garbage");
  expect_one_error(generate());
  folder_.write("run/model.safetensors", weights);
  folder_.write(
      "run/config.toml",
      std::regex_replace(
          earlier_.at("config.toml"),
          std::regex("ffn_dim = 64"),
          "ffn_dim = 96"));
  const Result shape = generate();
  expect_one_error(shape);
  EXPECT_THAT(shape.output, HasSubstr("expected shape"));
}

TEST_F(BadInput, ADeviceThatIsNotThere) {
  const Result result = sh(fmt::format(
      "\"$PROGRAM\" train '{}/run.toml' --device tpu --nproc 2",
      folder_.path().string()));
  expect_one_error(result);
  EXPECT_THAT(result.output, AllOf(HasSubstr("--device"), HasSubstr("tpu")));
  EXPECT_EQ(snapshot(folder_ / "run"), earlier_);
}

// It does not start through popen, since the test needs the process id.
TEST_F(BadInput, ARankThatIsKilledEndsTheOthers) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string config = (folder_ / "run.toml").string();
  const pid_t launcher = ::fork();
  if (launcher == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    ::setenv("GCOV_PREFIX", counts_of_cut_off().c_str(), 1);
    ::execl(
        FLATSHARD_PROGRAM,
        FLATSHARD_PROGRAM,
        "train",
        config.c_str(),
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--set",
        "training.steps=1000000",
        nullptr);
    ::_exit(127);
  }
  ::close(ends[1]);
  std::FILE* output = ::fdopen(ends[0], "r");
  std::string text;
  std::array<char, 4096> line{};
  while (text.find("step: 3/") == std::string::npos &&
         std::fgets(line.data(), line.size(), output) != nullptr) {
    text += line.data();
  }
  std::istringstream children(
      read(fmt::format("/proc/{}/task/{}/children", launcher, launcher)));
  pid_t first = 0;
  pid_t second = 0;
  children >> first >> second;
  if (second > 0) {
    ::kill(second, SIGKILL);
  } else {
    ::kill(launcher, SIGTERM);
  }
  while (std::fgets(line.data(), line.size(), output) != nullptr) {
    text += line.data();
  }
  std::fclose(output);
  int status = 0;
  ::waitpid(launcher, &status, 0);
  if (second == 0) {
    GTEST_SKIP() << "this kernel does not list the children of a process";
  }
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGKILL) << text;
  EXPECT_THAT(text, HasSubstr("rank 1 of 2 was ended by signal 9"));
  expect_earlier_run_kept();
}

TEST_F(BadInput, DiagnosticsOfAGoodRun) {
  const Result run = sh(train(
      "--set diagnostics.norms_freq=2 --set diagnostics.nan_check=true --set "
      "diagnostics.overlap_check=true --set diagnostics.poison=true --set "
      "diagnostics.strict=true --set validation.freq=3 --set "
      "validation.sequences=1"));
  EXPECT_EQ(run.code, 0) << run.output;
  EXPECT_THAT(run.output, HasSubstr("kept the earlier run's files in"));
  // The same weights as without.
  EXPECT_EQ(
      read(folder_ / "run/model.safetensors"),
      earlier_.at("model.safetensors"));
  const std::string norms = fmt::format(
      "\"$PROGRAM\" norms --run '{}/run' ",
      folder_.path().string());
  const Result all = sh(norms);
  EXPECT_EQ(all.code, 0) << all.output;
  EXPECT_THAT(all.output, ::testing::StartsWith("step 6\nparameter "));
  // The header, and one line per parameter.
  EXPECT_EQ(std::count(all.output.begin(), all.output.end(), '\n'), 23);
  const Result top = sh(norms + "--step 4 --sort grad --top 3");
  EXPECT_THAT(top.output, ::testing::StartsWith("step 4\n"));
  EXPECT_EQ(std::count(top.output.begin(), top.output.end(), '\n'), 5);
  const Result missing = sh(norms + "--step 5");
  expect_one_error(missing);
  EXPECT_THAT(missing.output, HasSubstr("norms of the steps 1, 2, 4, 6"));
  expect_one_error(sh("\"$PROGRAM\" norms --run /none"));
  expect_one_error(sh(fmt::format(
      "\"$PROGRAM\" norms --run '{}/run/earlier/1'",
      folder_.path().string())));
}

}  // namespace
}  // namespace flatshard::testing
