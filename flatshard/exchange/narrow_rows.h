#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard {

/// Rows of a few bytes, such as a routing weight each, between where they are
/// computed and the windows of the ranks that routed them: for so little, a
/// copy of each run takes longer than a kernel that finds each row.
struct NarrowRows {
  static constexpr std::int64_t kMaxNbytes = 16;

  /// Whether rows of this size are such. They are aligned to 4 bytes.
  static bool are(std::int64_t row_nbytes, std::int64_t element_nbytes) {
    return row_nbytes > 0 && row_nbytes <= kMaxNbytes &&
           element_nbytes % 4 == 0;
  }

  /// int64 [ranks]: the address of each rank's window, on the rows' device.
  at::Tensor windows;
  /// int32 [2, runs + 1] there: of each run its first row here, and its first
  /// row in the window of rank `run % ranks`. [0, runs] is the number of rows.
  at::Tensor runs;
  std::int64_t in_window = 0;  ///< bytes in front of the first row there
  std::int64_t num_rows = 0;   ///< here
  std::int64_t row_nbytes = 0;

  /// Gathers: here[i] = row i of the windows. Else the other way. On the
  /// current stream.
  void copy(void* here, bool gathers) const;
};

}  // namespace flatshard
