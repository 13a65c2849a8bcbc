#pragma once

#include <cstdint>

namespace flatshard::nn {

/// Returns the number of groups in which `attend_shared_tokens` exchanges the
/// heads of a rank: 2 where keys and values can be split, otherwise 1.
inline std::int64_t num_head_groups(
    std::int64_t kv_heads,
    std::int64_t num_ranks) {
  return kv_heads % (2 * num_ranks) == 0 ? 2 : 1;
}

}  // namespace flatshard::nn
