#include "flatshard/train/data/trained_samples.h"

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard {
namespace {

constexpr std::string_view kHelp =
    "raise training.seq_len, or prepare the dataset again with another "
    "--train-on";

void check_corpus(
    const std::string& path,
    const data::TokenSource& source,
    std::int64_t seq_len) {
  const std::int64_t untrained = source.num_untrained(seq_len);
  if (untrained == 0) {
    return;
  }
  const std::int64_t all = source.num_sequences(seq_len);
  FLATSHARD_CHECK(
      untrained < all,
      config,
      "data.train: none of the {} samples of {} has a trained token, because "
      "prompts fill all of training.seq_len = {}; {}",
      all,
      path,
      seq_len,
      kHelp);
  log_warning(
      "data.train: {} of the {} samples of {} have no trained token, because "
      "prompts fill all of training.seq_len = {}. A step of such samples only "
      "changes no weight, and its loss is none; {}",
      untrained,
      all,
      path,
      seq_len,
      kHelp);
}

bool has_trained_token(const ValidationSet& set) {
  std::vector<std::int64_t> tokens(
      static_cast<std::size_t>(set.loader.options().seq_len));
  std::vector<std::int64_t> targets(tokens.size());
  for (std::int64_t i = 0; i < set.num_sequences; ++i) {
    set.read(i, 1, tokens, targets);
    if (set.count(targets).targets > 0) {
      return true;
    }
  }
  return false;
}

}  // namespace

void check_trained_samples(
    const std::vector<data::SourceChoice>& train,
    const data::Loader& loader,
    const std::vector<ValidationSet>& validation_sets) {
  for (std::size_t i = 0; i < loader.sources().size(); ++i) {
    check_corpus(
        train.at(i).path,
        *loader.sources()[i].source,
        loader.options().seq_len);
  }
  for (const ValidationSet& set : validation_sets) {
    FLATSHARD_CHECK(
        !set.loader.ignores_targets() || has_trained_token(set),
        config,
        "{}: the first {} samples of the validation split of {} have no "
        "trained token; raise validation.sequences, or {}",
        set.option,
        set.num_sequences,
        set.path,
        kHelp);
  }
}

}  // namespace flatshard
