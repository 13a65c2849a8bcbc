#include "flatshard/comm/collective_log.h"

namespace flatshard {

std::string_view to_string(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::all_gather:
      return "all_gather";
    case CollectiveKind::reduce_scatter:
      return "reduce_scatter";
    case CollectiveKind::all_reduce:
      return "all_reduce";
    case CollectiveKind::broadcast:
      return "broadcast";
    case CollectiveKind::all_to_all:
      return "all_to_all";
    case CollectiveKind::barrier:
      return "barrier";
    case CollectiveKind::fence:
      return "fence";
  }
  return "unknown";
}

void CollectiveLog::append(
    const std::string& communicator,
    CollectiveKind kind,
    std::int64_t numel,
    at::ScalarType dtype) {
  const std::lock_guard lock(mutex_);
  records_.push_back(
      {static_cast<std::int64_t>(records_.size()),
       communicator,
       kind,
       numel,
       dtype});
}

std::vector<CollectiveRecord> CollectiveLog::records() const {
  const std::lock_guard lock(mutex_);
  return records_;
}

void CollectiveLog::clear() {
  const std::lock_guard lock(mutex_);
  records_.clear();
}

}  // namespace flatshard
