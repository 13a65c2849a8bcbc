#include "flatshard/data/packing/packed_documents.h"

#include <algorithm>

#include "flatshard/core/error.h"

namespace flatshard::data {
namespace {

constexpr std::int64_t kWindowDocuments = 2048;

}  // namespace

PackedDocuments::PackedDocuments(
    std::shared_ptr<const Corpus> corpus,
    const PackingOptions& options)
    : corpus_(std::move(corpus)), options_(options) {
  FLATSHARD_CHECK(
      options.seq_len >= 1 && options.max_documents >= 1,
      config,
      "expected training.seq_len and data.documents_per_sample of at least 1, "
      "got {} and {}",
      options.seq_len,
      options.max_documents);
  report_ = {
      .num_documents = corpus_->num_documents(),
      .seq_len = options.seq_len};
  for (std::int64_t i = 0; i * kWindowDocuments < corpus_->num_documents();
       ++i) {
    const PackedWindow packed = window(i);
    first_sequence_.push_back(first_sequence_.back() + packed.num_sequences());
    report_.num_cut += packed.num_cut();
    report_.num_pairs += packed.num_pairs();
  }
  report_.num_sequences = first_sequence_.back();
}

PackedWindow PackedDocuments::window(std::int64_t number) const {
  const std::int64_t first = number * kWindowDocuments;
  const std::int64_t count =
      std::min(kWindowDocuments, corpus_->num_documents() - first);
  std::vector<std::int64_t> begins(static_cast<std::size_t>(count + 1));
  corpus_->document_begins(first, begins);
  return PackedWindow(begins, options_);
}

std::int64_t PackedDocuments::num_sequences(std::int64_t seq_len) const {
  FLATSHARD_CHECK(
      seq_len == options_.seq_len,
      usage,
      "expected the seq_len that documents were packed for, {}, got {}",
      options_.seq_len,
      seq_len);
  return report_.num_sequences;
}

std::vector<Piece> PackedDocuments::pieces(
    std::int64_t index,
    std::int64_t /*seq_len*/) const {
  const auto after = std::ranges::upper_bound(first_sequence_, index);
  const std::int64_t number = after - first_sequence_.begin() - 1;
  return window(number).pieces(index - *std::prev(after));
}

void PackedDocuments::read(std::int64_t index, const Sequence& out) const {
  std::size_t at = 0;
  for (const Piece& piece : pieces(index, options_.seq_len)) {
    const auto length = static_cast<std::size_t>(piece.length);
    read_run(
        *corpus_,
        piece.first,
        {out.tokens.subspan(at, length), out.targets.subspan(at, length)});
    if (out.documents != nullptr) {
      out.documents->lengths.push_back(piece.length);
    }
    at += length;
  }
  const std::size_t padding = out.tokens.size() - at;
  std::ranges::fill(out.tokens.subspan(at), corpus_->meta().end_of_document);
  std::ranges::fill(out.targets.subspan(at), kIgnoredTarget);
  if (out.documents != nullptr) {
    out.documents->padding.push_back(static_cast<std::int64_t>(padding));
    if (padding > 0) {
      out.documents->lengths.push_back(static_cast<std::int64_t>(padding));
    }
  }
}

std::int64_t PackedDocuments::num_untrained(std::int64_t /*seq_len*/) const {
  std::int64_t count = 0;
  if (!corpus_->has_mask()) {
    return count;
  }
  const auto num_windows =
      static_cast<std::int64_t>(first_sequence_.size()) - 1;
  for (std::int64_t number = 0; number < num_windows; ++number) {
    const PackedWindow packed = window(number);
    for (std::int64_t i = 0; i < packed.num_sequences(); ++i) {
      const bool trains =
          std::ranges::any_of(packed.pieces(i), [&](const Piece& piece) {
            return has_trained_target(*corpus_, piece);
          });
      count += trains ? 0 : 1;
    }
  }
  return count;
}

std::string PackedDocuments::describe() const {
  return fmt::format(
      "split '{}' of {} documents",
      corpus_->split(),
      corpus_->num_documents());
}

bool PackedDocuments::tokens_are_bytes() const {
  return corpus_->meta().tokenizer == "bytes";
}

}  // namespace flatshard::data
