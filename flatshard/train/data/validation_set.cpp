#include "flatshard/train/data/validation_set.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "flatshard/core/error.h"
#include "flatshard/data/token_source.h"
#include "flatshard/train/config/option_errors.h"

namespace flatshard {

void ValidationSet::read(
    std::int64_t first,
    std::int64_t count,
    std::span<std::int64_t> tokens,
    std::span<std::int64_t> targets,
    data::DocumentLengths* documents) const {
  const std::int64_t seq_len = loader.options().seq_len;
  const auto used = static_cast<std::size_t>(count * seq_len);
  for_option(option, [&] {
    loader.read_samples(
        first,
        tokens.first(used),
        targets.first(used),
        documents);
  });
  if (documents != nullptr) {
    const auto rows = static_cast<std::int64_t>(tokens.size()) / seq_len;
    const auto others = static_cast<std::size_t>(rows - count);
    for (auto* of : {&documents->lengths, &documents->padding}) {
      of->insert(of->end(), others, seq_len);
    }
  }
  std::ranges::fill(tokens.subspan(used), 0);
  std::ranges::fill(targets.subspan(used), data::kIgnoredTarget);
}

ValidationSet::Counts ValidationSet::count(
    std::span<const std::int64_t> targets) const {
  Counts counts;
  for (const std::int64_t target : targets) {
    const bool is_target = target != data::kIgnoredTarget;
    counts.targets += is_target ? 1 : 0;
    counts.bytes += is_bytes && is_target && target < data::kNumBytes ? 1 : 0;
  }
  return counts;
}

std::vector<ValidationSet> open_validation_sets(const DataOptions& options) {
  std::vector<ValidationSet> sets;
  if (!options.validates) {
    return sets;
  }
  const bool own = !options.validation.empty();
  const std::string option = own ? "data.validation" : "data.train";
  const auto& choices = own ? options.validation : options.train;
  for_option(option, [&] {
    const auto sources = data::open_token_sources(
        choices,
        "validation",
        options.seed + 1,
        options.vocab_size,
        options.packing);
    double all_weights = 0;
    for (const data::SourceChoice& choice : choices) {
      all_weights += choice.weight;
    }
    const std::int64_t wanted = options.validation_sequences;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      FLATSHARD_CHECK(
          wanted != -1 || !choices[i].is_random(),
          config,
          "validation.sequences = -1 is the full split, and random tokens have "
          "no end; set a number");
      data::Loader loader(
          sources[i].source,
          {.seq_len = options.packing.seq_len,
           .global_batch_size = 1,
           .vocab_size = options.vocab_size,
           .shuffle = false,
           .documents_per_sample = options.packing.max_documents});
      const double share = choices[i].weight / all_weights;
      const std::int64_t all = loader.num_sequences();
      const auto part = std::max<std::int64_t>(
          1,
          std::llround(static_cast<double>(wanted) * share));
      sets.push_back(
          {.path = choices[i].path,
           .share = share,
           .loader = std::move(loader),
           .num_sequences = wanted == -1 ? all : std::min(part, all),
           .is_bytes = sources[i].source->tokens_are_bytes(),
           .option = option});
    }
  });
  return sets;
}

ValidationMetrics summarize(
    const std::vector<ValidationSet>& sets,
    std::int64_t step,
    std::span<const double> sums) {
  ValidationMetrics metrics{.step = step};
  bool all_bytes = true;
  double bits_per_byte = 0;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    const double nats = sums[3 * i];
    const double num_targets = sums[3 * i + 1];
    const double num_bytes = sums[3 * i + 2];
    FLATSHARD_CHECK(
        num_targets > 0,
        config,
        "validation: the first {} samples of {} have no token that is "
        "trained; raise validation.sequences, or prepare the dataset again "
        "with another --train-on",
        sets[i].num_sequences,
        sets[i].path);
    const double loss = nats / num_targets;
    metrics.loss += sets[i].share * loss;
    all_bytes = all_bytes && sets[i].is_bytes && num_bytes > 0;
    bits_per_byte += sets[i].share * nats / (std::numbers::ln2 * num_bytes);
    if (sets.size() > 1) {
      metrics.parts.emplace_back(sets[i].path, loss);
    }
  }
  if (all_bytes) {
    metrics.bits_per_byte = bits_per_byte;
  }
  return metrics;
}

}  // namespace flatshard
