#pragma once

#include <filesystem>

// The files of a run that a new one finds in its output folder.
namespace flatshard {

/// The page of a run below its run.output_dir, which `flatshard report` writes.
inline constexpr const char* kReportFile = "report.html";

/// @throws Error{config} when `checkpoints` is an absolute folder that holds
/// some: they are not a new run's to move.
void refuse_foreign_checkpoints(const std::filesystem::path& checkpoints);

/// Moves the results of an earlier run in `output_dir` (config.toml,
/// metrics.jsonl, events, sources, checkpoints, weights) to
/// `<output_dir>/earlier/<n>`, n counting from 1: nothing of it remains to be
/// taken for the new run's.
///
/// @param checkpoints  their folder, below `output_dir` or absolute.
/// @return that folder, empty when there was nothing to keep.
/// @throws Error{io}; like refuse_foreign_checkpoints.
std::filesystem::path keep_earlier_run(
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints = "checkpoints");
/// Puts it back where the new run wrote nothing yet, and removes the folder.
void restore_earlier_run(
    const std::filesystem::path& kept,
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints = "checkpoints") noexcept;

}  // namespace flatshard
