#include "flatshard/layout/padding.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

struct Sums {
  std::int64_t numel = 0;    ///< of the tensors
  std::int64_t padding = 0;  ///< over all shards
  std::int64_t padding_per_shard = 0;

  void add(const FlatLayout& layout) {
    numel += layout.numel() - layout.padding_numel();
    padding += layout.padding_numel();
    padding_per_shard += layout.padding_numel() / layout.num_shards();
  }
  double ratio() const {
    return numel == 0
               ? 0
               : static_cast<double>(padding) / static_cast<double>(numel);
  }
};

FlatLayout with_shards(const FlatLayout& layout, std::int64_t num_shards) {
  std::vector<TensorSpec> specs;
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    specs.push_back(layout.spec(i));
  }
  return FlatLayout::build(std::move(specs), num_shards);
}

// Returns the number of elements that no boundary may split.
std::int64_t uncut_numel(const FlatLayout& layout, std::int64_t i) {
  const TensorSpec& spec = layout.spec(i);
  return spec.granularity.kind() == Granularity::Kind::tensor
             ? layout.tensor_numel(i)
             : spec.granularity.granule_numel(spec.shape);
}

}  // namespace

std::optional<std::string> describe_excessive_padding(
    std::span<const FlatLayout* const> layouts,
    double max_padding,
    std::int64_t element_nbytes,
    std::int64_t negligible_nbytes,
    const std::function<std::string(const FlatLayout&, std::int64_t)>&
        name_of) {
  FLATSHARD_CHECK(
      max_padding >= 0 && !std::isnan(max_padding),
      config,
      "max_padding: expected a ratio of at least 0, got {}",
      max_padding);
  const auto accepted = [&](const Sums& sums) {
    return sums.ratio() <= max_padding ||
           sums.padding_per_shard * element_nbytes <= negligible_nbytes;
  };
  Sums sums;
  for (const FlatLayout* const layout : layouts) {
    sums.add(*layout);
  }
  if (accepted(sums)) {
    return std::nullopt;
  }
  const FlatLayout& worst =
      **std::ranges::max_element(layouts, {}, [](const FlatLayout* layout) {
        return layout->padding_numel();
      });
  std::int64_t coarsest = 0;
  for (std::int64_t i = 1; i < worst.num_tensors(); ++i) {
    if (uncut_numel(worst, i) > uncut_numel(worst, coarsest)) {
      coarsest = i;
    }
  }
  const std::int64_t num_shards = worst.num_shards();
  std::int64_t fits = 0;
  // A degree must divide the ranks, the others are replicas.
  for (std::int64_t n = num_shards / 2; n > 1 && fits == 0; --n) {
    if (num_shards % n != 0) {
      continue;
    }
    Sums smaller;
    for (const FlatLayout* const layout : layouts) {
      smaller.add(with_shards(*layout, n));
    }
    fits = accepted(smaller) ? n : 0;
  }
  return fmt::format(
      "padding is {:.1f} % of the model's parameters over {} shards, {:.0f} "
      "MiB per rank; max_padding allows {:.1f} % (hardest to split: '{}' with "
      "granularity {}, {} elements); {}, use a finer granularity, or raise "
      "max_padding",
      100 * sums.ratio(),
      num_shards,
      std::ldexp(
          static_cast<double>(sums.padding_per_shard * element_nbytes),
          -20),
      100 * max_padding,
      name_of ? name_of(worst, coarsest) : worst.spec(coarsest).name,
      worst.spec(coarsest).granularity.to_string(),
      uncut_numel(worst, coarsest),
      fits > 0 ? fmt::format(
                     "shard over {} ranks and replicate over {} (HSDP)",
                     fits,
                     num_shards / fits)
               : std::string("no smaller number of shards helps"));
}

void check_padding(
    std::span<const FlatLayout* const> layouts,
    double max_padding) {
  if (const auto text = describe_excessive_padding(layouts, max_padding)) {
    FLATSHARD_THROW(config, "{}", *text);
  }
}

}  // namespace flatshard
