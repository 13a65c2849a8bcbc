#pragma once

#include <cstdint>
#include <string_view>

namespace flatshard {

/// The key of the header that holds text instead of a tensor.
inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";
/// The original refuses longer headers, so files with one are no use.
inline constexpr std::uint64_t kSafetensorsMaxHeader = 100'000'000;

}  // namespace flatshard
