#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "flatshard/data/corpus.h"
#include "flatshard/data/document_stream.h"
#include "flatshard/data/input_files.h"

namespace flatshard::data {

struct CorpusOptions {
  std::filesystem::path output;
  std::filesystem::path tokenizer;  ///< to copy, see copy_tokenizer; or empty
  /// The part of a single document that goes to validation; 0: there is no such
  /// split.
  double validation_fraction = 0;
  std::int64_t shard_tokens = std::int64_t{1} << 28;
  bool force = false;     ///< replace an older corpus of that name
  bool progress = false;  ///< report on standard error
};

/// Chooses the documents of validation: those whose hash of their name falls
/// below `fraction`. With two or more, each split gets one at least.
/// @return one for each document of `files`, in their order.
std::vector<bool> choose_validation(
    const std::vector<InputFile>& files,
    double fraction);

/// Writes the corpus folder of all documents. It appears when it is whole.
/// @param to_validation  see choose_validation.
/// @param meta  what is known of the corpus; gets the token type and the
/// splits.
/// @throws what StagedFolder, `stream` and check_unchanged throw; Error{io} for
/// a full disk.
void write_corpus(
    DocumentStream& stream,
    const std::vector<InputFile>& files,
    const std::vector<bool>& to_validation,
    const CorpusOptions& options,
    CorpusMeta& meta);

}  // namespace flatshard::data
