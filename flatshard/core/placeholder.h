#pragma once

#include <filesystem>
#include <string_view>

namespace flatshard {

/// Throws Error{format} when a file is a Git LFS placeholder. Such a file stays
/// until the content is downloaded.
/// @param head  the file's first bytes, `kPlaceholderHead` of them when it has
///   as many.
void refuse_placeholder(
    const std::filesystem::path& path,
    std::string_view head);

inline constexpr std::size_t kPlaceholderHead = 48;

}  // namespace flatshard
