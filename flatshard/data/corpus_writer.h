#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flatshard/core/file_writer.h"
#include "flatshard/data/corpus.h"

namespace flatshard::data {

class ContentHash;

/// Writes the token files of one split, document by document.
class SplitWriter {
 public:
  /// @param shard_tokens  tokens after which a new shard file begins.
  /// @param masked  tokens have a mask.
  SplitWriter(
      std::filesystem::path folder,
      std::string name,
      TokenType type,
      std::int64_t shard_tokens,
      bool masked = false);
  ~SplitWriter();

  /// Appends tokens to the open document. Each must fit the token type.
  /// @param mask  1 for tokens that are trained and 0 for others; empty for a
  ///   writer without masks.
  void append(
      std::span<const std::uint32_t> tokens,
      std::span<const std::uint8_t> mask = {});
  /// The tokens appended since the last call are one document.
  void end_document();

  std::int64_t num_tokens() const { return meta_.num_tokens; }
  std::int64_t num_documents() const { return meta_.num_documents; }

  /// Closes the files and writes the document index.
  SplitMeta finish();

 private:
  void next_shard();
  void write_mask(std::span<const std::uint8_t> mask);

  std::filesystem::path folder_;
  SplitMeta meta_;
  TokenType type_;
  std::int64_t shard_tokens_;
  std::unique_ptr<FileWriter> shard_;
  std::unique_ptr<FileWriter> mask_;  ///< of the shard; null: without masks
  std::vector<std::uint64_t> document_begin_;
  std::vector<std::uint16_t> narrow_;
  std::unique_ptr<ContentHash> hash_;
  std::unique_ptr<ContentHash> mask_hash_;
};

/// A folder that appears under its name only when it is whole: it is filled
/// under a temporary name next to it and renamed by `commit`. The destructor
/// removes it when there was no commit. Folders of earlier processes of this
/// host that were killed are removed first.
class StagedFolder {
 public:
  /// Returns the absolute path of `target`, after a check of its existing
  /// content.
  /// @throws Error{usage} when it exists and `force` is false, or is not a
  /// corpus folder (nothing else is ever deleted).
  static std::filesystem::path check(std::filesystem::path target, bool force);

  /// @throws what `check` throws.
  StagedFolder(std::filesystem::path target, bool force);
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;
  ~StagedFolder();

  const std::filesystem::path& path() const { return path_; }
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
};

}  // namespace flatshard::data
