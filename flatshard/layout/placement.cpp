#include "flatshard/layout/placement.h"

#include <algorithm>

#include "flatshard/core/error.h"

namespace flatshard {

std::string to_string(ReduceOp op) {
  return op == ReduceOp::sum ? "sum" : op == ReduceOp::avg ? "avg" : "max";
}

ReduceOp Placement::reduce_op() const {
  FLATSHARD_CHECK(
      is_partial(),
      usage,
      "only a Partial placement has a reduction, this one is {}",
      to_string());
  return op_;
}

std::string Placement::to_string() const {
  switch (kind_) {
    case Kind::replicate:
      return "Replicate";
    case Kind::shard:
      return "Shard";
    case Kind::partial:
      return "Partial(" + flatshard::to_string(op_) + ")";
  }
  return "unknown";
}

std::string to_string(const Placements& placements) {
  std::string text = "[";
  for (const Placement& placement : placements) {
    if (text.size() > 1) {
      text += ", ";
    }
    text += placement.to_string();
  }
  return text + "]";
}

int num_sharded_axes(const Placements& placements) {
  return static_cast<int>(std::count_if(
      placements.begin(),
      placements.end(),
      [](const Placement& p) { return p.is_shard(); }));
}

bool shards_are_suffix(const Placements& placements) {
  const auto first = std::find_if(
      placements.begin(),
      placements.end(),
      [](const Placement& p) { return p.is_shard(); });
  return std::all_of(first, placements.end(), [](const Placement& p) {
    return p.is_shard();
  });
}

}  // namespace flatshard
