#include "flatshard/data/text_codec.h"

#include "flatshard/core/error.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/prepare.h"
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

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    for (const std::int64_t token : tokens) {
      if (token >= 0 && token < kByteEndOfDocument) {
        text.push_back(static_cast<char>(token));
      }
    }
    return text;
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
    PythonChild child(options_, "encode", text);
    return read_tokens(child);
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string input;
    for (const std::int64_t token : tokens) {
      input += fmt::format("{} ", token);
    }
    PythonChild child(options_, "decode", input);
    return child.read_text();
  }

  std::int64_t end_of_document() const override { return end_of_document_; }
  std::optional<std::int64_t> begin_of_document() const override {
    return begin_of_document_;
  }

 protected:
  const PythonTokenizerOptions& options() const { return options_; }
  static std::vector<std::int64_t> read_tokens(PythonChild& child) {
    std::vector<std::uint32_t> words(
        static_cast<std::size_t>(child.read_count()));
    child.read(words.data(), words.size() * sizeof(std::uint32_t));
    return {words.begin(), words.end()};
  }

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
    PythonChild child(options(), "encode", text);
    auto tokens = read_tokens(child);
    if (const auto begin = child.own_begin()) {
      tokens.insert(tokens.begin(), begin->id);
    }
    return tokens;
  }

  std::int64_t end_of_document() const override {
    FLATSHARD_CHECK(
        !eos_.empty(),
        config,
        "--prompt: expected a text, since config.json has no eos_token_id to "
        "begin with");
    return eos_.front();
  }
  std::vector<std::int64_t> stop_tokens() const override { return eos_; }

 private:
  std::vector<std::int64_t> eos_;
};

}  // namespace

std::unique_ptr<TextCodec> TextCodec::bytes() {
  return std::make_unique<ByteCodec>();
}

std::unique_ptr<TextCodec> TextCodec::tokenizer_json(
    std::filesystem::path tokenizer,
    std::int64_t end_of_document,
    std::optional<std::int64_t> begin_of_document,
    std::string python) {
  return std::make_unique<JsonCodec>(
      PythonTokenizerOptions{
          .python = std::move(python),
          .tokenizer = std::move(tokenizer)},
      end_of_document,
      begin_of_document);
}

std::unique_ptr<TextCodec> TextCodec::hf_tokenizer(
    std::filesystem::path tokenizer,
    std::vector<std::int64_t> eos,
    std::string python) {
  return std::make_unique<HfCodec>(
      PythonTokenizerOptions{
          .python = std::move(python),
          .tokenizer = std::move(tokenizer)},
      std::move(eos));
}

std::unique_ptr<TextCodec> TextCodec::open(
    const std::filesystem::path& corpus,
    std::string python) {
  const CorpusMeta meta = CorpusMeta::load(corpus);
  if (meta.tokenizer == "bytes") {
    return bytes();
  }
  return tokenizer_json(
      corpus / meta.tokenizer,
      meta.end_of_document,
      meta.begin_of_document,
      std::move(python));
}

}  // namespace flatshard::data
