#include "flatshard/train/plan/planned_send.h"

#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace flatshard {
namespace {

/// The memory of a group's parameters in a WeightStream, in bytes.
struct StreamedGroup {
  std::int64_t gathered = 0;
  /// Tensors with separate memory: full ones of slices, and those that several
  /// parameters are rows of.
  std::int64_t copied = 0;
};

}  // namespace

std::int64_t send_nbytes(
    const StoredEntriesOf& entries_of,
    const std::vector<UnitDescription>& units,
    const std::vector<UnitPlan>& plans) {
  std::vector<StreamedGroup> groups;
  std::int64_t all = 0;
  std::int64_t largest = 0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t g = 0; g < units[u].groups.size(); ++g) {
      const GroupDescription& group = units[u].groups[g];
      const GroupPlan& plan = plans[u].groups[g];
      const auto element = static_cast<std::int64_t>(
          c10::elementSize(group.options.precision.compute));
      const bool is_whole = plan.storage.main_is_compute() &&
                            plan.storage.resident() && !plan.storage.spreads;
      StreamedGroup& streamed = groups.emplace_back();
      streamed.gathered = is_whole ? 0 : plan.layout->numel() * element;
      if (plan.storage.main == StoragePlan::Main::host) {
        streamed.gathered += plan.bytes().main;  // their copy on the device
      }
      for (const GroupParameter& p : group.spec.parameters) {
        const std::vector<std::int64_t> shape = p.whole_shape();
        if (p.slice() != TensorSlice()) {
          streamed.copied += c10::multiply_integers(shape) * element;
        }
        for (const StoredEntry& entry : entries_of(p.names.front(), shape)) {
          const std::int64_t nbytes = entry.numel() * element;
          all += nbytes;
          largest = std::max(
              largest,
              c10::multiply_integers(entry.tensor_shape()) * element);
          streamed.copied += entry.is_whole() ? 0 : nbytes;
        }
      }
    }
  }
  std::int64_t most = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::int64_t next =
        i + 1 < groups.size() ? groups[i + 1].gathered : 0;
    most = std::max(most, groups[i].gathered + groups[i].copied + next);
  }
  return most + std::max(largest, std::min(all, kSendBucketNbytes));
}

}  // namespace flatshard
