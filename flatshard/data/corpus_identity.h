#pragma once

#include <string>

#include "flatshard/data/corpus.h"

namespace flatshard::data {

/// What tells two corpora apart, wherever they are and however their files are
/// called and divided: their tokens. Two texts of digits; empty: unknown.
struct CorpusIdentity {
  /// Of the number of tokens and of blocks all over them: of every token up to
  /// 4 Mi, of 16 blocks of 256 Ki in a larger split.
  std::string sample;
  /// Of every token and of the mask, as meta.json has them; corpora that were
  /// prepared by older versions have none.
  std::string all;

  /// Whether nothing that both know differs.
  bool agrees_with(const CorpusIdentity& other) const;
};

/// Reads at most 16 MiB of the split. @throws what Corpus::read throws.
CorpusIdentity identify(const Corpus& corpus);

}  // namespace flatshard::data
