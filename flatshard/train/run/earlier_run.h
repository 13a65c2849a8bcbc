#pragma once

#include <filesystem>
#include <string>

#include "flatshard/train/tools/run_files.h"

// The files of a run that a new one finds in its output folder.
namespace flatshard {

/// @throws Error{config} if the new run would overwrite files in its output
/// folder that do not belong to an earlier run: checkpoints of another run in
/// an absolute checkpoint.folder, or results that this run writes at its end in
/// a folder without a run.
void refuse_foreign_files(const RunFiles& files);

/// @throws Error{config} when model.init_from is a result of the earlier run
/// that keep_earlier_run would move away: the end of the new run, and a resumed
/// one, read it again.
void refuse_inputs_that_move(
    const RunFiles& files,
    const std::string& init_from);

/// Moves the files of an earlier run in run.output_dir to
/// `<output_dir>/earlier/<n>`, n counting from 1. None of them can then be
/// mistaken for a file of the new run.
///
/// @return that folder, empty when there was nothing to keep.
/// @throws Error{io}; like refuse_foreign_files.
std::filesystem::path keep_earlier_run(const RunFiles& files);
/// Restores files that the new run has not written yet, removes the folder.
void restore_earlier_run(
    const std::filesystem::path& kept,
    const RunFiles& files) noexcept;

}  // namespace flatshard
