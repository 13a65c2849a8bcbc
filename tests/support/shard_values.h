#pragma once

#include "flatshard/group/named_shard.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

namespace flatshard::testing {

/// Calls `visit(part, values)` for each run of a shard's elements: a view of
/// the full tensor and one of `shard.tensor`.
/// @param whole  contiguous, of as many elements as the full tensor.
template <class F>
void for_each_part(
    const NamedShard& shard,
    const at::Tensor& whole,
    F&& visit) {
  const at::Tensor flat = whole.view(-1);
  const std::vector<std::int64_t> shape = shard.whole_shape();
  std::int64_t done = 0;
  for (const Rectangle& box : shard.boxes()) {
    for_each_run(
        FlatRuns(shape, box),
        0,
        box.numel(),
        [&](std::int64_t first, std::int64_t at, std::int64_t n) {
          visit(flat.narrow(0, first, n), shard.tensor.narrow(0, done + at, n));
        });
    done += box.numel();
  }
}

/// Returns the values of a full tensor that belong to a shard, flattened.
inline at::Tensor part_of(const NamedShard& shard, const at::Tensor& whole) {
  std::vector<at::Tensor> parts{whole.new_empty({0})};
  for_each_part(
      shard,
      whole.contiguous(),
      [&](const at::Tensor& part, const at::Tensor&) {
        parts.push_back(part);
      });
  return at::cat(parts);
}

/// Writes the values of a shard to its place in a full tensor.
inline void put_into(const NamedShard& shard, const at::Tensor& whole) {
  for_each_part(
      shard,
      whole,
      [](const at::Tensor& part, const at::Tensor& values) {
        part.copy_(values);
      });
}

}  // namespace flatshard::testing
