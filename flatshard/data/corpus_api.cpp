#include "flatshard/data/corpus_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/corpus_summary.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/data/utf8.h"

namespace flatshard::data {
namespace {

struct OpenCorpus {
  OpenCorpus(const CorpusOptions& options, CorpusMeta corpus)
      : writer(options, std::move(corpus)) {}

  CorpusWriter writer;
  // Result of commit.
  std::string meta;
  std::string summary;
};

std::string& last_text() {
  static thread_local std::string text;
  return text;
}

std::string& last_error() {
  static thread_local std::string text;
  return text;
}

/// Returns the result of a function, or 0 when it throws.
template <class F>
auto guarded(F&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error& error) {
    last_error() = error.what();
  } catch (const std::exception& error) {
    last_error() = fmt::format("internal error: {}", error.what());
  }
  return {};
}

/// Calls append(tokens, mask) with parts of a document.
template <class Word>
void widen(
    const void* words,
    std::int64_t count,
    const std::uint8_t* mask,
    CorpusWriter& writer,
    bool to_validation) {
  constexpr std::int64_t kMost = std::int64_t{1} << 16;
  std::vector<std::uint32_t> tokens(
      static_cast<std::size_t>(std::min(count, kMost)));
  for (std::int64_t at = 0; at < count; at += kMost) {
    const auto part = std::span(tokens).first(
        static_cast<std::size_t>(std::min(count - at, kMost)));
    for (std::size_t i = 0; i < part.size(); ++i) {
      Word word;
      std::memcpy(
          &word,
          static_cast<const Word*>(words) + at + static_cast<std::int64_t>(i),
          sizeof(Word));
      part[i] = static_cast<std::uint32_t>(word);
    }
    writer.append(
        to_validation,
        part,
        mask == nullptr ? std::span<const std::uint8_t>()
                        : std::span(mask + at, part.size()));
  }
}

void add(
    CorpusWriter& writer,
    bool to_validation,
    const void* tokens,
    int nbytes,
    std::int64_t count,
    const std::uint8_t* mask,
    bool trains_end) {
  writer.begin_document(to_validation);
  switch (nbytes) {
    case 1:
      widen<std::uint8_t>(tokens, count, mask, writer, to_validation);
      break;
    case 2:
      widen<std::uint16_t>(tokens, count, mask, writer, to_validation);
      break;
    case 4:
      widen<std::uint32_t>(tokens, count, mask, writer, to_validation);
      break;
    case 8:
      widen<std::uint64_t>(tokens, count, mask, writer, to_validation);
      break;
    default:
      FLATSHARD_THROW(usage, "expected 1, 2, 4 or 8 bytes, got {}", nbytes);
  }
  writer.end_document(to_validation, trains_end);
}

std::unique_ptr<OpenCorpus>
open(const char* output, const char* tokenizer, const char* settings) {
  const auto json = nlohmann::json::parse(settings);
  CorpusMeta meta;
  meta.vocab_size = json.at("vocab_size");
  meta.end_of_document = json.at("end_of_document");
  if (!json.at("begin_of_document").is_null()) {
    meta.begin_of_document = json.at("begin_of_document").get<std::int64_t>();
  }
  meta.tokenizer = json.at("tokenizer");
  meta.input_hash = json.at("input_hash");
  const CorpusOptions options{
      .output = output,
      .tokenizer = tokenizer,
      .has_validation = json.at("has_validation"),
      .masked = json.at("masked"),
      .shard_tokens = json.at("shard_tokens"),
      .force = json.at("force")};
  return std::make_unique<OpenCorpus>(options, std::move(meta));
}

}  // namespace
}  // namespace flatshard::data

extern "C" {

const char* flatshard_error() {
  return flatshard::data::last_error().c_str();
}

std::uint64_t
flatshard_mix(std::uint64_t hash, const void* bytes, std::int64_t nbytes) {
  return flatshard::mix_keys(
      hash,
      flatshard::stable_hash(
          {static_cast<const char*>(bytes), static_cast<std::size_t>(nbytes)}));
}

double flatshard_draw(const char* name, std::int64_t nbytes) {
  return flatshard::data::document_draw(
      {name, static_cast<std::size_t>(nbytes)});
}

const char* flatshard_find_tokenizer(const char* path) {
  return flatshard::data::guarded([&]() -> const char* {
    auto& text = flatshard::data::last_text();
    text = flatshard::data::find_tokenizer(path).string();
    return text.c_str();
  });
}

const char* flatshard_printable(const char* text, std::int64_t nbytes) {
  auto& found = flatshard::data::last_text();
  found = flatshard::data::printable(
      {text, static_cast<std::size_t>(nbytes)},
      /*keep_lines=*/false);
  return found.c_str();
}

int flatshard_check_output(const char* output, int force) {
  return flatshard::data::guarded([&] {
    flatshard::data::StagedFolder::check(output, force != 0);
    return 1;
  });
}

void* flatshard_corpus_open(
    const char* output,
    const char* tokenizer,
    const char* settings) {
  return flatshard::data::guarded([&]() -> void* {
    return flatshard::data::open(output, tokenizer, settings).release();
  });
}

int flatshard_corpus_add(
    void* corpus,
    int to_validation,
    const void* tokens,
    int nbytes,
    std::int64_t count,
    const std::uint8_t* mask,
    int trains_end) {
  return flatshard::data::guarded([&] {
    flatshard::data::add(
        static_cast<flatshard::data::OpenCorpus*>(corpus)->writer,
        to_validation != 0,
        tokens,
        nbytes,
        count,
        mask,
        trains_end != 0);
    return 1;
  });
}

const char* flatshard_corpus_commit(void* corpus) {
  return flatshard::data::guarded([&]() -> const char* {
    auto* open = static_cast<flatshard::data::OpenCorpus*>(corpus);
    const flatshard::data::CorpusMeta& meta = open->writer.commit();
    open->meta = meta.to_json();
    open->summary = flatshard::data::summary(meta);
    return open->meta.c_str();
  });
}

const char* flatshard_corpus_summary(void* corpus) {
  return static_cast<flatshard::data::OpenCorpus*>(corpus)->summary.c_str();
}

void flatshard_corpus_close(void* corpus) {
  delete static_cast<flatshard::data::OpenCorpus*>(corpus);
}
}
