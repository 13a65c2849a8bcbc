// Derives layouts from other layouts.
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/layout/flat_layout.h"

namespace flatshard {
namespace {

std::int64_t divide(std::int64_t n, std::int64_t block, const char* what) {
  FLATSHARD_CHECK(
      n % block == 0,
      config,
      "expected {} that is a multiple of {} elements (they share a scale), "
      "got {}",
      what,
      block,
      n);
  return n / block;
}

}  // namespace

FlatLayout FlatLayout::with_scales(std::int64_t block) const {
  FlatLayout all;
  all.num_shards_ = num_shards_;
  const auto append = [&](Segment segment) {
    segment.offset = all.numel_;
    segment.numel = segment.shard_numel * num_shards_;
    segment.local_offset = all.numel_ / num_shards_;
    all.numel_ += segment.numel;
    all.segments_.push_back(segment);
  };
  for (const Segment& segment : segments_) {
    append(segment);
    Segment scales = segment;
    scales.granule = divide(segment.granule, block, "a granule");
    scales.shard_numel = divide(segment.shard_numel, block, "a shard");
    append(scales);
  }
  const auto add = [&](const TensorSpec& spec, TensorPlace place) {
    all.index_.emplace(spec.name, all.num_tensors());
    all.data_numel_ += place.numel;
    all.specs_.push_back(spec);
    all.places_.push_back(place);
  };
  for (const std::int64_t of : {std::int64_t{1}, block}) {
    for (std::int64_t i = 0; i < num_tensors(); ++i) {
      TensorPlace place = places_[i];
      const Segment& from = segments_[place.segment];
      place.segment = 2 * place.segment + (of == 1 ? 0 : 1);
      place.offset = all.segments_[place.segment].offset +
                     divide(place.offset - from.offset, of, "an offset");
      place.granule = divide(place.granule, of, "a granule");
      place.numel = divide(place.numel, of, "a tensor");
      TensorSpec spec = specs_[i];
      if (of != 1) {
        spec.name += ".scale";
        spec.shape = {place.numel};
      }
      add(spec, place);
    }
  }
  return all;
}

FlatLayout FlatLayout::of_segments(std::int64_t first, std::int64_t count)
    const {
  FLATSHARD_CHECK(
      first >= 0 && count >= 1 &&
          first + count <= static_cast<std::int64_t>(segments_.size()),
      usage,
      "segments [{}, {}) are out of range, the layout has {}",
      first,
      first + count,
      segments_.size());
  FlatLayout layout;
  layout.num_shards_ = num_shards_;
  for (std::int64_t s = first; s < first + count; ++s) {
    Segment segment = segments_[s];
    segment.offset = layout.numel_;
    segment.local_offset = layout.numel_ / num_shards_;
    layout.numel_ += segment.numel;
    layout.segments_.push_back(segment);
  }
  return layout;
}

}  // namespace flatshard
