#include "flatshard/train/run/earlier_run.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/models/peft.h"
#include "flatshard/train/tools/run_files.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

/// Returns whether a file of an earlier start shows that a run was here.
bool holds_a_run(const std::vector<RunFile>& files, const fs::path& folder) {
  return std::ranges::any_of(files, [&](const RunFile& file) {
    return file.when == RunFile::When::start && file.exists_in(folder);
  });
}

/// Returns whether this process prints to the file: see keep_output_in.
bool is_printed_to(const fs::path& path) {
  struct stat file {};
  if (::stat(path.c_str(), &file) != 0) {
    return false;
  }
  return std::ranges::any_of(
      std::vector{STDOUT_FILENO, STDERR_FILENO},
      [&](int fd) {
        struct stat open {};
        return ::fstat(fd, &open) == 0 && open.st_dev == file.st_dev &&
               open.st_ino == file.st_ino;
      });
}

/// Returns whether a run of this config writes the file at its end.
bool ends_with(const Config& config, const RunFile& file) {
  const std::string name = file.name.string();
  if (name == kRunExport) {
    return config.checkpoint.export_hf_at_end;
  }
  const bool is_adapter =
      name == models::kPeftWeights || name == models::kPeftConfig;
  return file.when == RunFile::When::end && config.run.save_weights &&
         is_adapter == config.lora.enabled();
}

}  // namespace

void refuse_foreign_files(const Config& config) {
  const fs::path checkpoints = config.checkpoint.folder;
  FLATSHARD_CHECK(
      checkpoints.is_relative() || list_checkpoints(checkpoints).empty(),
      config,
      "checkpoint.folder = {} holds the checkpoints of another run; continue "
      "from them with --resume, or choose another folder",
      checkpoints.string());
  const fs::path folder = config.run.output_dir;
  const std::vector<RunFile> files = run_files(config);
  if (holds_a_run(files, folder)) {
    return;
  }
  for (const RunFile& file : files) {
    FLATSHARD_CHECK(
        !ends_with(config, file) || !file.exists_in(folder),
        config,
        "run.output_dir: {} is no result of a run, and this run would "
        "overwrite it at its end; choose another folder",
        (folder / file.name).string());
  }
}

void refuse_inputs_that_move(const Config& config) {
  if (config.model.init_from.empty()) {
    return;
  }
  const fs::path folder = config.run.output_dir;
  const fs::path input = fs::weakly_canonical(config.model.init_from);
  for (const RunFile& file : run_files(config)) {
    const fs::path moved = fs::weakly_canonical(folder / file.name);
    const auto [end, _] =
        std::mismatch(moved.begin(), moved.end(), input.begin(), input.end());
    FLATSHARD_CHECK(
        !file.exists_in(folder) || end != moved.end(),
        config,
        "model.init_from = {} is a result of the earlier run in run.output_dir "
        "= {}, and a new run moves these files to {}; choose another "
        "run.output_dir",
        config.model.init_from,
        config.run.output_dir,
        (folder / "earlier").string());
  }
}

fs::path keep_earlier_run(const Config& config) {
  refuse_foreign_files(config);
  const fs::path output_dir = config.run.output_dir;
  const std::vector<RunFile> files = run_files(config);
  fs::path kept;
  if (!holds_a_run(files, output_dir)) {
    return kept;
  }
  for (const RunFile& file : files) {
    std::error_code error;
    if (!file.exists_in(output_dir) ||
        (file.name == kRunLog && is_printed_to(output_dir / file.name))) {
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
      fs::create_directories((kept / file.name).parent_path(), error);
      fs::rename(output_dir / file.name, kept / file.name, error);
    }
    FLATSHARD_CHECK(
        !error,
        io,
        "cannot keep {} of an earlier run in {}: {}",
        file.name.string(),
        kept.string(),
        error.message());
  }
  return kept;
}

void restore_earlier_run(const fs::path& kept, const Config& config) noexcept {
  std::error_code error;
  const fs::path output_dir = config.run.output_dir;
  for (const RunFile& file : run_files(config)) {
    if (fs::exists(kept / file.name, error)) {
      if (file.kind == RunFile::Kind::folder) {
        fs::remove_all(output_dir / file.name, error);
      }
      fs::rename(kept / file.name, output_dir / file.name, error);
      fs::remove((kept / file.name).parent_path(), error);  // when it is empty
    }
  }
  fs::remove(kept, error);
  fs::remove(kept.parent_path(), error);  // when it is empty
}

}  // namespace flatshard
