#pragma once

#include <filesystem>
#include <string>

#include "flatshard/models/config.h"

namespace flatshard {

/// Writes the files that AutoTokenizer and `generate` want next to a run's
/// weights: the tokenizer's files and generation_config.json.
///
/// They come from model.init_from, chat template included, when it has the
/// tokenizer that the corpus was made with. Otherwise they are the corpus' own,
/// and for byte tokens an equal tokenizer.json. Warns when there is neither, or
/// when the two differ.
/// @return the token ids for config.json; none without a tokenizer.
/// @throws Error{io}, Error{format} naming the file.
models::SpecialTokens export_tokenizer(
    const std::string& corpus,
    const std::filesystem::path& init_from,
    const models::ModelConfig& model,
    const std::filesystem::path& to);

}  // namespace flatshard
