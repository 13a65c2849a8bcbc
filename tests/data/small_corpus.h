#pragma once

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/core/file_writer.h"
#include "flatshard/data/byte_tokens.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/corpus_writer.h"

namespace flatshard::data {

/// Writes documents of the given lengths; token i of the stream is i.
/// @param is_trained  the mask of token i; null: there is no mask.
inline CorpusMeta write_small_corpus(
    const std::filesystem::path& folder,
    TokenType type,
    std::int64_t shard_tokens,
    const std::vector<std::uint32_t>& lengths,
    std::uint32_t first_token = 0,
    bool (*is_trained)(std::uint32_t) = nullptr) {
  std::filesystem::create_directories(folder);
  SplitWriter writer(
      folder,
      "train",
      type,
      shard_tokens,
      /*masked=*/is_trained != nullptr);
  std::uint32_t next = first_token;
  for (const std::uint32_t length : lengths) {
    std::vector<std::uint32_t> tokens(length);
    std::iota(tokens.begin(), tokens.end(), next);
    next += length;
    std::vector<std::uint8_t> mask;
    for (const std::uint32_t token : tokens) {
      if (is_trained != nullptr) {
        mask.push_back(is_trained(token) ? 1 : 0);
      }
    }
    writer.append(tokens, mask);
    writer.end_document();
  }
  CorpusMeta meta{
      .token_type = type,
      .vocab_size = next + 1,
      .tokenizer = "bytes",
      .input_hash = "0",
      .splits = {writer.finish()}};
  FileWriter file(folder / "meta.json");
  file.write(meta.to_json());
  file.close();
  return meta;
}

/// Writes a dataset of byte tokens, as `flatshard data prepare` does. The end
/// of a single text becomes validation data. With several texts, about
/// `validation_fraction` of them do, and at least one.
inline CorpusMeta write_byte_corpus(
    const std::filesystem::path& folder,
    const std::vector<std::string>& texts,
    double validation_fraction) {
  CorpusWriter writer(
      {.output = folder, .has_validation = validation_fraction > 0},
      {.vocab_size = kByteVocabSize,
       .end_of_document = kByteEndOfDocument,
       .tokenizer = "bytes",
       .input_hash = "0"});
  const auto add = [&](bool to_validation, std::string_view text) {
    writer.begin_document(to_validation);
    std::vector<std::uint32_t> tokens;
    for (const char c : text) {
      tokens.push_back(static_cast<unsigned char>(c));
    }
    writer.append(to_validation, tokens);
    writer.end_document(to_validation);
  };
  if (texts.size() == 1 && validation_fraction > 0) {
    const std::string_view text = texts.front();
    const auto tail = static_cast<std::size_t>(
        static_cast<double>(text.size()) * validation_fraction);
    add(false, text.substr(0, text.size() - tail));
    add(true, text.substr(text.size() - tail));
    return writer.commit();
  }
  bool has_any = validation_fraction == 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const bool chosen =
        document_draw(std::to_string(i)) < validation_fraction ||
        (!has_any && i + 1 == texts.size());
    has_any = has_any || chosen;
    add(chosen, texts[i]);
  }
  return writer.commit();
}

}  // namespace flatshard::data
