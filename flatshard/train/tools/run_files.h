#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/train/config/diagnostics_keys.h"
#include "flatshard/train/config/training_keys.h"

// The files of a run below run.output_dir, by name.
namespace flatshard {

inline constexpr const char* kRunConfig = "config.toml";
inline constexpr const char* kRunMetrics = "metrics.jsonl";
/// Weights at the end. A run with adapters has models::kPeftWeights and
/// models::kPeftConfig instead.
inline constexpr const char* kRunWeights = "model.safetensors";
/// The folder of checkpoint.export_hf_at_end.
inline constexpr const char* kRunExport = "hf";
/// The page that `flatshard report` writes.
inline constexpr const char* kRunReport = "report.html";
/// Receives further output that no process reads; see keep_output_in.
inline constexpr const char* kRunLog = "output.log";

/// A file or folder that a run writes.
struct RunFile {
  enum class Kind {
    file,
    folder,
    checkpoints,  ///< a folder that exists once it contains a checkpoint
  };
  enum class When {
    start,   ///< written at start and during the run; marks a run
    during,  ///< only by some runs
    end,     ///< written at the end; may also exist without a run
  };

  std::filesystem::path name;  ///< below run.output_dir
  Kind kind = Kind::file;
  When when = When::start;
  bool written = true;  ///< a run of this config writes it

  bool exists_in(const std::filesystem::path& output_dir) const;
};

/// Everything that a run writes.
struct RunFiles {
  std::filesystem::path output_dir;  ///< run.output_dir
  /// checkpoint.folder, below run.output_dir unless it is absolute.
  std::filesystem::path checkpoints;
  bool owns_checkpoints = true;  ///< they are below run.output_dir
  /// Everything below run.output_dir except run.lock, with files of `start`
  /// first. Folders elsewhere are left out.
  std::vector<RunFile> files;
};

/// @param trains_adapters  the run writes them, and no weights.
RunFiles run_files(
    const config::Run& run,
    const config::Checkpoint& checkpoint,
    const config::Profiling& profiling,
    bool trains_adapters);

/// Writes a config's text to `<output_dir>/config.toml`, making the folder.
std::filesystem::path save_config(
    const std::filesystem::path& output_dir,
    const std::string& text);

/// The config among the texts of a run's checkpoint (Manifest::state).
inline constexpr std::string_view kConfigState = "config";
/// The digests of the frozen weights that a checkpoint's adapters belong to.
inline constexpr std::string_view kBaseState = "base";

}  // namespace flatshard
