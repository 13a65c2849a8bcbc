#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace flatshard {

/// The key of the header that holds text instead of a tensor.
inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";
/// The original refuses longer headers, so files with one are no use.
inline constexpr std::uint64_t kSafetensorsMaxHeader = 100'000'000;

/// Bytes of a tensor; false on a negative dimension or an overflow.
bool safetensors_nbytes(
    const std::vector<std::int64_t>& shape,
    std::int64_t item_nbytes,
    std::uint64_t& nbytes);

}  // namespace flatshard
