#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "flatshard/float8/flat_run.h"
#include "flatshard/group/float8_format.h"
#include "flatshard/group/float8_scales.h"
#include "flatshard/group/plane.h"

namespace flatshard {

/// Rows for the forward and columns for the backward, in FP8; kComputePlane is
/// empty.
///
/// A plane is bytes, in the layout of the group. With sharded scales (mxfp8)
/// each segment's scales follow it there, so that scales and elements are
/// sharded together and sent in the same launch. The other recipes have few
/// scales, and each rank has all of them (Float8Scales): the largest magnitudes
/// are reduced over the ranks (max, so exact) before anything is quantized. So
/// a plane has the same bytes as on one rank, for any number of shards.
///
/// | recipe     | rows, and columns where stored  | columns, derived          |
/// |------------|---------------------------------|---------------------------|
/// | tensorwise | [out, in]                       | [in, out], the same bytes |
/// | rowwise    | [out, in]; a scale per row, or  | [in, out], quantized from |
/// |            | per column                      | the rows; scales after    |
/// | blockwise  | [out, in]                       | [in, out], the same bytes |
/// | mxfp8      | [out, in]; scales along in, or  | [in, out], quantized from |
/// |            | along out                       | the rows                  |
class Float8Codec : public Codec {
 public:
  /// @param context  outlives this.
  explicit Float8Codec(const GroupContext& context);

  void plan() override;
  void begin(const FlatBuffer& main, const PlaneWriter* encoded) override;
  /// Called before `begin` of other main weights.
  void encode(
      const Plane& plane,
      PartId part,
      const FlatBuffer& main,
      const at::Tensor& to) override;
  /// @throws Error{usage} on the CPU, naming a parameter whose main weights on
  ///   this rank are not finite. On CUDA its scales and data become NaN.
  void end(const FlatBuffer& main, bool all_encoded) override;
  void derive(
      const Plane& plane,
      PartId part,
      const Plane& source,
      const at::Tensor& from,
      const at::Tensor& to) const override;
  /// Rows and stored columns have data [out, in], derived columns [in, out];
  /// scales follow float8::Plane.
  PlaneView view(
      const Plane& plane,
      PartId part,
      std::int64_t parameter,
      const at::Tensor& slot) const override;
  std::optional<float8::Recipe> recipe() const override {
    return format().recipe;
  }
  float8::WeightOperand operand(const Plane& plane, PlaneView view)
      const override;
  /// Returns the largest magnitudes that scales are computed from, or with
  /// sharded scales the rows themselves. Null where scales need more than this
  /// rank's rows (rowwise with stored columns), or where no rows are stored.
  /// @param main  float32, on the device of the planes.
  const PlaneWriter* writer(
      const FlatBuffer& main,
      const std::vector<Plane>& planes) override;
  std::int64_t nbytes() const override;

 private:
  const Float8Format& format() const { return *context_.options.float8; }
  std::array<std::int64_t, 2> shape(std::int64_t i) const {
    const auto& shape = context_.plan.layout->spec(i).shape;
    return {shape[0], shape[1]};
  }
  void encode_piece(
      const Plane& plane,
      const FlatBuffer& main,
      std::int64_t i,
      const Piece& piece,
      const at::Tensor& to,
      std::int64_t to_begin) const;
  /// Returns sharded scales. They are stored after the data of their segment.
  at::Tensor view_sharded_scales(
      const Plane& plane,
      const PlanePart& part,
      std::int64_t i,
      const at::Tensor& slot) const;
  bool is_finite(const FlatBuffer& main, std::int64_t i) const;
  float8::FlatRun
  flat_run(const Plane& rows, std::int64_t i, const Piece& piece) const;

  const GroupContext& context_;
  float8::RecipeTraits traits_;
  std::optional<Float8Scales> scales_;  ///< where each rank has all
  std::optional<PlaneWriter> writer_;   ///< made at its first use
  bool rows_are_made_ = false;          ///< by a writer of these main weights
};

}  // namespace flatshard
