#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// Files are digested in blocks of this many bytes, so that a reader of a part
/// of a file checks only that part.
inline constexpr std::uint64_t kDigestBlock = std::uint64_t{1} << 20;

/// XXH3-64. Detects damage, not tampering, because it is not cryptographic.
/// Source: https://github.com/Cyan4973/xxHash, the library itself.
std::uint64_t digest(std::span<const std::byte> bytes);

/// Returns how many blocks a file of `nbytes` has. The last one may be shorter.
std::uint64_t num_digest_blocks(std::uint64_t nbytes);

/// 16 hexadecimal digits each, one after the other.
std::string digests_to_hex(std::span<const std::uint64_t> digests);
/// Returns the inverse. @throws Error{format} on anything else.
std::vector<std::uint64_t> digests_from_hex(std::string_view text);

}  // namespace flatshard
