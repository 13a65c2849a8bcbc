#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "flatshard/data/byte_tokens.h"
#include "flatshard/data/corpus.h"

namespace flatshard::data {

struct PrepareOptions {
  std::vector<std::string> inputs;  ///< files, folders, globs
  std::filesystem::path output;
  /// "bytes", a tokenizer.json, or a Hugging Face folder that has one.
  std::string tokenizer = "bytes";
  double validation_fraction = 0.05;
  std::int64_t shard_tokens = std::int64_t{1} << 28;
  bool force = false;     ///< replace an older corpus of that name
  bool progress = false;  ///< report on standard error
  std::string python;     ///< for tokenizer.json and Parquet; "": find_python
  /// Token text, for a tokenizer.json; "": the folder's eos_token, or a usual
  /// one.
  std::string end_of_document;
  std::string
      begin_of_document;  ///< token text, for a tokenizer.json; "": none
  /// The field of .jsonl and column of .parquet files that has the documents;
  /// "": text.
  std::string text_field;
};

/// Tokenizes files and writes a corpus folder (see CorpusMeta). Each file is
/// one document, but for .jsonl and .parquet files, which have one in each line
/// or row; empty ones are left out, and binary files of folders and globs as
/// well, with a warning. A document goes to validation when the hash of its
/// name (file#row) falls below `validation_fraction`, so adding files never
/// moves one from a split to the other. With two or more documents and a
/// fraction above 0 each split gets at least one; a single document gives its
/// last part to validation.
///
/// Nothing appears under `output` until it is whole.
/// @throws Error{io} no match, unreadable file, full disk; Error{usage} the
/// output exists; Error{config} a wrong option or a missing Python package.
CorpusMeta prepare_corpus(const PrepareOptions& options);

}  // namespace flatshard::data
