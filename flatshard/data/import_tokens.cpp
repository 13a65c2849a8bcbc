#include "flatshard/data/import_tokens.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/corpus_documents.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/data/python_tokenizer.h"
#include "flatshard/data/token_files/token_file.h"

namespace flatshard::data {
namespace {

constexpr std::int64_t kScannedTokens = std::int64_t{1} << 18;

/// The properties of the vocabulary that an import needs.
struct Vocabulary {
  std::int64_t size = 0;
  std::int64_t end_of_document = 0;
};

/// Returns the documents of a token file, without their end-of-document tokens.
std::vector<std::pair<std::int64_t, std::int64_t>> find_documents(
    const TokenFile& file,
    const Vocabulary& vocabulary,
    std::uint64_t& hash) {
  const auto end = static_cast<std::uint32_t>(vocabulary.end_of_document);
  const bool has_index = !file.documents().empty();
  std::vector<std::pair<std::int64_t, std::int64_t>> found;
  std::vector<std::uint32_t> tokens;
  std::int64_t begin = 0;
  std::size_t next = 1;  // of the index
  const auto close = [&](std::int64_t at) {
    if (at > begin) {
      found.emplace_back(begin, at);
    }
  };
  bool last_is_end = false;
  while (has_index && file.documents()[next] == 0) {
    ++next;  // empty documents at the beginning
  }
  for (std::int64_t at = 0; at < file.num_tokens();) {
    const std::int64_t stop = std::min<std::int64_t>(
        {at + kScannedTokens,
         file.num_tokens(),
         has_index ? file.documents()[next] : file.num_tokens()});
    tokens.resize(static_cast<std::size_t>(stop - at));
    file.read(at, tokens, vocabulary.size);
    hash = mix_keys(
        hash,
        stable_hash(
            {reinterpret_cast<const char*>(tokens.data()),
             tokens.size() * sizeof(tokens[0])}));
    for (std::size_t i = 0; !has_index && i < tokens.size(); ++i) {
      if (tokens[i] == end) {
        close(at + static_cast<std::int64_t>(i));
        begin = at + static_cast<std::int64_t>(i) + 1;
      }
    }
    last_is_end = tokens.back() == end;
    at = stop;
    while (has_index && next < file.documents().size() &&
           file.documents()[next] == at) {
      close(last_is_end ? at - 1 : at);
      begin = at;
      ++next;
    }
  }
  if (!has_index) {
    close(file.num_tokens());
  }
  return found;
}

class TokenFileDocuments : public DocumentStream {
 public:
  explicit TokenFileDocuments(Vocabulary vocabulary)
      : vocabulary_(vocabulary) {}

  /// @return how many documents it has.
  std::int64_t add(TokenFile file, std::uint64_t& hash) {
    auto documents = find_documents(file, vocabulary_, hash);
    for (const auto& [begin, end] : documents) {
      documents_.push_back({files_.size(), begin, end});
    }
    files_.push_back(std::move(file));
    return static_cast<std::int64_t>(documents.size());
  }

  std::int64_t vocab_size() const override { return vocabulary_.size; }
  std::int64_t end_of_document() const override {
    return vocabulary_.end_of_document;
  }
  std::int64_t next_document() override {
    current_ = documents_.at(next_++);
    return current_.end - current_.begin;
  }
  void read(std::span<std::uint32_t> out) override {
    files_[current_.file].read(current_.begin, out, vocabulary_.size);
    current_.begin += static_cast<std::int64_t>(out.size());
  }

 private:
  struct Document {
    std::size_t file = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };

  Vocabulary vocabulary_;
  std::vector<TokenFile> files_;
  std::vector<Document> documents_;
  std::size_t next_ = 0;
  Document current_;
};

std::int64_t parse_id(const std::string& text) {
  std::int64_t id = -1;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, id);
  return parsed.ec == std::errc() && parsed.ptr == end ? id : -1;
}

Vocabulary find_vocabulary(
    const ImportOptions& options,
    const std::filesystem::path& tokenizer) {
  Vocabulary found{
      .size = options.vocab_size,
      .end_of_document = parse_id(options.end_of_document)};
  if (!tokenizer.empty()) {
    const bool by_text = found.end_of_document < 0;
    const PythonChild child(
        {.python = options.python,
         .tokenizer = tokenizer,
         .end_of_document = by_text ? options.end_of_document : "",
         .begin_of_document = "none"},
        by_text ? "tokens" : "encode",
        "");
    FLATSHARD_CHECK(
        found.size == 0 || found.size >= child.vocab_size(),
        config,
        "--vocab-size: expected at least the {} of the tokenizer, got {}",
        child.vocab_size(),
        found.size);
    found.size = std::max(found.size, child.vocab_size());
    if (by_text) {
      found.end_of_document = child.end_of_document();
    }
  }
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 32;
  FLATSHARD_CHECK(
      found.size > 0 && found.size <= kMostTokens,
      config,
      "--tokenizer: expected the tokenizer that the tokens are of, or none "
      "with --vocab-size in [1, 2^32] and --end-of-document ID; got '{}' and "
      "{}",
      options.tokenizer,
      found.size);
  FLATSHARD_CHECK(
      found.end_of_document >= 0 && found.end_of_document < found.size,
      config,
      "--end-of-document: expected the id of a token below the vocabulary's "
      "{}, got '{}'",
      found.size,
      options.end_of_document);
  return found;
}

}  // namespace

CorpusMeta import_tokens(
    const ImportOptions& options,
    std::vector<std::string>* lines) {
  FLATSHARD_CHECK(
      options.validation_fraction >= 0 && options.validation_fraction < 1,
      config,
      "--validation-fraction: expected a number in [0, 1), got {}",
      options.validation_fraction);
  StagedFolder::check(options.output, options.force);
  std::filesystem::path tokenizer;
  if (!options.tokenizer.empty() && options.tokenizer != "none") {
    tokenizer = find_tokenizer(options.tokenizer);
  }
  const Vocabulary vocabulary = find_vocabulary(options, tokenizer);
  FoundFiles found = find_input_files(options.inputs);
  std::vector<InputFile>& files = found.files;
  const std::size_t num_train = files.size();
  if (!options.validation.empty()) {
    FoundFiles more = find_input_files(options.validation);
    std::ranges::move(more.files, std::back_inserter(files));
    std::ranges::move(more.skipped, std::back_inserter(found.skipped));
  }
  // A glob over Megatron's pairs also finds the index.
  const auto is_index = [](const InputFile& file) {
    return file.listed && file.path.extension() == ".idx";
  };
  TokenFileDocuments documents(vocabulary);
  std::uint64_t hash = files.size();
  std::vector<bool> to_validation;
  for (std::size_t i = 0; i < files.size(); ++i) {
    InputFile& file = files[i];
    file.kind = InputKind::json;  // documents by file and number
    file.num_documents = 0;
    if (is_index(file)) {
      continue;
    }
    TokenFile tokens(file.path, options.dtype);
    const std::string what = fmt::format(
        "{}: {}, {} tokens",
        file.name,
        tokens.what(),
        tokens.num_tokens());
    file.num_documents = documents.add(std::move(tokens), hash);
    to_validation.resize(
        to_validation.size() + static_cast<std::size_t>(file.num_documents),
        i >= num_train);
    if (lines != nullptr) {
      lines->push_back(
          fmt::format("{}, {} documents", what, file.num_documents));
    }
  }
  FLATSHARD_CHECK(
      std::find(to_validation.begin(), to_validation.end(), false) !=
          to_validation.end(),
      format,
      "--input: expected documents, got none in {} files",
      num_train);
  const bool is_given = !options.validation.empty();
  FLATSHARD_CHECK(
      !is_given ||
          std::find(to_validation.begin(), to_validation.end(), true) !=
              to_validation.end(),
      format,
      "--validation: expected documents, got none in {} files",
      files.size() - num_train);
  if (lines != nullptr) {
    for (const SkippedFile& file : found.skipped) {
      lines->push_back(fmt::format("{}: skipped, {}", file.name, file.reason));
    }
  }
  CorpusMeta meta;
  meta.vocab_size = vocabulary.size;
  meta.end_of_document = vocabulary.end_of_document;
  meta.input_hash = fmt::format("{:016x}", hash);
  meta.tokenizer = tokenizer.empty() ? kNoTokenizer : kTokenizerFile;
  const double fraction = is_given ? 1 : options.validation_fraction;
  write_corpus(
      documents,
      files,
      is_given ? to_validation : choose_validation(files, fraction),
      {.output = options.output,
       .tokenizer = tokenizer,
       .validation_fraction = fraction,
       .shard_tokens = options.shard_tokens,
       .force = options.force,
       .progress = options.progress},
      meta);
  return meta;
}

}  // namespace flatshard::data
