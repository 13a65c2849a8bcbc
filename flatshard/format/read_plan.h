#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "flatshard/format/manifest.h"

namespace flatshard {

/// A requested box of a stored tensor. It is stored in row-major order at byte
/// `destination` of the reader's memory.
struct WantedBox {
  const StoredTensor* tensor = nullptr;
  Rectangle box;
  std::uint64_t destination = 0;
};

/// One read of complete digest blocks of one file, and the copies out of it.
struct ReadChunk {
  struct Copy {
    std::uint64_t source = 0;  ///< from the start of the file
    std::uint64_t nbytes = 0;
    std::uint64_t destination = 0;

    bool operator==(const Copy&) const = default;
  };

  std::int64_t file = 0;    ///< index into Manifest::files
  std::uint64_t begin = 0;  ///< a multiple of kDigestBlock
  std::uint64_t end = 0;    ///< a multiple of it, or the end of the file
  std::vector<Copy> copies;

  bool operator==(const ReadChunk&) const = default;
};

/// Returns the reads for the requested boxes, ordered by file, then by offset.
/// Only digest blocks that contain requested bytes are read, and each only
/// once, unless boxes overlap.
///
/// @param max_nbytes  of one read; a multiple of kDigestBlock.
std::vector<ReadChunk> plan_reads(
    const Manifest& manifest,
    std::span<const WantedBox> wanted,
    std::uint64_t max_nbytes = std::uint64_t{8} << 20);

/// Returns the reads that see every byte of every file and keep none: to
/// verify.
std::vector<ReadChunk> plan_whole_files(const Manifest& manifest);

/// Returns the bytes that the chunks read.
std::uint64_t read_nbytes(std::span<const ReadChunk> chunks);

/// Carries out the reads with `num_threads` threads, checks each block against
/// its digest and fills `out`. Blocks.
///
/// @throws Error{io} or Error{format} naming the file, the tensor's bytes and
/// both digests; `out` may be written in part then.
void read_chunks(
    const std::filesystem::path& folder,
    const Manifest& manifest,
    std::span<const ReadChunk> chunks,
    std::span<std::byte> out,
    int num_threads);

/// Checks the files of a checkpoint against its manifest: each has its length,
/// and its safetensors header names each piece's entry with the manifest's
/// dtype and place.
///
/// @param files  indices; empty: all.
/// @throws Error{io} or Error{format} naming the file and both values.
void check_files(
    const std::filesystem::path& folder,
    const Manifest& manifest,
    std::span<const std::int64_t> files = {});

}  // namespace flatshard
