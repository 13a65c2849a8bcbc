#pragma once

#include <filesystem>
#include <string>

#include "flatshard/models/config.h"

namespace flatshard {

/// Writes the files that AutoTokenizer and `generate` require next to the
/// weights of a run: the tokenizer's files and generation_config.json.
///
/// They come from model.init_from, chat template included, if its tokenizer is
/// the tokenizer of the dataset. Otherwise they come from the dataset, and for
/// byte tokens an equal tokenizer.json is written. Warns if there is neither,
/// or if the two differ.
/// @return the token ids for config.json; none without a tokenizer.
/// @throws Error{io}, Error{format} naming the file.
models::SpecialTokens export_tokenizer(
    const std::string& corpus,
    const std::filesystem::path& init_from,
    const models::ModelConfig& model,
    const std::filesystem::path& to);

}  // namespace flatshard
