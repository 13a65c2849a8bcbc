#include "flatshard/train/tools/export_tokenizer.h"

#include <optional>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/core/log.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/train/tools/stored_model.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizerConfig = "tokenizer_config.json";

std::string text_of(const fs::path& path) {
  const MappedFile file(path);
  return std::string(file.text());
}

/// The dataset that the model was trained on.
struct TrainedOn {
  fs::path folder;
  data::CorpusMeta meta;

  /// Returns its tokenizer.json; byte tokens have an equal one.
  std::string tokenizer_json() const {
    return meta.tokenizer == "bytes" ? data::byte_tokenizer_json()
                                     : text_of(folder / meta.tokenizer);
  }
};

std::optional<TrainedOn> trained_on(const std::string& path) {
  if (path.empty()) {
    return std::nullopt;
  }
  try {
    TrainedOn corpus{path, data::CorpusMeta::load(path)};
    if (corpus.meta.tokenizer == data::kNoTokenizer) {
      return std::nullopt;
    }
    return corpus;
  } catch (const Error& error) {
    // Weights without a tokenizer are better than none.
    log_warning("no tokenizer of data.train: {}", error.message());
    return std::nullopt;
  }
}

bool fits(const fs::path& folder, const TrainedOn& corpus) {
  const fs::path theirs = folder / data::kTokenizerFile;
  std::error_code error;
  if (!fs::exists(theirs, error)) {
    // Older kinds of files only show that bytes have no tokenizer.
    return corpus.meta.tokenizer != "bytes";
  }
  return data::same_tokens(
      text_of(theirs),
      corpus.tokenizer_json(),
      theirs.string());
}

models::SpecialTokens write_of_corpus(
    const TrainedOn& corpus,
    const models::ModelConfig& model,
    const fs::path& to) {
  const data::CorpusMeta& meta = corpus.meta;
  // A document starts after the end of the one before it.
  const std::int64_t first =
      meta.begin_of_document.value_or(meta.end_of_document);
  if (meta.tokenizer != "bytes") {
    data::copy_tokenizer_files(corpus.folder, to);
  }
  std::string json = corpus.tokenizer_json();
  const std::string origin = (corpus.folder / meta.tokenizer).string();
  if (meta.begin_of_document) {
    json = data::with_first_token(json, first, origin);
  }
  write_file_atomic(to / data::kTokenizerFile, json);
  std::error_code error;
  if (!fs::exists(to / kTokenizerConfig, error)) {
    write_file_atomic(
        to / kTokenizerConfig,
        data::tokenizer_config_json(
            data::token_text(json, first, origin),
            data::token_text(json, meta.end_of_document, origin),
            model.max_seq_len));
  }
  return {
      .bos = first,
      .eos = {meta.end_of_document},
      .pad = meta.end_of_document};
}

}  // namespace

models::SpecialTokens export_tokenizer(
    const std::string& corpus_folder,
    const std::filesystem::path& started_from,
    const models::ModelConfig& model,
    const std::filesystem::path& to) {
  const auto corpus = trained_on(corpus_folder);
  const bool has_own =
      !started_from.empty() && !data::tokenizer_files(started_from).empty();
  const bool takes_own = has_own && (!corpus || fits(started_from, *corpus));
  models::SpecialTokens tokens;
  std::error_code error;
  if (takes_own) {
    data::copy_tokenizer_files(started_from, to);
    tokens = models::special_tokens_from_hf_json(started_from / "config.json");
    if (fs::exists(started_from / kGenerationConfig, error)) {
      write_file_atomic(
          to / kGenerationConfig,
          text_of(started_from / kGenerationConfig));
    }
  } else if (corpus) {
    if (has_own) {
      log_warning(
          "the tokenizer of model.init_from = {} differs from the tokenizer of "
          "data.train = {}; the export contains the latter, because the model "
          "was trained with it",
          started_from.string(),
          corpus->folder.string());
    }
    tokens = write_of_corpus(*corpus, model, to);
  } else {
    log_warning(
        "the export has no tokenizer: neither model.init_from nor data.train "
        "has one");
  }
  if (!fs::exists(to / kGenerationConfig, error)) {
    write_file_atomic(
        to / kGenerationConfig,
        models::to_generation_json(tokens));
  }
  return tokens;
}

}  // namespace flatshard
