#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/core/file_writer.h"
#include "flatshard/data/corpus.h"

namespace flatshard::data {

class ContentHash;

/// Writes the token files of one split, document by document.
class SplitWriter {
 public:
  /// @param shard_tokens  maximum number of tokens per shard file.
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

/// A folder that appears under its name only once it is complete: files are
/// written under a temporary name next to it, and `commit` renames it. The
/// destructor removes it if there was no commit. Leftover folders of earlier
/// processes of this host that were killed are removed first.
class StagedFolder {
 public:
  /// Returns the absolute path of `target`, after a check of its existing
  /// content.
  /// @throws Error{usage} if it exists and `force` is false, or if it is not a
  /// dataset folder (nothing else is ever deleted).
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

struct CorpusOptions {
  std::filesystem::path output;
  std::filesystem::path tokenizer;  ///< to copy, see copy_tokenizer; or empty
  bool has_validation = true;       ///< false: there is no such split
  bool masked = false;              ///< tokens have a mask
  std::int64_t shard_tokens = std::int64_t{1} << 28;
  bool force = false;  ///< replace an older dataset of that name
};

/// Writes a dataset folder document by document. `commit` makes it visible.
class CorpusWriter {
 public:
  /// @param meta  without token type and splits.
  /// @throws what StagedFolder throws; Error{io} for a full disk.
  CorpusWriter(const CorpusOptions& options, CorpusMeta meta);

  /// Starts a document of the validation or the train split.
  void begin_document(bool to_validation);
  /// Appends tokens of the document, as SplitWriter::append.
  void append(
      bool to_validation,
      std::span<const std::uint32_t> tokens,
      std::span<const std::uint8_t> mask = {});
  /// @param trains_end  the mask of the end-of-document token.
  void end_document(bool to_validation, bool trains_end = true);

  /// Returns the content of meta.json.
  const CorpusMeta& commit();

 private:
  void append_one(bool to_validation, std::int64_t token, bool trained);

  CorpusOptions options_;
  CorpusMeta meta_;
  StagedFolder staged_;
  SplitWriter train_;
  SplitWriter validation_;
};

/// Returns a number in [0, 1) that depends only on the name of a document.
/// Documents whose number is below a fraction belong to the validation split.
double document_draw(std::string_view name);

}  // namespace flatshard::data
