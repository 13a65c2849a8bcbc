#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/peer_buffer.h"
#include "flatshard/float8/float8_matmul.h"
#include "flatshard/group/group_options.h"
#include "flatshard/group/plane_writer.h"
#include "flatshard/shape/group_plan.h"

namespace flatshard {

/// One representation of a group's weights for kernels to read, with this
/// rank's part of it. Its index in WeightPlanes::planes is its PlaneId.
struct Plane : PlaneShape {
  at::ScalarType dtype = at::kFloat;  ///< of the elements of `layout`

  /// [local] parameter placement. Undefined: not stored between all-gathers.
  FlatBuffer resting;
  std::unique_ptr<PeerBuffer> peers;  ///< owns `resting`, where peers copy it
  /// The slice of `resting` that belongs to main weights; mostly a view. It has
  /// no memory (meta) where nothing is stored.
  FlatBuffer shard;
};

/// One parameter in a plane.
struct PlaneView {
  at::Tensor data;
  at::Tensor scales;  ///< undefined: `data` are the values
};

/// Returns the planes of a group's plan, without memory.
std::vector<Plane> planes_of(const GroupContext& context);

/// Computes the planes of one group from its main weights. One codec computes
/// all of them, since they may share scales. StoragePlan::encodes decides when.
class Codec {
 public:
  virtual ~Codec() = default;

  /// Creates the communicators that `begin` needs and the mesh lacks.
  /// Collective where there are any; on the host.
  virtual void plan() {}
  /// Finds what the planes of new main weights share. Collective; on the
  /// current stream, as all below.
  /// @param main     on the mesh's device.
  /// @param encoded  what the writer of `main` filled; null: nothing. The
  ///   planes are the same, bit for bit.
  virtual void begin(
      [[maybe_unused]] const FlatBuffer& main,
      [[maybe_unused]] const PlaneWriter* encoded) {}
  /// Encodes this rank's main weights of `part`.
  /// @param plane  stored.
  /// @param to     what `plane.shard` has of the part.
  virtual void encode(
      const Plane& plane,
      PartId part,
      const FlatBuffer& main,
      const at::Tensor& to) = 0;
  /// All stored planes are encoded, on every rank.
  /// @param all_encoded  false: nothing is stored, each all-gather encodes.
  /// @throws Error{usage} naming a parameter that cannot be encoded.
  virtual void end(
      [[maybe_unused]] const FlatBuffer& main,
      [[maybe_unused]] bool all_encoded) {}

  /// Derives `part` of a plane from the all-gathered data of its source.
  virtual void derive(
      const Plane& plane,
      PartId part,
      const Plane& source,
      const at::Tensor& from,
      const at::Tensor& to) const;
  /// Returns a parameter in a slot that contains `part` of the plane.
  /// @param slot  [part.nbytes] bytes, of the plane's dtype.
  virtual PlaneView view(
      const Plane& plane,
      PartId part,
      std::int64_t parameter,
      const at::Tensor& slot) const = 0;
  /// Returns the encoding of the planes; absent: plain values.
  virtual std::optional<float8::Recipe> recipe() const { return std::nullopt; }
  /// Returns a view as a matmul of a layer reads it.
  virtual float8::WeightOperand operand(const Plane& plane, PlaneView view)
      const;

  /// Returns the parts of the planes that a writer of main weights can make in
  /// its pass. Null: nothing.
  virtual const PlaneWriter* writer(
      const FlatBuffer& /*main*/,
      const std::vector<Plane>& /*planes*/) {
    return nullptr;
  }
  /// Returns this rank's bytes in addition to planes.
  virtual std::int64_t nbytes() const { return 0; }
};

/// One plane in Precision::compute. Where main weights have that dtype too it
/// is main weights itself, and nothing is encoded.
class CastCodec : public Codec {
 public:
  /// @param context  outlives this.
  explicit CastCodec(const GroupContext& context) : context_(context) {}

  void encode(
      const Plane& plane,
      PartId part,
      const FlatBuffer& main,
      const at::Tensor& to) override;
  PlaneView view(
      const Plane& plane,
      PartId part,
      std::int64_t parameter,
      const at::Tensor& slot) const override;

 private:
  const GroupContext& context_;
};

/// Returns the codec for the group's options.
std::unique_ptr<Codec> make_codec(const GroupContext& context);

}  // namespace flatshard
