#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "flatshard/report/table.h"

namespace flatshard::report {

using Json = nlohmann::ordered_json;

/// The files of a run's output_dir, read back.
/// docs/reference/log_and_metrics.md describes the rows.
struct RunRecord {
  std::string name;  ///< name of the folder, set by `report`
  std::filesystem::path folder;
  Table training;  ///< a row for each logged step
  Table validation;
  /// Rows as objects, in the order of the file.
  std::vector<Json> starts;
  std::vector<Json> checkpoints;  ///< complete ones
  std::vector<Json> checkpoint_errors;
  std::vector<Json> nonfinite;
  std::vector<Json> profiles;
  bool ended = false;     ///< all output after the last step is on disk
  std::int64_t rows = 0;  ///< rows of the file, without damaged lines
  double last_time = 0;   ///< of the last row, seconds since 1970
  Json config;            ///< values by full name, such as "training.steps"
  std::vector<std::string> warnings;
};

/// Reads metrics.jsonl and config.toml of a run. Rows that were trained again
/// are left out, with the exception of starts and gradients that are not
/// finite: these are its history. A damaged line is skipped, and `warnings`
/// names it.
/// @throws Error{io} when there is no such folder, or no metrics.jsonl in it;
/// Error{format} when that has no row of a run. `option` is named.
RunRecord read_run(
    const std::filesystem::path& folder,
    const std::string& option);

/// Returns the values of TOML text by their full names. @throws Error{format}
/// with `origin` and the line.
Json flatten_toml(const std::string& text, const std::string& origin);

/// Returns the seconds since 1970 of "2026-11-27T23:15:22.123Z"; 0 when it is
/// another text.
double seconds_of(const std::string& time);

}  // namespace flatshard::report
