#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace flatshard::report {

/// The contents of a report.
struct ReportOptions {
  std::string run;                   ///< output_dir of a run
  std::vector<std::string> compare;  ///< other runs
  std::string default_config;        ///< TOML of the default config
  std::string charts = "[]";         ///< JSON of the page's charts
};

/// Returns all measurements of the runs as JSON. docs/guides/report.md
/// describes the format.
/// Logs a warning for each line that is skipped.
/// @throws Error{io, format} naming --run or --compare.
std::string report_json(const ReportOptions& options);

/// Returns a page in HTML that needs nothing else: data, style and script are
/// inside, and it loads nothing. Long runs are downsampled to a thousand
/// points. The same warnings and errors.
std::string report_page(const ReportOptions& options);

}  // namespace flatshard::report
