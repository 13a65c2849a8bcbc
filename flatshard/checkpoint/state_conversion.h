#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/group/named_shard.h"
#include "flatshard/optim/state_codes.h"

namespace flatshard {

/// A parameter's part of an optimizer state that the checkpoint has in another
/// format: float32, bfloat16, or codes with scales (state_format.h). It is
/// decoded to float32, exactly, and encoded in the model's format.
class StateConversion {
 public:
  /// @param values  of the model, with `scales` if they are codes.
  /// @param stored  the tensor in the checkpoint, with `stored_scales` if it
  ///   has codes. Both must outlive this.
  /// @throws Error{format} that starts with `what` where scales are missing or
  ///   have another shape, or for another dtype.
  StateConversion(
      NamedShard values,
      std::optional<NamedShard> scales,
      const StoredTensor& stored,
      const StoredTensor* stored_scales,
      const std::string& what);

  /// Appends the boxes to be read, at `nbytes` of the staging memory on, and
  /// raises `nbytes`.
  void want(std::vector<WantedBox>& wanted, std::uint64_t& nbytes);
  /// Converts what was read. On the current stream.
  void apply(std::span<const std::byte> staging) const;

 private:
  bool from_codes() const { return stored_scales_ != nullptr; }

  NamedShard values_;
  std::optional<NamedShard> scales_;
  std::optional<StateScales> read_scales_;  ///< of stored codes
  const StoredTensor* stored_;
  const StoredTensor* stored_scales_;
  std::int64_t first_ = 0;  ///< element of the rank's parameter that is read
  std::int64_t end_ = 0;
  std::uint64_t begin_ = 0;  ///< of the values in the staging memory
  std::uint64_t scales_begin_ = 0;
};

}  // namespace flatshard
