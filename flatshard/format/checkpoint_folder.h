#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

// A run's checkpoints:
//
//   <folder>/step-100/manifest.json, *.safetensors
//   <folder>/step-200/...
//   <folder>/latest                  "step-200"
//   <folder>/step-300.partial-<id>/  being written, or left by a process that
//                                    died while it did
//
// A folder named step-N is complete: it gets that name in one rename, once
// every byte is on disk.

/// `<folder>/step-N`.
std::filesystem::path step_folder(
    const std::filesystem::path& folder,
    std::int64_t step);

/// Returns where step N is written before it is complete. `id` is unique to the
/// writing run.
std::filesystem::path partial_folder(
    const std::filesystem::path& folder,
    std::int64_t step,
    std::string_view id);

/// Returns the steps of the complete checkpoints, ascending; empty if there is
/// no folder.
std::vector<std::int64_t> list_checkpoints(const std::filesystem::path& folder);

/// Returns the step that `latest` names. If it is missing or its checkpoint is
/// gone, returns the last complete one.
std::optional<std::int64_t> latest_checkpoint(
    const std::filesystem::path& folder);

/// Makes the complete partial folder of `step` visible: sync, rename, then
/// `latest`. Where the file system can exchange two names, an older checkpoint
/// of that step is replaced in one step. Elsewhere it is away for a moment.
/// @throws Error{io}.
void publish_checkpoint(
    const std::filesystem::path& folder,
    std::int64_t step,
    std::string_view id);

/// Removes all but the last `keep` checkpoints, the oldest first, and never
/// that which `latest` names. @return the steps removed.
std::vector<std::int64_t> prune_checkpoints(
    const std::filesystem::path& folder,
    std::int64_t keep);

/// Removes what earlier processes left half written or half removed. Only one
/// run may write to a folder.
void remove_leftovers(const std::filesystem::path& folder);

}  // namespace flatshard
