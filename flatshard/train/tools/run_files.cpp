#include "flatshard/train/tools/run_files.h"

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/models/peft.h"
#include "flatshard/train/metrics/tensorboard.h"
#include "flatshard/train/tools/run_sources.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

/// Returns whether the path names something below a folder.
bool is_below(const fs::path& path) {
  return !path.empty() && path.is_relative() &&
         std::ranges::none_of(path, [](const fs::path& part) {
           return part == "." || part == "..";
         });
}

}  // namespace

bool RunFile::exists_in(const fs::path& output_dir) const {
  const fs::path path = output_dir / name;
  std::error_code error;
  switch (kind) {
    case Kind::file:  // /dev/null and the like hold nothing
      return fs::is_regular_file(path, error);
    case Kind::folder:
      return fs::is_directory(path, error);
    default:
      return !list_checkpoints(path).empty();
  }
}

std::vector<RunFile> run_files(const Config& config) {
  using Kind = RunFile::Kind;
  using When = RunFile::When;
  std::vector<RunFile> files{
      {kRunConfig},
      {kRunMetrics},
      {kSources, Kind::folder},
      {kTensorboardFolder, Kind::folder}};
  if (is_below(config.checkpoint.folder)) {
    files.push_back({config.checkpoint.folder, Kind::checkpoints});
  }
  if (is_below(config.profiling.folder)) {
    files.push_back({config.profiling.folder, Kind::folder, When::during});
  }
  files.push_back({kRunLog, Kind::file, When::during});
  files.push_back({kRunReport, Kind::file, When::during});
  files.push_back({kRunWeights, Kind::file, When::end});
  files.push_back({models::kPeftWeights, Kind::file, When::end});
  files.push_back({models::kPeftConfig, Kind::file, When::end});
  files.push_back({kRunExport, Kind::folder, When::end});
  return files;
}

fs::path save_config(const Config& config) {
  const fs::path folder = config.run.output_dir;
  std::error_code error;
  fs::create_directories(folder, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot make run.output_dir {}: {}",
      folder.string(),
      error.message());
  write_file_atomic(folder / kRunConfig, to_toml(config));
  return folder / kRunConfig;
}

fs::path checkpoint_folder(const Config& config) {
  return fs::path(config.run.output_dir) / config.checkpoint.folder;
}

}  // namespace flatshard
