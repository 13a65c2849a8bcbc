#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/peer_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/group/float8_outputs.h"
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

  /// @param context  outlives this. Its layout has the parts of
  ///   Float8Format::parts_of.
  struct Options {
    /// The weights rest whole on every rank.
    bool resident = false;
    /// false: this rank's part is made of main weights for each gather, and
    /// only scales stay. Not where the ranks spread what the optimizer's slices
    /// hold.
    bool rests = true;
    /// The other ranks can copy what rests here.
    bool peers = false;
  };
  Float8Planes(const GroupContext& context, Options options);

  const Float8Format& format() const { return *context_.options.float8; }
  bool stores(Plane plane) const {
    return plane == kRows || format().stored_columns;
  }
  bool rests() const { return options_.rests; }
  int num_parts() const { return static_cast<int>(parts_.size()); }
  std::int64_t part_of(std::int64_t parameter) const;
  /// Of the slot for a plane or a part of it.
  std::int64_t slot_nbytes(Plane plane, int part = kWhole) const;
  /// What rests on this rank, in bytes.
  std::int64_t nbytes() const;

  /// What an update of main weights can make of them in its pass: the largest
  /// magnitudes that scales come from, to be zero before it, or with mxfp8 the
  /// rows themselves. Null where scales need more than this rank's rows
  /// (rowwise with stored columns), or where no rows rest.
  /// @param main  float32, on the device of the planes.
  const Float8Outputs* outputs(const FlatBuffer& main);
  /// Makes the stored planes anew from main weights, or their scales where the
  /// planes do not rest. Collective; on the current stream.
  /// @param begun  `outputs` are those of these weights. The planes are the
  ///   same, bit for bit.
  /// @throws Error{usage} on the CPU, naming a parameter whose main weights on
  ///   this rank are not finite. On CUDA its scales and data become NaN.
  void refresh(const FlatBuffer& main, bool begun = false);
  /// Makes the communicators that `refresh` and `gather` need and the mesh has
  /// not. Collective where there are any; on the host.
  void plan_ways();
  /// Gathers a stored plane, or a part of it, into `slot` [slot_nbytes] uint8.
  /// Collective; on the current stream.
  void gather(Plane plane, int part, const at::Tensor& slot);
  /// The same where planes do not rest, of the main weights of the last
  /// `refresh`.
  void gather_made(
      const FlatBuffer& main,
      Plane plane,
      int part,
      const at::Tensor& slot);
  /// The same by copies of what the peers hold, which have fenced.
  void copy(Plane plane, int part, const at::Tensor& slot) const;
  /// Null: peers cannot copy. Its fences are those of all planes.
  const PeerBuffer* peers() const { return planes_[kRows].peers.get(); }
  /// Makes the derived columns of gathered rows, both [slot_nbytes] uint8.
  void derive(int part, const at::Tensor& rows, const at::Tensor& columns)
      const;

  /// Parameter `i` in a slot that holds `part` of the plane. Rows and stored
  /// columns have data [out, in], derived columns [in, out]; scales as
  /// float8::Plane says.
  float8::Plane
  view(Plane plane, std::int64_t i, int part, const at::Tensor& slot) const;
  /// All of the plane rests on this rank, and no slot holds it.
  bool rests_whole(Plane plane) const {
    return options_.resident && stores(plane);
  }
  /// Then: what others have in a slot.
  const at::Tensor& resting(Plane plane) const {
    return planes_[plane].resting.local();
  }
  /// Not defined where planes do not rest.
  const FlatBuffer& stored(Plane plane) const {
    return rests() ? planes_[plane].resting : nowhere_;
  }
  /// The mesh has other communicators now.
  void use_mesh();

 private:
  /// A stored plane.
  struct Stored {
    /// uint8, parameter placement; without memory where planes do not rest.
    FlatBuffer resting;
    std::unique_ptr<PeerBuffer> peers;  ///< owns resting, where peers copy it
    FlatBuffer shard;  ///< optimizer placement; a view where it can be
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
  Part part_at(int part) const {
    return part == kWhole ? whole() : parts_.at(part);
  }
  void build_stored(Stored& stored) const;
  const Redistribution& way_of(Plane plane, int part);
  void build_parts();
  void build_scales();
  at::Tensor scales_of(const at::Tensor& all, Plane plane, std::int64_t i)
      const;
  void find_amax(const FlatBuffer& main, const at::Tensor& amax) const;
  /// Over the ranks that have other rows.
  void reduce_amax(const Placements& of_main);
  /// Null: there are none.
  Communicator* group_of_amax(const Placements& of_main) const;
  /// Into where it rests, by amax_ and scales_.
  void quantize_stored(const FlatBuffer& main, Plane plane);
  /// @param to     bytes of the plane, from byte `begin` of this rank's on.
  void quantize_piece(
      const FlatBuffer& main,
      Plane plane,
      std::int64_t i,
      const Piece& piece,
      const at::Tensor& to,
      std::int64_t begin);
  /// Whether parameter `i` is finite on this rank. Blocks the host.
  bool is_finite(const FlatBuffer& main, std::int64_t i) const;
  float8::FlatRun flat_run(std::int64_t i, const Piece& piece) const;
  void quantize_piece(
      const FlatBuffer& main,
      const at::Tensor& amax,
      Plane plane,
      std::int64_t i,
      const Piece& piece);

  const GroupContext& context_;
  Options options_;
  FlatBuffer nowhere_;
  std::shared_ptr<const FlatLayout> layout_;  ///< of a plane's bytes
  std::vector<Part> parts_;
  std::array<Stored, 2> planes_;
  std::vector<ScaleOffsets> scale_offsets_;
  std::vector<std::int64_t> extra_offsets_;  ///< rowwise, derived: see .cpp
  std::int64_t extra_nbytes_ = 0;
  at::Tensor scales_;  ///< float32, of both planes; undefined with mxfp8
  /// What scales_ come from, while planes are made of it.
  at::Tensor amax_;
  std::optional<Float8Outputs> outputs_;  ///< made at their first use
};

}  // namespace flatshard
