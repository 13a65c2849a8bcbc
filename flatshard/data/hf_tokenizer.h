#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace flatshard::data {

// The files of a tokenizer as transformers' AutoTokenizer reads them.

inline constexpr const char* kTokenizerFile = "tokenizer.json";

/// Returns the tokenizer.json that a user means: that file, or the folder that
/// has it.
/// @throws Error{config} when there is none.
std::filesystem::path find_tokenizer(const std::filesystem::path& path);

/// Returns the tokenizer's files that a folder has, chat template included, by
/// name.
std::vector<std::string> tokenizer_files(const std::filesystem::path& folder);

/// Copies them. @throws Error{io}.
void copy_tokenizer_files(
    const std::filesystem::path& from,
    const std::filesystem::path& to);

/// Copies a tokenizer file to `to`/tokenizer.json. If it is itself named
/// tokenizer.json, the files next to it are copied too. @throws
/// Error{io}.
void copy_tokenizer(
    const std::filesystem::path& tokenizer,
    const std::filesystem::path& to);

/// Returns the content of a tokenizer.json for byte tokens: a byte is its own
/// token, and kByteEndOfDocument is the special token "<|endoftext|>".
std::string byte_tokenizer_json();

/// Returns whether two tokenizer.json files produce the same tokens: equal
/// vocabularies, merges and added tokens. @throws Error{format} naming `origin`
/// if one is not valid JSON.
bool same_tokens(
    const std::string& a,
    const std::string& b,
    const std::string& origin);

/// Returns a token's text in a tokenizer.json; empty when it has no such id.
/// @throws Error{format} naming `origin` if it is not valid JSON.
std::string token_text(
    const std::string& tokenizer_json,
    std::int64_t id,
    const std::string& origin);

/// Returns a tokenizer.json that puts the token `id` before each text when
/// special tokens are requested (as AutoTokenizer does by default).
/// @throws Error{format} naming `origin` for invalid JSON or an unknown id.
std::string with_first_token(
    const std::string& tokenizer_json,
    std::int64_t id,
    const std::string& origin);

/// Returns the content of a tokenizer_config.json next to a tokenizer.json.
/// @param first, end  texts of the tokens that start and end a document.
/// @param max_tokens  that the model has positions for.
std::string tokenizer_config_json(
    const std::string& first,
    const std::string& end,
    std::int64_t max_tokens);

}  // namespace flatshard::data
