#include "flatshard/data/show_sample.h"

#include <algorithm>
#include <span>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/data/packing/packed_documents.h"
#include "flatshard/data/text_codec.h"
#include "flatshard/data/token_source.h"
#include "flatshard/data/utf8.h"

namespace flatshard::data {
namespace {

/// Consecutive tokens of a document that are all trained, or none is.
struct Run {
  bool trained = false;
  std::size_t end = 0;  ///< in the document's tokens
};

struct ShownDocument {
  std::vector<std::int64_t> tokens;
  std::vector<Run> runs;
  std::int64_t num_trained = 0;
  bool is_padding = false;

  void add(std::int64_t token, bool trained) {
    tokens.push_back(token);
    num_trained += trained ? 1 : 0;
    if (runs.empty() || runs.back().trained != trained) {
      runs.push_back({.trained = trained});
    }
    runs.back().end = tokens.size();
  }
};

/// Returns the documents of a sample. A token is trained if it is the target of
/// the token before. The last target is shown too, unless it starts another
/// document.
std::vector<ShownDocument> documents_of(
    const TokenSource& source,
    const ShowOptions& options,
    std::int64_t end_of_document) {
  const auto seq_len = static_cast<std::size_t>(options.packing.seq_len);
  std::vector<std::int64_t> tokens(seq_len);
  std::vector<std::int64_t> targets(seq_len);
  DocumentLengths found;
  source.read(options.sample, {tokens, targets, &found});
  std::vector<ShownDocument> documents;
  std::size_t at = 0;
  for (const std::int64_t length : found.lengths) {
    const auto end = at + static_cast<std::size_t>(length);
    documents.emplace_back();
    for (std::size_t i = at; i < end; ++i) {
      if (options.packing.packing == Packing::stream && i > at &&
          tokens[i - 1] == end_of_document) {
        documents.emplace_back();
      }
      const bool trained = i > at && targets[i - 1] != kIgnoredTarget;
      documents.back().add(tokens[i], trained);
    }
    if (targets[end - 1] != kIgnoredTarget) {
      documents.back().add(targets[end - 1], true);
    }
    at = end;
  }
  documents.back().is_padding = found.padding.front() > 0;
  return documents;
}

/// Returns the text of each run. Tokens are decoded with all before them, since
/// the text of two runs is not always the text of one and then the other.
std::vector<std::vector<std::string>> texts_of(
    const TextCodec& codec,
    const std::vector<ShownDocument>& documents) {
  std::vector<std::vector<std::int64_t>> lists;
  for (const ShownDocument& document : documents) {
    for (const Run& run : document.runs) {
      const auto end =
          document.tokens.begin() + static_cast<std::ptrdiff_t>(run.end);
      lists.emplace_back(document.tokens.begin(), end);
    }
  }
  const auto decoded = codec.decode_all(lists, /*keep_special=*/true);
  std::vector<std::vector<std::string>> texts;
  std::size_t at = 0;
  for (const ShownDocument& document : documents) {
    std::string before;
    auto& of_document = texts.emplace_back();
    for (std::size_t i = 0; i < document.runs.size(); ++i, ++at) {
      const auto same = std::ranges::mismatch(decoded[at], before);
      of_document.emplace_back(same.in1, decoded[at].end());
      before = decoded[at];
    }
  }
  return texts;
}

std::string highlighted(const std::string& text, bool trained, bool colors) {
  const std::string shown = printable(text, /*keep_lines=*/true);
  if (!trained) {
    return shown;
  }
  return colors ? "\033[1;32m" + shown + "\033[0m" : "[[" + shown + "]]";
}

}  // namespace

std::string show_sample(
    const std::filesystem::path& folder,
    const ShowOptions& given) {
  ShowOptions options = given;
  std::int64_t& max_documents = options.packing.max_documents;
  if (max_documents == 0) {
    max_documents = default_max_documents(options.packing.seq_len);
  }
  FLATSHARD_CHECK(
      options.packing.seq_len >= 1,
      config,
      "--seq-len: expected at least 1, got {}",
      options.packing.seq_len);
  const auto source = open_token_sources(
                          {{.path = folder.string()}},
                          options.split,
                          /*seed=*/0,
                          /*vocab_size=*/0,
                          options.packing)
                          .front()
                          .source;
  const std::int64_t count = source->num_sequences(options.packing.seq_len);
  FLATSHARD_CHECK(
      options.sample >= 0 && options.sample < count,
      config,
      "--sample: expected a sample in [0, {}) of --seq-len {}, got {}",
      count,
      options.packing.seq_len,
      options.sample);
  const CorpusMeta meta = CorpusMeta::load(folder);
  const auto documents = documents_of(*source, options, meta.end_of_document);
  const auto texts =
      texts_of(*TextCodec::open(folder, {.python = options.python}), documents);
  std::string out = fmt::format("sample {} of {}\n", options.sample, count);
  for (std::size_t i = 0; i < documents.size(); ++i) {
    const ShownDocument& document = documents[i];
    if (document.is_padding) {
      out += fmt::format("--- {} tokens of padding\n", document.tokens.size());
      continue;
    }
    out += fmt::format(
        "--- document {}: {} tokens, {} of them trained\n",
        i + 1,
        document.tokens.size(),
        document.num_trained);
    for (std::size_t r = 0; r < document.runs.size(); ++r) {
      out += highlighted(texts[i][r], document.runs[r].trained, options.colors);
    }
    out += "\n";
  }
  return out;
}

}  // namespace flatshard::data
