#include "flatshard/train/tools/document_losses.h"

#include "flatshard/core/error.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <utility>

namespace flatshard {

DocumentLosses::DocumentLosses(std::shared_ptr<const data::Corpus> corpus)
    : corpus_(std::move(corpus)) {
  const auto count = static_cast<std::size_t>(corpus_->num_documents());
  begins_.resize(count + 1);
  corpus_->document_begins(0, begins_);
  sums_.resize(count);
  runs_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    sums_[i].index = static_cast<std::int64_t>(i);
  }
}

void DocumentLosses::add_token(std::int64_t token, double nats) {
  if (token < begins_[last_] || token >= begins_[last_ + 1]) {
    const auto after = std::ranges::upper_bound(begins_, token);
    last_ = static_cast<std::size_t>(after - begins_.begin()) - 1;
  }
  sums_[last_].tokens += 1;
  sums_[last_].nats += nats;
  const std::int64_t at = token - begins_[last_];
  std::vector<Run>& runs = runs_[last_];
  if (runs.empty() || runs.back().end != at) {
    runs.push_back({at, at});
  }
  runs.back().end = at + 1;
}

void DocumentLosses::add(
    const std::vector<data::Piece>& pieces,
    std::span<const float> losses,
    std::span<const std::int64_t> targets) {
  std::size_t at = 0;
  for (const data::Piece& piece : pieces) {
    for (std::int64_t i = 0; i < piece.length; ++i, ++at) {
      if (targets[at] >= 0) {
        add_token(piece.first + i + 1, static_cast<double>(losses[at]));
      }
    }
  }
}

void DocumentLosses::count_bytes(const data::TextCodec& codec) {
  constexpr std::size_t kMostTokens = std::size_t{4} << 20;
  std::size_t first = 0;  // document of the first list
  std::vector<std::vector<std::int64_t>> lists;
  std::size_t num_tokens = 0;
  const auto count_up_to = [&](std::size_t end) {
    const auto texts = codec.decode_all(lists);
    std::size_t at = 0;
    for (std::size_t i = first; i < end; ++i) {
      std::int64_t bytes = 0;
      for (std::size_t r = 0; r < runs_[i].size(); ++r, at += 2) {
        // The text of two pieces is not always the text of one and then the
        // other. So a run's text is its addition to the text before it.
        bytes += std::max<std::int64_t>(
            0,
            static_cast<std::int64_t>(texts[at + 1].size()) -
                static_cast<std::int64_t>(texts[at].size()));
      }
      sums_[i].bytes = bytes;
    }
    first = end;
    lists.clear();
    num_tokens = 0;
  };
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    for (const Run& run : runs_[i]) {
      for (const std::int64_t length : {run.begin, run.end}) {
        lists.emplace_back(static_cast<std::size_t>(length));
        corpus_->read(begins_[i], lists.back());
        num_tokens += lists.back().size();
      }
    }
    if (num_tokens >= kMostTokens || i + 1 == sums_.size()) {
      count_up_to(i + 1);
    }
  }
}

std::vector<DocumentLoss> DocumentLosses::documents() const {
  std::vector<DocumentLoss> found;
  std::ranges::copy_if(
      sums_,
      std::back_inserter(found),
      [](const DocumentLoss& document) { return document.tokens > 0; });
  return found;
}

void write_document_losses(
    const std::filesystem::path& path,
    const std::vector<DocumentLoss>& documents) {
  std::ofstream file(path);
  for (const DocumentLoss& document : documents) {
    nlohmann::ordered_json row{
        {"index", document.index},
        {"tokens", document.tokens},
        {"loss", document.loss()}};
    if (document.bytes) {
      row["bytes"] = *document.bytes;
    }
    file << row.dump() << '\n';
  }
  file.close();
  FLATSHARD_CHECK(
      file.good(),
      io,
      "--per-document: cannot write {}",
      path.string());
}

}  // namespace flatshard
