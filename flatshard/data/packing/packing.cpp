#include "flatshard/data/packing/packing.h"

#include <algorithm>
#include <functional>
#include <set>
#include <tuple>
#include <utility>

#include "flatshard/core/error.h"

namespace flatshard::data {
namespace {

// Attention over documents costs a little for each place of the list of
// lengths, used or not.
constexpr std::int64_t kMinDocuments = 16;
constexpr std::int64_t kTokensPerDocument = 64;

}  // namespace

std::int64_t default_max_documents(std::int64_t seq_len) {
  return std::max(kMinDocuments, seq_len / kTokensPerDocument);
}

PackedWindow::PackedWindow(
    std::span<const std::int64_t> begins,
    const PackingOptions& options)
    : seq_len_(options.seq_len) {
  std::vector<Piece> rests;
  for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
    const std::int64_t num_pairs = begins[i + 1] - begins[i] - 1;
    if (num_pairs <= 0) {
      continue;
    }
    num_pairs_ += num_pairs;
    num_cut_ += num_pairs > seq_len_ ? 1 : 0;
    const std::int64_t whole = num_pairs / seq_len_;
    if (whole > 0) {
      longs_.push_back({begins[i], num_whole_});
      num_whole_ += whole;
    }
    if (num_pairs % seq_len_ > 0) {
      rests.push_back({begins[i] + whole * seq_len_, num_pairs % seq_len_});
    }
  }
  fill(std::move(rests), options);
}

void PackedWindow::fill(
    std::vector<Piece> rests,
    const PackingOptions& options) {
  std::ranges::stable_sort(rests, std::greater<>(), &Piece::length);
  // Sequences that can take more, by their room.
  std::set<std::pair<std::int64_t, std::size_t>> open;
  for (const Piece& piece : rests) {
    const auto best = open.lower_bound({piece.length, 0});
    std::int64_t room = seq_len_;
    std::size_t sequence = filled_.size();
    if (best != open.end()) {
      std::tie(room, sequence) = *best;
      open.erase(best);
    } else {
      filled_.emplace_back();
    }
    filled_[sequence].push_back(piece);
    room -= piece.length;
    if (room > 0 && static_cast<std::int64_t>(filled_[sequence].size()) <
                        options.max_documents) {
      open.emplace(room, sequence);
    }
  }
}

std::int64_t PackedWindow::num_sequences() const {
  return num_whole_ + static_cast<std::int64_t>(filled_.size());
}

std::vector<Piece> PackedWindow::pieces(std::int64_t sequence) const {
  if (sequence >= num_whole_) {
    return filled_.at(static_cast<std::size_t>(sequence - num_whole_));
  }
  const auto after = std::ranges::upper_bound(
      longs_,
      sequence,
      std::less<>(),
      &Long::first_sequence);
  const Long& document = *std::prev(after);
  const std::int64_t part = sequence - document.first_sequence;
  return {{.first = document.first + part * seq_len_, .length = seq_len_}};
}

std::string PackingReport::describe() const {
  return fmt::format(
      "{} documents ({} of them split) in {} samples, {:.1f} % full",
      num_documents,
      num_cut,
      num_sequences,
      100.0 * static_cast<double>(num_pairs) /
          static_cast<double>(
              std::max<std::int64_t>(1, num_sequences * seq_len)));
}

}  // namespace flatshard::data
