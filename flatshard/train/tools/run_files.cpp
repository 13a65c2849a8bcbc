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
    case Kind::file:  // /dev/null and the like are empty
      return fs::is_regular_file(path, error);
    case Kind::folder:
      return fs::is_directory(path, error);
    default:
      return !list_checkpoints(path).empty();
  }
}

RunFiles run_files(
    const config::Run& run,
    const config::Checkpoint& checkpoint,
    const config::Profiling& profiling,
    bool trains_adapters) {
  using Kind = RunFile::Kind;
  using When = RunFile::When;
  const bool weights = run.save_weights && !trains_adapters;
  const bool adapters = run.save_weights && trains_adapters;
  const fs::path checkpoints = checkpoint.folder;
  const fs::path profile = profiling.folder;
  const fs::path output_dir = run.output_dir;
  RunFiles all{
      .output_dir = output_dir,
      .checkpoints = output_dir / checkpoints,
      .owns_checkpoints = checkpoints.is_relative(),
      .files = {
          {kRunConfig},
          {kRunMetrics},
          {kSources, Kind::folder},
          {kTensorboardFolder, Kind::folder},
          {checkpoints, Kind::checkpoints},
          {profile, Kind::folder, When::during},
          {kRunLog, Kind::file, When::during},
          {kRunReport, Kind::file, When::during},
          {kRunWeights, Kind::file, When::end, weights},
          {models::kPeftWeights, Kind::file, When::end, adapters},
          {models::kPeftConfig, Kind::file, When::end, adapters},
          {kRunExport, Kind::folder, When::end, checkpoint.export_hf_at_end}}};
  std::erase_if(all.files, [](const RunFile& file) {
    return !is_below(file.name);
  });
  return all;
}

fs::path save_config(const fs::path& output_dir, const std::string& text) {
  std::error_code error;
  fs::create_directories(output_dir, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot make run.output_dir {}: {}",
      output_dir.string(),
      error.message());
  write_file_atomic(output_dir / kRunConfig, text);
  return output_dir / kRunConfig;
}

}  // namespace flatshard
