#include "flatshard/data/prepare.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/data/byte_documents.h"
#include "flatshard/data/corpus_documents.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/data/input_files.h"
#include "flatshard/data/python_documents.h"
#include "flatshard/data/survey.h"

namespace flatshard::data {
namespace {

void warn_of(const Survey& survey, bool of_skipped) {
  if (of_skipped && !survey.found.skipped.empty()) {
    log_warning(
        "skipped {} of the inputs: {}",
        survey.found.skipped.size(),
        survey.describe_skipped());
  }
  if (survey.num_replaced > 0) {
    log_warning(
        "{} bytes that are not UTF-8 became U+FFFD",
        survey.num_replaced);
  }
}

/// Checks the options of chats, and those that chats do not go with.
void check_chat(const PrepareOptions& options, InputFormat format) {
  if (!options.chat) {
    FLATSHARD_CHECK(
        options.train_on.empty(),
        config,
        "--train-on belongs to --chat");
    FLATSHARD_CHECK(
        options.chat_template_kwargs.empty(),
        config,
        "--chat-template-kwargs belongs to --chat");
    return;
  }
  constexpr std::array<std::string_view, 4> kTrainOn{
      "",
      "assistant",
      "all",
      "last"};
  FLATSHARD_CHECK(
      std::ranges::find(kTrainOn, options.train_on) != kTrainOn.end(),
      config,
      "--train-on: expected assistant, all or last, got {}",
      options.train_on);
  FLATSHARD_CHECK(
      options.tokenizer != "bytes",
      config,
      "--chat: expected --tokenizer with the folder of a Hugging Face "
      "tokenizer, whose chat template is used; byte tokens have none");
  FLATSHARD_CHECK(
      format == InputFormat::automatic || format == InputFormat::json,
      config,
      "--chat takes JSON rows: expected --format auto or json, got {}",
      options.format);
  for (const auto& [name, is_set] :
       {std::pair{"--text-field", !options.text_field.empty()},
        std::pair{"--begin-of-document", !options.begin_of_document.empty()},
        std::pair{"--parse-special", options.parse_special}}) {
    FLATSHARD_CHECK(
        !is_set,
        config,
        "{} does not go with --chat: the chat template decides",
        name);
  }
}

std::unique_ptr<DocumentStream> open_stream(
    const PrepareOptions& options,
    const std::vector<InputFile>& files,
    const PythonTokenizerOptions& python,
    const TextOptions& texts) {
  if (options.tokenizer != "bytes") {
    return std::make_unique<PythonDocuments>(python, files, texts);
  }
  FLATSHARD_CHECK(
      !options.parse_special,
      config,
      "--parse-special belongs to a tokenizer.json; byte tokens have no "
      "control tokens that a text could spell");
  for (const auto& [name, value] :
       {std::pair{"--end-of-document", options.end_of_document},
        std::pair{"--begin-of-document", options.begin_of_document}}) {
    FLATSHARD_CHECK(
        value.empty(),
        config,
        "{} belongs to a tokenizer.json; byte tokens end a document with token "
        "{} and begin it with none",
        name,
        kByteEndOfDocument);
  }
  return std::make_unique<ByteDocuments>(files, texts);
}

}  // namespace

CorpusMeta prepare_corpus(const PrepareOptions& options, Survey* report) {
  FLATSHARD_CHECK(
      options.validation_fraction >= 0 && options.validation_fraction < 1,
      config,
      "--validation-fraction: expected a number in [0, 1), got {}",
      options.validation_fraction);
  const bool is_bytes = options.tokenizer == "bytes";
  const InputFormat format = parse_input_format(options.format);
  FLATSHARD_CHECK(
      format != InputFormat::bytes || is_bytes,
      config,
      "--format bytes: expected --tokenizer bytes, got {}; a tokenizer.json "
      "takes text",
      options.tokenizer);
  check_chat(options, format);
  PythonTokenizerOptions python{
      .python = options.python,
      .end_of_document = options.end_of_document,
      .begin_of_document = options.begin_of_document,
      .parse_special = options.parse_special,
      .train_on = options.train_on.empty() ? "assistant" : options.train_on,
      .chat_template_kwargs = options.chat_template_kwargs};
  if (!is_bytes) {
    python.tokenizer = find_tokenizer(options.tokenizer);
  }
  const TextOptions texts{
      .text_field = options.text_field.empty() ? "text" : options.text_field,
      .replace_invalid = format == InputFormat::text,
      .python = options.python,
      .whole_rows = options.chat};
  StagedFolder::check(options.output, options.force);
  const Survey survey = survey_inputs(options.inputs, format, texts);
  const std::vector<InputFile>& files = survey.found.files;
  FLATSHARD_CHECK(
      options.text_field.empty() || std::ranges::any_of(
                                        files,
                                        [](const InputFile& file) {
                                          return file.kind == InputKind::json ||
                                                 file.kind ==
                                                     InputKind::parquet;
                                        }),
      config,
      "--text-field belongs to files of rows (JSON and Parquet); --input has "
      "none");
  warn_of(survey, /*of_skipped=*/report == nullptr);
  const auto stream = open_stream(options, files, python, texts);
  CorpusMeta meta;
  meta.vocab_size = stream->vocab_size();
  meta.end_of_document = stream->end_of_document();
  meta.begin_of_document = stream->begin_of_document();
  meta.input_hash = survey.hash;
  meta.tokenizer = is_bytes ? "bytes" : kTokenizerFile;
  write_corpus(
      *stream,
      files,
      choose_validation(files, options.validation_fraction),
      {.output = options.output,
       .tokenizer = python.tokenizer,
       .validation_fraction = options.validation_fraction,
       .shard_tokens = options.shard_tokens,
       .force = options.force,
       .progress = options.progress},
      meta);
  if (report != nullptr) {
    *report = survey;
  }
  return meta;
}

}  // namespace flatshard::data
