#pragma once

#include <string>

#include "flatshard/data/corpus.h"

namespace flatshard::data {

/// Identifies a dataset by its tokens, independent of paths, file names, and
/// shard sizes. Two strings of digits; an empty one is unknown.
struct CorpusIdentity {
  /// A digest of the number of tokens and of blocks all over them: of every
  /// token up to 4 Mi, of 16 blocks of 256 Ki in a larger split.
  std::string sample;
  /// A digest of every token and of the mask, from meta.json. Empty for
  /// datasets that were prepared by older versions.
  std::string all;

  /// Returns whether no field that both have differs.
  bool agrees_with(const CorpusIdentity& other) const;
};

/// Reads at most 16 MiB of the split. @throws what `Corpus::read` throws.
CorpusIdentity identify(const Corpus& corpus);

}  // namespace flatshard::data
