#include "flatshard/train/run/earlier_run.h"

#include "flatshard/train/config/run_config.h"
#include "flatshard/train/tools/run_files.h"
#include "tests/support/message_of.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;

RunFiles files_of(const Config& config) {
  return run_files(
      config.run,
      config.checkpoint,
      config.profiling,
      config.lora.enabled());
}

TEST(EarlierRun, IsKeptAndCanComeBack) {
  const auto folder = std::filesystem::temp_directory_path() /
                      fmt::format("flatshard-earlier-{}", ::getpid());
  const auto write = [&](const char* name, const char* text) {
    std::filesystem::create_directories(folder);
    std::ofstream(folder / name) << text;
  };
  const auto content = [&](const char* name) {
    std::ifstream in(folder / name);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  Config config;
  config.run.output_dir = folder.string();
  EXPECT_EQ(keep_earlier_run(files_of(config)), "");
  write("metrics.jsonl", "rows");
  write("report.html", "page");
  write("model.safetensors", "weights");
  const auto first = keep_earlier_run(files_of(config));
  EXPECT_EQ(first, folder / "earlier/1");
  EXPECT_EQ(content("earlier/1/metrics.jsonl"), "rows");
  EXPECT_EQ(content("earlier/1/report.html"), "page");
  EXPECT_EQ(content("earlier/1/model.safetensors"), "weights");
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "metrics.jsonl"));
  write("metrics.jsonl", "later rows");
  write("config.toml", "later");
  EXPECT_EQ(keep_earlier_run(files_of(config)), folder / "earlier/2");
  EXPECT_EQ(content("earlier/1/metrics.jsonl"), "rows");
  restore_earlier_run(folder / "earlier/2", files_of(config));
  EXPECT_EQ(content("metrics.jsonl"), "later rows");
  EXPECT_EQ(content("config.toml"), "later");
  EXPECT_FALSE(std::filesystem::exists(folder / "earlier/2"));
  EXPECT_TRUE(std::filesystem::exists(folder / "earlier/1"));
  std::filesystem::remove_all(folder);
}

TEST(EarlierRun, InputsThatWouldMoveAreRefused) {
  const auto folder = std::filesystem::temp_directory_path() /
                      fmt::format("flatshard-earlier-inputs-{}", ::getpid());
  Config config;
  config.run.output_dir = folder.string();
  config.model.init_from = (folder / "hf").string();
  EXPECT_NO_THROW(refuse_inputs_that_move(
      files_of(config),
      config.model.init_from));  // nothing is there
  std::filesystem::create_directories(folder / "hf");
  std::filesystem::create_directories(folder / "base");
  for (const char* input : {"hf", "hf/", "hf/part", "base/../hf"}) {
    config.model.init_from = (folder / input).string();
    EXPECT_THAT(
        testing::message_of([&] {
          refuse_inputs_that_move(files_of(config), config.model.init_from);
        }),
        HasSubstr("choose another run.output_dir"))
        << input;
  }
  for (const char* input : {"base", "hfbase", "earlier/1/hf"}) {
    config.model.init_from = (folder / input).string();
    EXPECT_NO_THROW(
        refuse_inputs_that_move(files_of(config), config.model.init_from))
        << input;
  }
  std::filesystem::remove_all(folder);
}

TEST(EarlierRun, NothingOfItIsLost) {
  const auto folder = std::filesystem::temp_directory_path() /
                      fmt::format("flatshard-earlier-all-{}", ::getpid());
  Config config;
  config.run.output_dir = folder.string();
  config.profiling.folder = "traces/mine";
  const auto write = [&](const std::filesystem::path& name) {
    std::filesystem::create_directories((folder / name).parent_path());
    std::ofstream(folder / name) << "of the earlier run";
  };
  std::vector<std::filesystem::path> written;
  for (const RunFile& file : files_of(config).files) {
    switch (file.kind) {
      case RunFile::Kind::file:
        written.push_back(file.name);
        break;
      case RunFile::Kind::folder:
        written.push_back(file.name / "part");
        break;
      case RunFile::Kind::checkpoints:
        written.push_back(file.name / "step-3" / "manifest.json");
        break;
    }
    write(written.back());
  }
  for (const char* name :
       {"config.toml",
        "metrics.jsonl",
        "output.log",
        "model.safetensors",
        "adapter_model.safetensors",
        "adapter_config.json",
        "hf/part",
        "traces/mine/part"}) {
    EXPECT_THAT(written, ::testing::Contains(std::filesystem::path(name)));
  }
  write("notes.txt");  // is the user's
  const auto kept = keep_earlier_run(files_of(config));
  for (const auto& name : written) {
    EXPECT_FALSE(std::filesystem::exists(folder / name)) << name;
    EXPECT_TRUE(std::filesystem::exists(kept / name)) << name;
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "notes.txt"));
  restore_earlier_run(kept, files_of(config));
  for (const auto& name : written) {
    EXPECT_TRUE(std::filesystem::exists(folder / name)) << name;
  }
  std::filesystem::remove_all(folder);
}

TEST(EarlierRun, ResultsThatAreNoRunsAreNotOverwritten) {
  const auto folder = std::filesystem::temp_directory_path() /
                      fmt::format("flatshard-foreign-{}", ::getpid());
  Config config;
  config.run.output_dir = folder.string();
  const auto refusal = [&] {
    return testing::message_of([&] { refuse_foreign_files(files_of(config)); });
  };
  std::filesystem::create_directories(folder / "hf");
  std::ofstream(folder / "adapter_config.json") << "{}";
  EXPECT_EQ(refusal(), "no error");
  config.checkpoint.export_hf_at_end = true;
  EXPECT_THAT(refusal(), HasSubstr("/hf was not written by a run"));
  config.checkpoint.export_hf_at_end = false;
  config.lora.rank = 4;
  EXPECT_THAT(
      refusal(),
      HasSubstr("adapter_config.json was not written by a run"));
  config.lora.rank = 0;
  std::ofstream(folder / "model.safetensors") << "weights";
  EXPECT_THAT(
      refusal(),
      HasSubstr("model.safetensors was not written by a run"));
  std::ofstream(folder / "metrics.jsonl") << "rows";
  EXPECT_EQ(refusal(), "no error");
  std::filesystem::remove_all(folder);
}

TEST(RunFiles, ThePageHasEach) {
  std::ifstream file(FLATSHARD_DOCS "/guides/checkpoints.md");
  std::string table(std::istreambuf_iterator<char>(file), {});
  table.erase(0, table.find("| file or folder |"));
  table.erase(table.find("\n\n"));
  for (const RunFile& row : files_of(Config()).files) {
    const std::string name =
        row.name.string() + (row.kind == RunFile::Kind::file ? "" : "/");
    EXPECT_THAT(table, HasSubstr("`" + name + "`"));
  }
}

}  // namespace
}  // namespace flatshard
