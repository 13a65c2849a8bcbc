#pragma once

#include <cstdint>
#include <string_view>

namespace flatshard {

/// The key of the header that contains text instead of a tensor.
inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";
/// The reference implementation rejects longer headers.
inline constexpr std::uint64_t kSafetensorsMaxHeader = 100'000'000;

}  // namespace flatshard
