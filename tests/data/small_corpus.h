#pragma once

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <vector>

#include "flatshard/core/file_writer.h"
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

}  // namespace flatshard::data
