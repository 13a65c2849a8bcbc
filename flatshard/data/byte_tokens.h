#pragma once

#include <cstdint>

namespace flatshard::data {

/// Byte tokens: a byte is its own token, and this one ends a document.
inline constexpr std::int64_t kByteEndOfDocument = 256;
inline constexpr std::int64_t kByteVocabSize = 257;
/// The name of the token in Hugging Face's tokenizers.
inline constexpr const char* kByteEndText = "<|endoftext|>";

}  // namespace flatshard::data
