#include "flatshard/format/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/manifest.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kRemoved = ".removed-";
constexpr std::string_view kLatest = "latest";

std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStep)) {
    return std::nullopt;
  }
  name.remove_prefix(kStep.size());
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data(), end, step);
  if (parsed.ec != std::errc() || parsed.ptr != end || step < 0) {
    return std::nullopt;
  }
  return step;
}

void check_renamed(int result, const fs::path& from, const fs::path& to) {
  FLATSHARD_CHECK(
      result == 0,
      io,
      "cannot rename {} to {}: {}",
      from.string(),
      to.string(),
      std::strerror(errno));
}

/// Renames the folder before removing it: a partly removed folder must not look
/// like a complete one.
void remove_checkpoint(const fs::path& path) {
  fs::path away = path;
  away += fmt::format("{}{}", kRemoved, ::getpid());
  check_renamed(::rename(path.c_str(), away.c_str()), path, away);
  std::error_code error;
  fs::remove_all(away, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot remove {}: {}",
      away.string(),
      error.message());
}

std::optional<std::int64_t> named_latest(const fs::path& folder) {
  std::ifstream file(folder / kLatest);
  std::string name;
  if (!std::getline(file, name)) {
    return std::nullopt;
  }
  return step_of(name);
}

}  // namespace

fs::path step_folder(const fs::path& folder, std::int64_t step) {
  return folder / fmt::format("{}{}", kStep, step);
}

fs::path
partial_folder(const fs::path& folder, std::int64_t step, std::string_view id) {
  return folder / fmt::format("{}{}{}{}", kStep, step, kPartial, id);
}

std::vector<std::int64_t> list_checkpoints(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto step = step_of(entry.path().filename().string());
    if (step && fs::exists(entry.path() / kManifestName, error)) {
      steps.push_back(*step);
    }
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<std::int64_t> latest_checkpoint(const fs::path& folder) {
  const auto steps = list_checkpoints(folder);
  const auto named = named_latest(folder);
  if (named && std::binary_search(steps.begin(), steps.end(), *named)) {
    return named;
  }
  return steps.empty() ? std::nullopt : std::optional(steps.back());
}

void publish_checkpoint(
    const fs::path& folder,
    std::int64_t step,
    std::string_view id) {
  const fs::path partial = partial_folder(folder, step, id);
  const fs::path whole = step_folder(folder, step);
  sync_folder(partial);
  if (!fs::exists(whole)) {
    check_renamed(::rename(partial.c_str(), whole.c_str()), partial, whole);
  } else if (
      ::renameat2(
          AT_FDCWD,
          partial.c_str(),
          AT_FDCWD,
          whole.c_str(),
          RENAME_EXCHANGE) == 0) {
    remove_checkpoint(partial);
  } else {
    remove_checkpoint(whole);
    check_renamed(::rename(partial.c_str(), whole.c_str()), partial, whole);
  }
  sync_folder(folder);
  write_file_atomic(folder / kLatest, fmt::format("{}{}\n", kStep, step));
}

std::vector<std::int64_t> prune_checkpoints(
    const fs::path& folder,
    std::int64_t keep) {
  std::vector<std::int64_t> removed;
  const auto steps = list_checkpoints(folder);
  const auto latest = latest_checkpoint(folder);
  const auto num_old = static_cast<std::int64_t>(steps.size()) - keep;
  for (std::int64_t i = 0; i < num_old; ++i) {
    const std::int64_t step = steps[static_cast<std::size_t>(i)];
    if (step != latest) {
      remove_checkpoint(step_folder(folder, step));
      removed.push_back(step);
    }
  }
  return removed;
}

void remove_leftovers(const fs::path& folder) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kStep) && (name.find(kPartial) != std::string::npos ||
                                    name.find(kRemoved) != std::string::npos)) {
      fs::remove_all(entry.path(), error);
    }
  }
}

}  // namespace flatshard
