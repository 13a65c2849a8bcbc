#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

enum class CollectiveKind {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  barrier,
  fence,
};

std::string_view to_string(CollectiveKind kind);

/// One launched collective.
struct CollectiveRecord {
  std::int64_t seq = 0;  ///< position in the log, from 0
  std::string communicator;
  CollectiveKind kind{};
  /// Elements of the larger side on this rank (all-gather: the output,
  /// reduce-scatter: the input), summed over the tensors of one launch; for an
  /// all-to-all the elements of one row.
  std::int64_t numel = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;

  bool operator==(const CollectiveRecord&) const = default;
};

/// The collectives that were really launched, in launch order. Shared by all
/// communicators of a mesh; safe to use from any thread.
class CollectiveLog {
 public:
  void append(
      const std::string& communicator,
      CollectiveKind kind,
      std::int64_t numel,
      at::ScalarType dtype);
  std::vector<CollectiveRecord> records() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CollectiveRecord> records_;
};

}  // namespace flatshard
