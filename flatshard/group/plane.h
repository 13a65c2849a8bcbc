#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/peer_buffer.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/group/float8_outputs.h"
#include "flatshard/group/group_options.h"
#include "flatshard/schedule/plane_set.h"

namespace flatshard {

/// Neighbouring segments of a plane's layout that are gathered together: all of
/// it, or a run that can be gathered alone.
struct PlanePart {
  std::int64_t first_parameter = 0;
  std::int64_t num_parameters = 0;
  std::int64_t first_segment = 0;
  std::int64_t num_segments = 0;
  std::int64_t offset = 0;  ///< of the first element, in the plane's layout
  std::shared_ptr<const FlatLayout> layout;  ///< of these segments alone
  std::int64_t nbytes = 0;                   ///< of the slot that holds it
};

/// One representation of a group's weights for kernels to read. Its index in
/// WeightPlanes::planes is its PlaneId.
struct Plane {
  std::string_view name;
  /// The plane that each rank derives it from, once that is gathered. kStored:
  /// it is encoded from main weights and gathered.
  PlaneId source = kStored;
  /// Its readers: products that sum over a weight's rows, over its columns, or
  /// both.
  bool in_forward = true;
  bool in_backward = true;
  /// Layers ask for it (nn::WeightSource); no parameter points at it.
  bool on_request = false;

  at::ScalarType dtype = at::kFloat;  ///< of the elements of `layout`
  /// Null: the plane has nothing of this group.
  std::shared_ptr<const FlatLayout> layout;
  PlanePart whole;
  std::vector<PlanePart> parts;  ///< by PartId; none: only gathered whole

  // This rank's part of it: WeightPlanes.

  /// [local] parameter placement. Undefined: nothing is stored between gathers.
  FlatBuffer resting;
  std::unique_ptr<PeerBuffer> peers;  ///< owns `resting`, where peers copy it
  /// The slice of `resting` that belongs to main weights; mostly a view. It has
  /// no memory (meta) where nothing is stored.
  FlatBuffer shard;

  bool empty() const { return layout == nullptr; }
  bool stored() const { return !empty() && source == kStored; }
  const PlanePart& part(PartId id) const {
    return id == kWhole ? whole : parts.at(id);
  }
};

/// How the planes of one group come from its main weights. One codec makes all
/// of them, since they may share scales.
class Codec {
 public:
  virtual ~Codec() = default;

  /// Returns the group's planes, without memory.
  virtual std::vector<Plane> planes() const = 0;
  /// true: the first gather after a change of main weights encodes them, since
  /// that may ask other ranks. false: the writer of main weights does, on its
  /// stream.
  virtual bool encodes_at_gather() const = 0;

  /// Makes the communicators that `begin` needs and the mesh has not.
  /// Collective where there are any; on the host.
  virtual void plan() {}
  /// Finds what the planes of new main weights share. Collective; on the
  /// current stream, as all below.
  /// @param main   on the mesh's device.
  /// @param begun  a writer of `main` has filled `outputs`. The planes are the
  ///   same, bit for bit.
  virtual void begin(
      [[maybe_unused]] const FlatBuffer& main,
      [[maybe_unused]] bool begun) {}
  /// Encodes this rank's main weights of `part`.
  /// @param plane  stored.
  /// @param to     what `plane.shard` has of the part.
  virtual void encode(
      const Plane& plane,
      PartId part,
      const FlatBuffer& main,
      const at::Tensor& to) = 0;
  /// All stored planes are encoded, on every rank.
  /// @param all_encoded  false: nothing is stored, each gather encodes.
  /// @throws Error{usage} naming a parameter that cannot be encoded.
  virtual void end(
      [[maybe_unused]] const FlatBuffer& main,
      [[maybe_unused]] bool all_encoded) {}

  /// Makes `part` of a plane of what was gathered of its source.
  virtual void derive(
      const Plane& plane,
      PartId part,
      const Plane& source,
      const at::Tensor& from,
      const at::Tensor& to) const;
  /// Returns a parameter in a slot that holds `part` of the plane.
  /// @param slot  [part.nbytes] bytes, of the plane's dtype.
  virtual float8::Plane view(
      const Plane& plane,
      PartId part,
      std::int64_t parameter,
      const at::Tensor& slot) const = 0;

  /// Returns the parts of the planes that a writer of main weights can make in
  /// its pass, to be zero before it. Null: nothing.
  virtual const Float8Outputs* outputs(
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

  std::vector<Plane> planes() const override;
  bool encodes_at_gather() const override { return false; }
  void encode(
      const Plane& plane,
      PartId part,
      const FlatBuffer& main,
      const at::Tensor& to) override;
  float8::Plane view(
      const Plane& plane,
      PartId part,
      std::int64_t parameter,
      const at::Tensor& slot) const override;

 private:
  const GroupContext& context_;
};

/// Returns the codec that the group's options ask for.
std::unique_ptr<Codec> make_codec(const GroupContext& context);

}  // namespace flatshard
