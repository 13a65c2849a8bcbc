#include "flatshard/data/text_codec.h"

#include <set>

#include "flatshard/core/error.h"
#include "flatshard/data/byte_tokens.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/python_tokenizer.h"

namespace flatshard::data {
namespace {

class ByteCodec : public TextCodec {
 public:
  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> tokens;
    tokens.reserve(text.size());
    for (const char c : text) {
      tokens.push_back(static_cast<unsigned char>(c));
    }
    return tokens;
  }

  std::string decode(const std::vector<std::int64_t>& tokens, bool keep_special)
      const override {
    std::string text;
    for (const std::int64_t token : tokens) {
      if (token >= 0 && token < kByteEndOfDocument) {
        text.push_back(static_cast<char>(token));
      } else if (keep_special && token == kByteEndOfDocument) {
        text += kByteEndText;
      }
    }
    return text;
  }

  std::vector<std::string> decode_all(
      const std::vector<std::vector<std::int64_t>>& lists,
      bool keep_special) const override {
    std::vector<std::string> texts;
    for (const auto& tokens : lists) {
      texts.push_back(decode(tokens, keep_special));
    }
    return texts;
  }

  std::int64_t end_of_document() const override { return kByteEndOfDocument; }
};

class JsonCodec : public TextCodec {
 public:
  JsonCodec(
      PythonTokenizerOptions options,
      std::int64_t end_of_document,
      std::optional<std::int64_t> begin_of_document)
      : options_(std::move(options)),
        end_of_document_(end_of_document),
        begin_of_document_(begin_of_document) {}

  std::vector<std::int64_t> encode(std::string_view text) const override {
    return ask_python(options_, "encode", {std::string(text)}).tokens.at(0);
  }

  std::string decode(const std::vector<std::int64_t>& tokens, bool keep_special)
      const override {
    return decode_all({tokens}, keep_special).front();
  }

  std::string decode_after(
      std::string_view text,
      const std::vector<std::int64_t>& prompt,
      const std::vector<std::int64_t>& tokens) const override {
    std::vector<std::int64_t> all = prompt;
    all.insert(all.end(), tokens.begin(), tokens.end());
    const auto texts = decode_all({prompt, all, tokens}, false);
    // If the tokens change the prompt's own text, keep it as it was typed.
    return std::string(text) + (texts[1].starts_with(texts[0])
                                    ? texts[1].substr(texts[0].size())
                                    : texts[2]);
  }

  std::vector<std::string> decode_all(
      const std::vector<std::vector<std::int64_t>>& lists,
      bool keep_special) const override {
    PythonTokenizerOptions options = options_;
    options.keep_special = keep_special;
    return ask_python(options, "decode", {}, lists).texts;
  }

  ChatPrompts chat_prompts(
      const std::vector<std::string>& rows) const override {
    // A prompt, then the token that ends its answer.
    const TokenLists lists = ask_python(options_, "prompt", rows).tokens;
    ChatPrompts found;
    std::set<std::int64_t> ends;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      found.prompts.push_back(lists.at(2 * i));
      ends.insert(lists.at(2 * i + 1).begin(), lists.at(2 * i + 1).end());
    }
    found.ends.assign(ends.begin(), ends.end());
    return found;
  }

  std::int64_t end_of_document() const override { return end_of_document_; }
  std::optional<std::int64_t> begin_of_document() const override {
    return begin_of_document_;
  }

 protected:
  const PythonTokenizerOptions& options() const { return options_; }

 private:
  PythonTokenizerOptions options_;
  std::int64_t end_of_document_;
  std::optional<std::int64_t> begin_of_document_;
};

class HfCodec : public JsonCodec {
 public:
  HfCodec(PythonTokenizerOptions options, std::vector<std::int64_t> eos)
      : JsonCodec(std::move(options), eos.empty() ? -1 : eos.front(), {}),
        eos_(std::move(eos)) {}

  std::vector<std::int64_t> encode(std::string_view text) const override {
    PythonAnswer answer = ask_python(options(), "encode", {std::string(text)});
    const auto& tokens = answer.tokens.at(0);
    answer.own_begin.insert(
        answer.own_begin.end(),
        tokens.begin(),
        tokens.end());
    return answer.own_begin;
  }

  std::int64_t end_of_document() const override {
    FLATSHARD_CHECK(
        !eos_.empty(),
        config,
        "--prompt: expected a text, because config.json has no eos_token_id "
        "to start from");
    return eos_.front();
  }
  std::vector<std::int64_t> stop_tokens() const override { return eos_; }

 private:
  std::vector<std::int64_t> eos_;
};

PythonTokenizerOptions tokenizer_options(
    std::filesystem::path tokenizer,
    CodecOptions options) {
  return {
      .python = std::move(options.python),
      .tokenizer = std::move(tokenizer),
      .parse_special = options.parse_special};
}

}  // namespace

std::string TextCodec::decode_after(
    std::string_view text,
    const std::vector<std::int64_t>& /*prompt*/,
    const std::vector<std::int64_t>& tokens) const {
  return std::string(text) + decode(tokens);
}

ChatPrompts TextCodec::chat_prompts(
    const std::vector<std::string>& /*rows*/) const {
  FLATSHARD_THROW(
      config,
      "--chat: expected a tokenizer with a chat template, got byte tokens; "
      "set --corpus to a dataset of another tokenizer");
}

std::unique_ptr<TextCodec> TextCodec::bytes() {
  return std::make_unique<ByteCodec>();
}

std::unique_ptr<TextCodec> TextCodec::tokenizer_json(
    std::filesystem::path tokenizer,
    std::int64_t end_of_document,
    std::optional<std::int64_t> begin_of_document,
    CodecOptions options) {
  return std::make_unique<JsonCodec>(
      tokenizer_options(std::move(tokenizer), std::move(options)),
      end_of_document,
      begin_of_document);
}

std::unique_ptr<TextCodec> TextCodec::hf_tokenizer(
    std::filesystem::path tokenizer,
    std::vector<std::int64_t> eos,
    CodecOptions options) {
  return std::make_unique<HfCodec>(
      tokenizer_options(std::move(tokenizer), std::move(options)),
      std::move(eos));
}

std::unique_ptr<TextCodec> TextCodec::open(
    const std::filesystem::path& corpus,
    CodecOptions options) {
  const CorpusMeta meta = CorpusMeta::load(corpus);
  if (meta.tokenizer == "bytes") {
    return bytes();
  }
  FLATSHARD_CHECK(
      meta.tokenizer != kNoTokenizer,
      config,
      "{} was imported without a tokenizer, so its tokens have no text",
      corpus.string());
  return tokenizer_json(
      corpus / meta.tokenizer,
      meta.end_of_document,
      meta.begin_of_document,
      std::move(options));
}

}  // namespace flatshard::data
