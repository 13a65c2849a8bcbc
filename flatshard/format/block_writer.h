#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace flatshard {

/// The divisor that direct I/O needs of the memory, the offset and the length.
/// No supported file system asks for more.
inline constexpr std::size_t kDirectAlignment = 4096;

/// Writes a new file from memory and waits until it is on disk.
///
/// Goes past the page cache where the file system can (O_DIRECT): a checkpoint
/// would push everything else out of it, and the copy into it costs as much as
/// the disk. Blocks.
///
/// @param bytes  written with O_DIRECT if their address is a multiple of
///   kDirectAlignment; else through the page cache.
/// @return the digest of each kDigestBlock bytes.
/// @throws Error{io} naming the file; a partly written file stays.
std::vector<std::uint64_t> write_digested(
    const std::filesystem::path& path,
    std::span<const std::byte> bytes);

}  // namespace flatshard
