#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/core/file_reader.h"

namespace flatshard::data {

/// Storage format of a token: little-endian unsigned words.
enum class TokenType { uint16, uint32 };

std::string_view to_string(TokenType type);
std::int64_t token_nbytes(TokenType type);

/// CorpusMeta::tokenizer of tokens whose tokenizer is not known.
inline constexpr const char* kNoTokenizer = "none";

/// One split (`train` or `validation`) of a tokenized dataset.
struct SplitMeta {
  std::string name;
  std::int64_t num_tokens = 0;  ///< end-of-document tokens included
  std::int64_t num_documents = 0;
  std::vector<std::int64_t> shard_tokens;  ///< tokens in each shard file
  /// The XXH3 in hexadecimal digits of all tokens as uint32, whatever their
  /// type and files. Empty in an older version.
  std::string content_hash;
  /// Tokens whose mask is 1; unset: there is no mask, all tokens are trained.
  std::optional<std::int64_t> trained_tokens;
  std::string mask_hash;  ///< XXH3 of the mask; empty without one

  std::string shard_file(std::size_t shard) const;  ///< "train-00000.bin"
  std::string mask_file(std::size_t shard) const;   ///< "train-00000.mask.bin"
  std::string document_file() const;                ///< "train.documents.bin"
};

/// The content of meta.json in a dataset folder.
///
/// The folder, format version 1 (2 with masks), as `flatshard data prepare`
/// writes it:
///   meta.json                    this
///   train-00000.bin, ...         the tokens of the split, concatenated. Each
///                                document ends with `end_of_document` and
///                                may start with `begin_of_document`
///   train.documents.bin          uint64[num_documents + 1]: first token of
///                                each document, then num_tokens
///   train-00000.mask.bin, ...    one byte per token of that shard: 1 if it
///                                contributes to the loss, else 0. Without
///                                these files, every token contributes
///   validation-00000.bin, ...    the same for the validation split
///   tokenizer.json               a copy, when the tokenizer was such a file,
///                                and the files next to it when it was a
///                                folder (see tokenizer_files)
struct CorpusMeta {
  TokenType token_type = TokenType::uint16;
  std::int64_t vocab_size = 0;       ///< every token is below this
  std::int64_t end_of_document = 0;  ///< the token that ends a document
  /// The token that starts each document. Most datasets have none.
  std::optional<std::int64_t> begin_of_document;
  std::string tokenizer;   ///< "bytes", "tokenizer.json" or kNoTokenizer
  std::string input_hash;  ///< of the texts or tokens, and the files' names
  std::vector<SplitMeta> splits;

  const SplitMeta* find_split(std::string_view name) const;
  std::int64_t num_tokens() const;
  std::int64_t num_documents() const;

  std::string to_json() const;
  /// @throws Error{format} naming `origin` and the key that is wrong.
  static CorpusMeta from_json(std::string_view text, const std::string& origin);
  /// Reads DIR/meta.json. @throws Error{io} when there is none, with the
  /// command that makes one.
  static CorpusMeta load(const std::filesystem::path& folder);
};

/// One split of a tokenized dataset, with its files open. Immutable and safe to
/// read from several threads.
class Corpus {
 public:
  /// @throws Error{io} when the folder or a file is missing, Error{format} when
  /// a file's length differs from meta.json, Error{config} for a missing split.
  static std::shared_ptr<const Corpus> open(
      const std::filesystem::path& folder,
      std::string_view split = "train");

  const CorpusMeta& meta() const { return meta_; }
  const std::string& split() const { return split_.name; }
  std::int64_t vocab_size() const { return meta_.vocab_size; }
  std::int64_t num_tokens() const { return split_.num_tokens; }
  std::int64_t num_documents() const { return split_.num_documents; }
  const std::string& content_hash() const { return split_.content_hash; }
  const std::string& mask_hash() const { return split_.mask_hash; }

  /// Returns the first token of document i, for i in [0, num_documents]. The
  /// last one is num_tokens. @throws Error{io} as `read` does.
  std::int64_t document_begin(std::int64_t i) const;
  /// The first tokens of the documents [first, first + out.size()); one more
  /// than the last is num_tokens.
  /// @throws as document_begin; Error{format} where they do not ascend.
  void document_begins(std::int64_t first, std::span<std::int64_t> out) const;

  /// Copies tokens `[begin, begin + out.size())` as int64.
  /// @throws Error{usage} for tokens outside the split, Error{io} if a file was
  /// truncated after it was opened.
  void read(std::int64_t begin, std::span<std::int64_t> out) const;

  bool has_mask() const { return split_.trained_tokens.has_value(); }
  /// Copies the mask of tokens `[begin, begin + out.size())`. Requires
  /// has_mask(). @throws as `read`; Error{format} for bytes other than 0 and 1.
  void read_mask(std::int64_t begin, std::span<std::uint8_t> out) const;

 private:
  Corpus() = default;
  /// Calls fn(shard, first token there, first element of the range, count) for
  /// each part of `[begin, begin + count)`. @throws Error{usage}.
  template <class F>
  void for_each_part(std::int64_t begin, std::int64_t count, F&& fn) const;

  CorpusMeta meta_;
  SplitMeta split_;
  std::vector<FileReader> shards_;
  std::vector<FileReader> masks_;          ///< one per shard; or none
  std::vector<std::int64_t> shard_begin_;  ///< first token of each shard
  FileReader documents_;
};

}  // namespace flatshard::data
