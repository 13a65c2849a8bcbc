#include "flatshard/train/earlier_run.h"

#include <string>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/train/metrics/tensorboard.h"
#include "flatshard/train/run_sources.h"

namespace flatshard {
namespace {

constexpr const char* kWeightsFile = "model.safetensors";

/// Returns the files that a run writes from its start on, below its output
/// folder.
std::vector<std::filesystem::path> files_of_a_run(
    const std::filesystem::path& checkpoints) {
  std::vector<std::filesystem::path> files{
      "config.toml",
      "metrics.jsonl",
      kSources,
      kTensorboardFolder,
      kReportFile,
      kWeightsFile};
  if (checkpoints.is_relative()) {
    files.push_back(checkpoints);
  }
  return files;
}

/// Returns whether the name is a folder, whatever it holds.
bool is_folder_of_a_run(const std::filesystem::path& name) {
  return name == kSources || name == kTensorboardFolder;
}

/// Not /dev/null and the like, which hold nothing.
bool holds_something(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) ||
         (is_folder_of_a_run(path.filename()) &&
          std::filesystem::is_directory(path, error)) ||
         !list_checkpoints(path).empty();
}

}  // namespace

void refuse_foreign_checkpoints(const std::filesystem::path& checkpoints) {
  FLATSHARD_CHECK(
      checkpoints.is_relative() || list_checkpoints(checkpoints).empty(),
      config,
      "checkpoint.folder = {} holds the checkpoints of another run; continue "
      "from "
      "them with --resume, or choose another folder",
      checkpoints.string());
}

std::filesystem::path keep_earlier_run(
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints) {
  namespace fs = std::filesystem;
  refuse_foreign_checkpoints(checkpoints);
  fs::path kept;
  for (const fs::path& name : files_of_a_run(checkpoints)) {
    std::error_code error;
    // Without rows or a config of a run the weights are not a run's, but maybe
    // a Hugging Face folder's.
    if (!holds_something(output_dir / name) ||
        (name == kWeightsFile && kept.empty())) {
      continue;
    }
    for (int n = 1; kept.empty(); ++n) {
      const fs::path free = output_dir / "earlier" / std::to_string(n);
      if (!fs::exists(free, error)) {
        fs::create_directories(free, error);
        kept = free;
      }
    }
    if (!error) {
      fs::create_directories((kept / name).parent_path(), error);
      fs::rename(output_dir / name, kept / name, error);
    }
    FLATSHARD_CHECK(
        !error,
        io,
        "cannot keep {} of an earlier run in {}: {}",
        name.string(),
        kept.string(),
        error.message());
  }
  return kept;
}

void restore_earlier_run(
    const std::filesystem::path& kept,
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints) noexcept {
  std::error_code error;
  for (const auto& name : files_of_a_run(checkpoints)) {
    if (std::filesystem::exists(kept / name, error)) {
      if (is_folder_of_a_run(name)) {
        std::filesystem::remove_all(output_dir / name, error);
      }
      std::filesystem::rename(kept / name, output_dir / name, error);
    }
  }
  std::filesystem::remove(kept, error);
  std::filesystem::remove(kept.parent_path(), error);  // when it is empty
}

}  // namespace flatshard
