#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/group/group_options.h"

namespace flatshard {

/// The FP8 planes of a group's weights: what rests of them on this rank, and
/// what a slot holds.
///
/// A plane is bytes. Its layout is the group's; with mxfp8 the scales of each
/// segment follow it there, so that they are cut where their elements are and
/// travel in the same launch. The other recipes have few scales: each rank has
/// all of them, since the largest magnitudes are reduced over the ranks (max,
/// so exact) before anything is quantized. So the bytes of a plane are those
/// that one rank has, in any number of shards.
///
/// | recipe     | rows, and columns where stored  | columns, derived          |
/// |------------|---------------------------------|---------------------------|
/// | tensorwise | [out, in]                       | [in, out], the same bytes |
/// | rowwise    | [out, in]; a scale per row, or  | [in, out], quantized from |
/// |            | per column                      | the rows; scales behind   |
/// | blockwise  | [out, in]                       | [in, out], the same bytes |
/// | mxfp8      | [out, in]; scales along in, or  | [in, out], quantized from |
/// |            | along out                       | the rows                  |
class Float8Planes {
 public:
  enum Plane { kRows, kColumns };
  /// Of `part`.
  static constexpr int kWhole = -1;

  /// @param context  outlives this. Its layout has a part for each of
  ///   `parts_of(...)`.
  /// @param resident  the weights rest whole on every rank: derived columns,
  ///   too, have a place of their own.
  Float8Planes(const GroupContext& context, bool resident);

  /// To which part each of `num_parameters` parameters belongs.
  static std::vector<std::int64_t> parts_of(
      std::int64_t num_parameters,
      const Float8Format& format);
  /// What a group's layout needs.
  static LayoutOptions layout_options(
      LayoutOptions options,
      const Float8Format&);
  static Granularity granularity(const Float8Format& format);

  const Float8Format& format() const { return *context_.options.float8; }
  bool stores(Plane plane) const {
    return plane == kRows || format().stored_columns;
  }
  int num_parts() const { return static_cast<int>(parts_.size()); }
  std::int64_t part_of(std::int64_t parameter) const;
  /// Of the slot for a plane or a part of it.
  std::int64_t slot_nbytes(Plane plane, int part = kWhole) const;
  /// What rests on this rank, in bytes.
  std::int64_t nbytes() const;

  /// Makes the stored planes anew from main weights. Collective; on the current
  /// stream.
  /// @throws Error{usage} on the CPU, naming a parameter whose main weights on
  ///   this rank are not finite. On CUDA its scales and data become NaN.
  void refresh(const FlatBuffer& main);
  /// Gathers a stored plane, or a part of it, into `slot` [slot_nbytes] uint8.
  /// Collective; on the current stream.
  void gather(Plane plane, int part, const at::Tensor& slot);
  /// Makes the derived columns of gathered rows, both [slot_nbytes] uint8.
  void derive(int part, const at::Tensor& rows, const at::Tensor& columns)
      const;

  /// Parameter `i` in a slot that holds `part` of the plane. Rows and stored
  /// columns have data [out, in], derived columns [in, out]; scales as
  /// float8::Plane says.
  float8::Plane
  view(Plane plane, std::int64_t i, int part, const at::Tensor& slot) const;
  /// Of groups whose weights rest whole: what others have in a slot.
  const at::Tensor& resting(Plane plane) const {
    return stores(plane) ? planes_[plane].resting.local() : derived_columns_;
  }
  const FlatBuffer& stored(Plane plane) const { return planes_[plane].resting; }
  /// Whether rows and stored columns of parameter `i` are finite on this rank.
  /// Blocks the host.
  bool is_finite(std::int64_t i) const;

  /// The mesh has other communicators now.
  void use_mesh();

 private:
  /// A stored plane.
  struct Stored {
    FlatBuffer resting;  ///< uint8, parameter placement
    FlatBuffer shard;    ///< optimizer placement; a view where it can be
    /// Planned at their first use: of all, then of each part.
    std::vector<std::optional<Redistribution>> gathers;
  };
  struct Part {
    std::int64_t first_parameter, num_parameters;
    std::int64_t first_segment, num_segments;
    std::int64_t offset, numel;  ///< in the plane's layout
    std::int64_t extra_offset, extra_nbytes;
  };
  struct Shape {
    std::int64_t rows, columns;
  };
  /// Where the scales of a parameter are in `scales_`, in elements.
  struct ScaleOffsets {
    std::array<std::int64_t, 2> plane{};
  };

  Shape shape(std::int64_t i) const;
  Part whole() const;
  void build_parts();
  void build_scales();
  at::Tensor scales_of(const at::Tensor& all, Plane plane, std::int64_t i)
      const;
  void find_amax(const FlatBuffer& main, const at::Tensor& amax) const;
  /// @param amax  undefined with mxfp8.
  void quantize_with(const FlatBuffer& main, const at::Tensor& amax);
  void quantize_piece(
      const FlatBuffer& main,
      const at::Tensor& amax,
      Plane plane,
      std::int64_t i,
      const Piece& piece);

  const GroupContext& context_;
  std::shared_ptr<const FlatLayout> layout_;  ///< of a plane's bytes
  std::vector<Part> parts_;
  std::array<Stored, 2> planes_;
  std::vector<ScaleOffsets> scale_offsets_;
  std::vector<std::int64_t> extra_offsets_;  ///< rowwise, derived: see .cpp
  std::int64_t extra_nbytes_ = 0;
  at::Tensor derived_columns_;  ///< of resident groups
  at::Tensor scales_;  ///< float32, of both planes; undefined with mxfp8
};

}  // namespace flatshard
