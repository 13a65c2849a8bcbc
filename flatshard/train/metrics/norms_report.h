#pragma once

#include <cstdint>
#include <string>

namespace flatshard {

struct NormsReportOptions {
  std::string run;             ///< output_dir of the run
  std::int64_t step = -1;      ///< -1: the last one that has norms
  std::string sort = "model";  ///< model, weight, grad or ratio
  std::int64_t top = 0;        ///< rows to show; 0: all
};

/// Returns the norms of one step out of a run's metrics.jsonl, as a table.
///
/// @throws Error{io} without that file, Error{usage} when it has no norms (of
/// that step), naming the steps that have, Error{format} for a damaged row.
std::string norms_report(const NormsReportOptions& options);

}  // namespace flatshard
