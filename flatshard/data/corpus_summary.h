#pragma once

#include <string>

#include "flatshard/data/corpus.h"

namespace flatshard::data {

/// Returns lines for a person: tokenizer, vocabulary, tokens and documents.
std::string summary(const CorpusMeta& meta);

}  // namespace flatshard::data
