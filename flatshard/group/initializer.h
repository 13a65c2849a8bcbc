#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/core/init_spec.h"
#include "flatshard/layout/rectangle.h"

#include <cstdint>
#include <string_view>

namespace flatshard {

/// Draws the initial values of parameters. A value depends only on the seed,
/// the parameter's name and the element's index. So every world size and
/// strategy gets the same weights, each rank draws only what it owns, and
/// nothing is broadcast.
///
/// normal: Box-Muller on Philox4x32-10 with key mix(seed, hash(name)) and
/// counter = index / 4.
class Initializer {
 public:
  explicit Initializer(std::uint64_t seed) : seed_(seed) {}

  /// Writes out.numel() elements of the flattened parameter, from `begin` on.
  ///
  /// @param out  [n] contiguous, any float dtype, CPU or CUDA. The values are
  ///   drawn in float32 and do not depend on the device. Queues on the current
  ///   stream.
  void fill(
      const at::Tensor& out,
      std::string_view name,
      InitSpec spec,
      std::int64_t begin) const;
  /// Writes the elements of a box of the parameter, in the order of the box.
  ///
  /// @param out  [n] as above; n is the number of the box's elements.
  /// @param runs  the box in the unsharded parameter.
  void fill(
      const at::Tensor& out,
      std::string_view name,
      InitSpec spec,
      const FlatRuns& runs) const;

 private:
  std::uint64_t seed_;
};

}  // namespace flatshard
