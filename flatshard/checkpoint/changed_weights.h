#pragma once

#include "flatshard/checkpoint/changed_elements.h"
#include "flatshard/checkpoint/weight_stream.h"
#include "flatshard/group/param_group.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// The elements of one parameter that have other values than before.
struct ChangedParameter {
  std::string name;
  std::vector<std::int64_t> shape;  ///< of the full parameter
  /// [n] strictly increasing, in the flattened full parameter: int32, or int64
  /// in a group with a parameter of 2^31 elements.
  at::Tensor indices;
  at::Tensor values;  ///< [n]
};

/// The changes of a sharded model's weights since they were sent last. Each
/// rank compares its part of the main weights with a copy of the sent values,
/// bit for bit, in the dtype that is sent. The copy has the size of this rank's
/// shards in that dtype. Until the changes of a pass are sent, a GPU also
/// stores one bit for each element. During a pass it compares one group ahead:
/// ChangedElements of two groups.
///
/// Use it between two steps, on all ranks of the model alike, and for one pass
/// on the same stream. After an exception, send all weights and construct it
/// again.
class ChangedWeights {
 public:
  /// Copies the weights as they are. Not collective.
  /// @param groups    outlive this.
  /// @param dtype_of  empty: the dtype of main weights.
  /// @param mesh      as in WeightStreamOptions.
  /// @throws Error{usage} without groups.
  explicit ChangedWeights(
      const std::vector<const ParamGroup*>& groups,
      const DtypeOf& dtype_of = {},
      std::shared_ptr<Mesh> mesh = nullptr);

  /// Returns the changed parameters of the next group on all ranks; nothing at
  /// the end. Collective. Blocks the host.
  std::optional<std::vector<ChangedParameter>> next();
  /// Ends a pass over the groups; the next one starts with the first group. If
  /// `sent` is true on all ranks, what `next` returned counts as sent.
  /// Otherwise the next pass returns these elements again, since some rank
  /// could not send them. Collective.
  /// @return whether it was sent.
  bool finish(bool sent);

 private:
  struct Sent {
    const ParamGroup* group = nullptr;
    at::Tensor values;   ///< [shard] as in the last comparison
    at::Tensor borders;  ///< int64: begin and end of each main shard
    /// Marks of the elements of `values` that are not sent yet. May be
    /// undefined.
    at::Tensor unsent{};
  };

  ChangedElements compare(Sent& sent) const;
  std::vector<ChangedParameter> on_all_ranks(
      const ParamGroup& group,
      const ChangedElements& changed) const;

  std::vector<Sent> groups_;
  std::shared_ptr<Mesh> mesh_;
  std::size_t next_ = 0;
  std::optional<ChangedElements> ahead_;  ///< of group `next_`
};

}  // namespace flatshard
