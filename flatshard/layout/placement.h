#pragma once

#include <string>
#include <vector>

namespace flatshard {

/// How the addends of a reduction are combined.
enum class ReduceOp {
  sum,
  avg,
  max,  ///< all-reduces of int32 only
};

std::string to_string(ReduceOp op);

/// How a flat buffer is stored on one mesh axis: every rank has the same values
/// (replicate), its own contiguous part (shard), or an addend of the values
/// over the full range (partial).
class Placement {
 public:
  static Placement replicate() { return {Kind::replicate, ReduceOp::sum}; }
  static Placement shard() { return {Kind::shard, ReduceOp::sum}; }
  static Placement partial(ReduceOp op) { return {Kind::partial, op}; }

  bool is_replicate() const { return kind_ == Kind::replicate; }
  bool is_shard() const { return kind_ == Kind::shard; }
  bool is_partial() const { return kind_ == Kind::partial; }

  /// @throws Error{usage} unless the placement is partial.
  ReduceOp reduce_op() const;

  bool operator==(const Placement&) const = default;

  /// "Replicate", "Shard", "Partial(sum)" or "Partial(avg)".
  std::string to_string() const;

 private:
  enum class Kind { replicate, shard, partial };
  Placement(Kind kind, ReduceOp op) : kind_(kind), op_(op) {}

  Kind kind_;
  ReduceOp op_;
};

/// One placement per mesh axis, outermost axis first.
using Placements = std::vector<Placement>;

/// E.g. "[Replicate, Shard]".
std::string to_string(const Placements& placements);

/// Returns the number of axes that are sharded.
int num_sharded_axes(const Placements& placements);

/// Returns whether the sharded axes are the innermost ones (none and all
/// count). Only then is each rank's part of a segment one contiguous range,
/// because the innermost axis is split first.
bool shards_are_suffix(const Placements& placements);

}  // namespace flatshard
