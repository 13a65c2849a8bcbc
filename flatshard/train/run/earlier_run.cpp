#include "flatshard/train/run/earlier_run.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/format/checkpoint_folder.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

/// Returns whether a file of an earlier start shows that a run was here.
bool holds_a_run(const RunFiles& files) {
  return std::ranges::any_of(files.files, [&](const RunFile& file) {
    return file.when == RunFile::When::start &&
           file.exists_in(files.output_dir);
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

}  // namespace

void refuse_foreign_files(const RunFiles& files) {
  FLATSHARD_CHECK(
      files.owns_checkpoints || list_checkpoints(files.checkpoints).empty(),
      config,
      "checkpoint.folder = {} contains the checkpoints of another run; resume "
      "from them with --resume, or choose another directory",
      files.checkpoints.string());
  if (holds_a_run(files)) {
    return;
  }
  for (const RunFile& file : files.files) {
    FLATSHARD_CHECK(
        file.when != RunFile::When::end || !file.written ||
            !file.exists_in(files.output_dir),
        config,
        "run.output_dir: {} was not written by a run, and this run would "
        "overwrite it at its end; choose another directory",
        (files.output_dir / file.name).string());
  }
}

void refuse_inputs_that_move(
    const RunFiles& files,
    const std::string& init_from) {
  if (init_from.empty()) {
    return;
  }
  const fs::path& folder = files.output_dir;
  const fs::path input = fs::weakly_canonical(init_from);
  for (const RunFile& file : files.files) {
    const fs::path moved = fs::weakly_canonical(folder / file.name);
    const auto [end, _] =
        std::mismatch(moved.begin(), moved.end(), input.begin(), input.end());
    FLATSHARD_CHECK(
        !file.exists_in(folder) || end != moved.end(),
        config,
        "model.init_from = {} is a result of the earlier run in run.output_dir "
        "= {}, and a new run moves these files to {}; choose another "
        "run.output_dir",
        init_from,
        folder.string(),
        (folder / "earlier").string());
  }
}

fs::path keep_earlier_run(const RunFiles& files) {
  refuse_foreign_files(files);
  const fs::path& output_dir = files.output_dir;
  fs::path kept;
  if (!holds_a_run(files)) {
    return kept;
  }
  for (const RunFile& file : files.files) {
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

void restore_earlier_run(const fs::path& kept, const RunFiles& files) noexcept {
  std::error_code error;
  const fs::path& output_dir = files.output_dir;
  for (const RunFile& file : files.files) {
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
