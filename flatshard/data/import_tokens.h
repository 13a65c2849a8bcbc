#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "flatshard/data/corpus.h"

namespace flatshard::data {

struct ImportOptions {
  std::vector<std::string> inputs;      ///< token files, see TokenFile
  std::vector<std::string> validation;  ///< of the validation split
  std::filesystem::path output;
  /// The tokenizer of the tokens: a tokenizer.json or its folder. With "none",
  /// vocab_size and end_of_document replace it.
  std::string tokenizer;
  std::int64_t vocab_size = 0;  ///< 0: the tokenizer's
  /// Text or id of the token that ends a document; "": the tokenizer's own.
  std::string end_of_document;
  std::string dtype;  ///< of raw files; see TokenFile
  /// The share of the documents for validation, when `validation` is empty.
  double validation_fraction = 0.05;
  std::int64_t shard_tokens = std::int64_t{1} << 28;
  bool force = false;
  bool progress = false;
  std::string python;
};

/// Writes a corpus folder of tokens that another program has made. Documents
/// come from Megatron's index, or end after each end-of-document token. Empty
/// ones are left out.
/// @param lines  if not null: gets a line for each file, such as
///   "train.bin: raw uint16, 12 tokens, ...".
/// @throws Error{format} naming the file and the token that is not in the
/// vocabulary; what TokenFile and prepare_corpus throw.
CorpusMeta import_tokens(
    const ImportOptions& options,
    std::vector<std::string>* lines = nullptr);

}  // namespace flatshard::data
