#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/comm/communicator.h"
#include "flatshard/float8/flat_run.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/group/group_options.h"

namespace flatshard {

/// Returns the factors of decoded values in blocks with these largest
/// magnitudes: float8::float_scale_of, or float8::e8m0_of as a float, bit for
/// bit, on any device.
///
/// @param amax  float32, >= 0
at::Tensor float8_scales(const at::Tensor& amax, const float8::Quantizer& q);

/// The scales of a group's FP8 weights where every rank has all of them
/// (float8::RecipeTraits::scales_are_sharded = false): one float32 tensor for
/// all parameters and both planes, reduced over the ranks at once. Separate
/// scales of derived columns are not among them: those are found when the
/// columns are.
class Float8Scales {
 public:
  /// @param context  outlives this.
  explicit Float8Scales(const GroupContext& context);

  /// Returns the scales of parameter `i` along an axis, laid out by
  /// float8::Plane.
  at::Tensor of(float8::Axis axis, std::int64_t i) const {
    return view(scales_, axis, i);
  }
  /// Returns the largest magnitudes that they are computed from, between
  /// `update` and `forget_amax`.
  at::Tensor amax(float8::Axis axis, std::int64_t i) const {
    return view(amax_, axis, i);
  }
  bool is_finite(std::int64_t i) const;

  /// Makes the communicator that `update` needs. On the host.
  void plan() { group_of_amax(context_.strategy.optimizer); }
  /// Computes them from new main weights. Collective; on the current stream.
  /// @param amax  like empty_amax: this rank's largest magnitudes. Undefined:
  ///   they are found in `main`.
  void update(const FlatBuffer& main, at::Tensor amax);
  void forget_amax() { amax_.reset(); }

  /// For callers that find this rank's largest magnitudes themselves: memory
  /// for them, to be zero before, and the place of parameter `i` in it.
  at::Tensor empty_amax() const;
  void place_amax(std::int64_t i, float8::FlatRun& run) const;

  std::int64_t nbytes() const {
    return static_cast<std::int64_t>(scales_.nbytes());
  }

 private:
  at::Tensor view(const at::Tensor& all, float8::Axis axis, std::int64_t i)
      const;
  /// Returns the start offsets of the scales of a parameter's rows and of its
  /// columns.
  const std::array<std::int64_t, 2>& offsets(std::int64_t i) const {
    return context_.plan.shape.float8->scale_offsets[i];
  }
  void find_amax(const FlatBuffer& main) const;
  /// Returns the ranks that have other rows. Null: none.
  Communicator* group_of_amax(const Placements& of_main) const;

  const GroupContext& context_;
  float8::Quantizer quantizer_;
  float8::RecipeTraits traits_;
  bool stored_columns_;
  bool transposes_;  ///< Float8Format::transposes_scales
  at::Tensor scales_;
  at::Tensor amax_;
};

}  // namespace flatshard
