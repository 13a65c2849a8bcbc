// The part of FlatLayout that finds the segments and the places of tensors in
// them.
#include <algorithm>
#include <iterator>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/layout/checked.h"
#include "flatshard/layout/flat_layout.h"

namespace flatshard {

using detail::checked_add;
using detail::checked_mul;
using detail::round_up;

void FlatLayout::pack(std::int64_t num_shards, std::int64_t alignment) {
  num_shards_ = num_shards;
  numel_ = 0;
  segments_.clear();
  std::vector<Bundle> packed = bundles(alignment);
  merge(packed);
  for (const Bundle& bundle : packed) {
    const std::int64_t shard_numel = pack_bundle(bundle);
    add_segment(bundle, shard_numel);
    const std::int64_t aligned = round_up(shard_numel, alignment, "flat space");
    if (aligned > shard_numel) {
      add_segment({.granule = 1}, aligned - shard_numel);
    }
  }
}

void FlatLayout::add_segment(const Bundle& bundle, std::int64_t shard_numel) {
  const Segment segment{
      .whole_tensors = bundle.whole_tensors,
      .granule = bundle.granule,
      .offset = numel_,
      .numel = checked_mul(shard_numel, num_shards_, "flat space"),
      .shard_numel = shard_numel,
      .local_offset = numel_ / num_shards_};
  numel_ = checked_add(numel_, segment.numel, "flat space");
  for (const std::int64_t i : bundle.tensors) {
    places_[i].offset += segment.offset;
    places_[i].segment = static_cast<std::int64_t>(segments_.size());
  }
  segments_.push_back(segment);
}

/// One bundle per part and distinct granule, one per part for all tensors that
/// stay on one rank, and one for each chunked tensor.
std::vector<FlatLayout::Bundle> FlatLayout::bundles(
    std::int64_t alignment) const {
  std::vector<Bundle> bundles;
  std::vector<std::int64_t> empty;
  for (std::int64_t i = 0; i < num_tensors(); ++i) {
    if (places_[i].numel == 0) {
      empty.push_back(i);
      continue;
    }
    const bool whole =
        specs_[i].granularity.kind() == Granularity::Kind::tensor;
    const std::int64_t granule = places_[i].granule;
    if (specs_[i].granularity.kind() == Granularity::Kind::chunk) {
      bundles.push_back(
          {.one_chunked = true,
           .granule = granule,
           .part = specs_[i].part,
           .tensors = {i}});
      continue;
    }
    auto same =
        std::find_if(bundles.begin(), bundles.end(), [&](const Bundle& bundle) {
          return !bundle.one_chunked && bundle.whole_tensors == whole &&
                 bundle.granule == granule && bundle.part == specs_[i].part;
        });
    if (same == bundles.end()) {
      bundles.push_back(
          {.whole_tensors = whole, .granule = granule, .part = specs_[i].part});
      same = std::prev(bundles.end());
    }
    same->tensors.push_back(i);
  }
  if (bundles.empty()) {
    bundles.push_back({.granule = alignment});
  }
  // Empty tensors need no room, so they share the first segment.
  std::vector<std::int64_t>& first = bundles.front().tensors;
  first.insert(first.end(), empty.begin(), empty.end());
  std::sort(first.begin(), first.end());
  return bundles;
}

/// Moves bundles of fine granules into bundles of coarser ones that are
/// multiples of them, where the shards get no longer by it. It is greedy,
/// coarse ones first. Each step only shortens the shards, so the bound of
/// FlatLayout stays.
void FlatLayout::merge(std::vector<Bundle>& bundles) {
  std::stable_sort(bundles.begin(), bundles.end(), [](auto& a, auto& b) {
    return a.granule > b.granule;
  });
  std::vector<Bundle> kept;
  for (Bundle& bundle : bundles) {
    std::int64_t best_growth = pack_bundle(bundle);
    Bundle* best_host = nullptr;
    for (Bundle& host : kept) {
      if (host.part != bundle.part || host.whole_tensors || host.one_chunked ||
          bundle.whole_tensors || bundle.one_chunked ||
          host.granule % bundle.granule != 0) {
        continue;
      }
      Bundle merged = host;
      merged.tensors.insert(
          merged.tensors.end(),
          bundle.tensors.begin(),
          bundle.tensors.end());
      const std::int64_t growth = pack_bundle(merged) - pack_bundle(host);
      if (growth < best_growth || (growth == best_growth && !best_host)) {
        best_growth = growth;
        best_host = &host;
      }
    }
    if (best_host != nullptr) {
      best_host->tensors.insert(
          best_host->tensors.end(),
          bundle.tensors.begin(),
          bundle.tensors.end());
    } else {
      kept.push_back(std::move(bundle));
    }
  }
  const auto first_tensor = [](const Bundle& bundle) {
    return bundle.tensors.empty() ? 0
                                  : *std::min_element(
                                        bundle.tensors.begin(),
                                        bundle.tensors.end());
  };
  std::sort(kept.begin(), kept.end(), [&](auto& a, auto& b) {
    return first_tensor(a) < first_tensor(b);
  });
  bundles = std::move(kept);
}

/// Sets the tensors' offsets from the segment's start and returns the numel of
/// one shard.
std::int64_t FlatLayout::pack_bundle(const Bundle& bundle) {
  return bundle.whole_tensors ? pack_whole(bundle) : pack_in_order(bundle);
}

std::int64_t FlatLayout::pack_in_order(const Bundle& bundle) {
  std::int64_t end = 0;
  for (const std::int64_t i : bundle.tensors) {
    TensorPlace& place = places_[i];
    const std::string& name = specs_[i].name;
    place.offset = place.numel == 0 ? end : round_up(end, place.granule, name);
    end = checked_add(place.offset, place.numel, name);
  }
  return round_up(ceil_div(end, num_shards_), bundle.granule, "flat space");
}

/// Largest first to the least loaded shard: at most 4/3 of the best possible
/// load (Graham 1969).
std::int64_t FlatLayout::pack_whole(const Bundle& bundle) {
  const std::vector<std::int64_t>& tensors = bundle.tensors;
  std::vector<std::int64_t> largest_first = tensors;
  std::stable_sort(
      largest_first.begin(),
      largest_first.end(),
      [&](auto a, auto b) { return places_[a].numel > places_[b].numel; });
  // More shards than tensors: the rest stays empty and is skipped.
  const std::int64_t num_used = std::min<std::int64_t>(
      num_shards_,
      static_cast<std::int64_t>(tensors.size()));
  std::vector<std::int64_t> load(num_used, 0);
  std::vector<std::int64_t> shard_of(specs_.size(), 0);
  for (const std::int64_t i : largest_first) {
    const std::int64_t shard =
        std::min_element(load.begin(), load.end()) - load.begin();
    shard_of[i] = shard;
    load[shard] = checked_add(
        load[shard],
        round_up(places_[i].numel, bundle.granule, specs_[i].name),
        specs_[i].name);
  }
  const std::int64_t shard_numel = *std::max_element(load.begin(), load.end());
  checked_mul(shard_numel, num_shards_, "flat space");
  std::vector<std::int64_t> end(num_used, 0);
  for (const std::int64_t i : tensors) {  // in the given order inside a shard
    TensorPlace& place = places_[i];
    const std::int64_t shard = shard_of[i];
    place.offset = shard * shard_numel + end[shard];
    end[shard] += round_up(place.numel, bundle.granule, specs_[i].name);
  }
  return shard_numel;
}

}  // namespace flatshard
