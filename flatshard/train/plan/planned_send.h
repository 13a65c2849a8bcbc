#pragma once

#include "flatshard/core/stored_entry.h"
#include "flatshard/fully_shard/describe.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// Bytes of the buffer in which a WeightSender collects tensors, if none of
/// them is larger.
inline constexpr std::int64_t kSendBucketNbytes = std::int64_t{512} << 20;

/// Returns the most memory that WeightSender::send allocates on rank 0, for
/// these units. The other ranks have no bucket.
/// @param plans  of the units.
std::int64_t send_nbytes(
    const StoredEntriesOf& entries_of,
    const std::vector<UnitDescription>& units,
    const std::vector<UnitPlan>& plans);

}  // namespace flatshard
