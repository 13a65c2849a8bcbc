#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::data {

struct CodecOptions {
  std::string python;  ///< see find_python
  /// Control tokens that a text spells out become these tokens.
  bool parse_special = false;
};

/// Conversations as a model continues them.
struct ChatPrompts {
  /// Each conversation, up to where the assistant answers.
  std::vector<std::vector<std::int64_t>> prompts;
  /// The tokens that end an answer; empty where the template has no control
  /// token there.
  std::vector<std::int64_t> ends;
};

/// Encodes and decodes text with the tokenizer of a dataset.
class TextCodec {
 public:
  virtual ~TextCodec() = default;

  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  /// Special tokens (end of document) give no text unless `keep_special`.
  virtual std::string decode(
      const std::vector<std::int64_t>& tokens,
      bool keep_special = false) const = 0;
  /// `decode` of each list; Python is run once for all.
  virtual std::vector<std::string> decode_all(
      const std::vector<std::vector<std::int64_t>>& lists,
      bool keep_special = false) const = 0;
  /// Returns the text of `prompt` and of the tokens after it. Both are decoded
  /// together: the text of two pieces is not always the text of one and then
  /// the other.
  ///
  /// @param text  what `prompt` was encoded from; it is returned as it is.
  virtual std::string decode_after(
      std::string_view text,
      const std::vector<std::int64_t>& prompt,
      const std::vector<std::int64_t>& tokens) const;
  /// Puts conversations through the tokenizer's own chat template. Runs Python
  /// once, with transformers.
  /// @param rows  JSON objects as `flatshard data prepare --chat` reads them;
  ///   the last message must not have the role of the assistant.
  /// @throws Error{config} for a tokenizer without a template, Error{format}
  /// for a row that is not a conversation.
  virtual ChatPrompts chat_prompts(const std::vector<std::string>& rows) const;
  /// Returns the token that ends a text.
  virtual std::int64_t end_of_document() const = 0;
  /// Returns the token that starts a text, if any. `encode` does not add
  /// it.
  virtual std::optional<std::int64_t> begin_of_document() const {
    return std::nullopt;
  }
  /// Returns the tokens that end a text that is generated.
  virtual std::vector<std::int64_t> stop_tokens() const {
    return {end_of_document()};
  }

  /// Byte tokens: needs nothing.
  static std::unique_ptr<TextCodec> bytes();
  /// @param tokenizer  a tokenizer.json; each call runs Python once.
  /// @param end_of_document, begin_of_document  ids of those tokens, from the
  ///   meta.json of a dataset.
  static std::unique_ptr<TextCodec> tokenizer_json(
      std::filesystem::path tokenizer,
      std::int64_t end_of_document,
      std::optional<std::int64_t> begin_of_document = {},
      CodecOptions options = {});
  /// @param tokenizer  a tokenizer.json of a Hugging Face model.
  /// @param eos  tokens that end its texts. `encode` puts the token before the
  ///   text that the tokenizer itself puts there, as AutoTokenizer does.
  static std::unique_ptr<TextCodec> hf_tokenizer(
      std::filesystem::path tokenizer,
      std::vector<std::int64_t> eos,
      CodecOptions options = {});
  /// Returns the codec of a dataset folder.
  static std::unique_ptr<TextCodec> open(
      const std::filesystem::path& corpus,
      CodecOptions options = {});
};

}  // namespace flatshard::data
