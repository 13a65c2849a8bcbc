#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "flatshard/data/byte_tokens.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/survey.h"

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
  /// Token text, for a tokenizer.json; "": what the tokenizer itself puts
  /// before a text, if anything; "none".
  std::string begin_of_document;
  /// The field of JSON rows and column of .parquet files that has the
  /// documents; "": text.
  std::string text_field;
  std::string format = "auto";  ///< see parse_input_format
  /// Control tokens that a text spells out become these tokens.
  bool parse_special = false;
  /// Each row is a conversation, which the tokenizer's chat template writes.
  bool chat = false;
  /// The trained part of chats: "assistant" (the default), "all", or "last",
  /// the last message of the assistant.
  std::string train_on;
  /// Variables of the chat template: JSON text of an object; "": none.
  std::string chat_template_kwargs;
};

/// Tokenizes files and writes a corpus folder (see CorpusMeta). A file of text
/// is one document, and so is each object of a JSON file and each row of a
/// Parquet file (see kind_of_file). Empty ones are left out. A document goes to
/// validation when the hash of its name (file#row) falls below
/// `validation_fraction`. So adding files never moves one from a split to the
/// other. With two or more documents and a fraction above 0 each split gets at
/// least one. A single document gives its last part to validation.
///
/// Chats have a mask in addition to their tokens (CorpusMeta). A chat that ends
/// with the end-of-document token gets no second one.
///
/// Nothing appears under `output` until it is whole.
/// @throws Error{io} for no match, an unreadable file or a full disk, and
/// Error{usage} when the output exists. Error{config} means a wrong option or a
/// missing Python package, Error{format} a file that cannot be taken for text.
/// @param report  what the inputs were; may be null.
CorpusMeta prepare_corpus(
    const PrepareOptions& options,
    Survey* report = nullptr);

}  // namespace flatshard::data
