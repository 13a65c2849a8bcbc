#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/peer_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/device/stream.h"
#include "flatshard/group/gather_progress.h"
#include "flatshard/group/group_options.h"
#include "flatshard/group/plane.h"
#include "flatshard/group/post_forward_shard.h"
#include "flatshard/group/weight_readers.h"

namespace flatshard {

/// The weights of a ParamGroup: their planes, and what keeps them equal.
///
/// | weights       | dtype       | placement | contents                       |
/// |---------------|-------------|-----------|--------------------------------|
/// | main          | main_params | optimizer | what the optimizer updates     |
/// | compute       | compute     | parameter | all-gathered for kernels;      |
/// |               |             |           | see keep_compute_weights       |
/// | rows, columns | FP8         | parameter | with ParamGroupOptions::float8 |
/// |               |             |           | instead of compute; encoded    |
/// |               |             |           | again by the next all-gather   |
/// |               |             |           | or started by the update       |
///
/// All planes except main are computed from it by a Codec. If main and compute
/// have one dtype they share memory, as they do in a frozen group. With
/// ParamGroupOptions::offload main (a frozen group's too, in compute's dtype)
/// is in host memory and shares none. Without ParamGroupOptions::has_weights
/// main is on the meta device, and there are no planes.
///
/// GatherProgress has the version of them that was all-gathered, and
/// WeightReaders the possible readers. Only WeightWrite writes them.
class WeightPlanes {
 public:
  /// @param context  outlives this.
  explicit WeightPlanes(const GroupContext& context);
  WeightPlanes(const WeightPlanes&) = delete;
  WeightPlanes& operator=(const WeightPlanes&) = delete;

  /// Returns the planes by PlaneId. A plane that has nothing of this group is
  /// empty.
  const std::vector<Plane>& planes() const { return planes_; }
  bool has(PlaneId plane) const { return context_.plan.has(plane); }
  /// [shard] main weights; frozen groups: the compute weights.
  const FlatBuffer& main() const { return main_; }
  /// Returns the same on the mesh's device: a copy, queued on the current
  /// stream, where main is in host memory.
  FlatBuffer main_on_device() const;
  /// Returns the stored part of the compute plane. Not defined when nothing is
  /// stored.
  const FlatBuffer& compute() const { return planes_[kComputePlane].resting; }
  /// [shard] the slice of the compute weights that belongs to `main`. The
  /// optimizer may write it together with main. Undefined if main is that
  /// slice, or if no such slice is stored.
  at::Tensor compute_shard() const;
  /// Returns null if the group has no post-forward shard.
  const PostForwardShard* post_forward() const { return post_forward_.get(); }
  /// Returns what the optimizer may encode in its pass over main. Null:
  /// nothing.
  const PlaneWriter* writer();
  /// Returns what is stored, and how it is kept equal to main.
  const StoragePlan& storage() const { return context_.plan.storage; }
  /// StoragePlan::encodes: the optimizer fills writer() or nothing.
  bool encodes_at_gather() const { return storage().encodes; }
  bool resident() const { return storage().resident(); }
  /// Returns whether all of the plane is in Plane::resting and needs no slot.
  bool rests_whole(PlaneId plane) const {
    return context_.plan.rests_whole(plane);
  }
  bool has_refresh() const { return storage().has_refresh(); }

  /// How one all-gather runs: decided on the host, carried out later on the
  /// gather stream.
  struct Gather {
    /// The first all-gather after a change of weights: GatherProgress::wait.
    bool is_first = false;
    /// First bring the stored planes up to date with main. Collective.
    bool refresh = false;
    /// Refresh: what the optimizer encoded in the pass that wrote main.
    const PlaneWriter* encoded = nullptr;
    /// Copies of the peers' shards, by copy engines on GPUs; else an
    /// all-gather, a collective.
    bool from_peers = false;
    /// Before the copies: all peers have finished writing. Collective.
    bool fence = false;
  };
  /// Call it once per all-gather and then carry that out: a change of the
  /// weights is planned only once.
  /// @param from_peers  where the peers can read; equal on all ranks.
  Gather plan_gather(bool from_peers = false);
  /// Carries it out for a stored plane, or for one part of it. Inside
  /// Stream::submit.
  /// @param out  [PlanePart::nbytes] of the plane's dtype. Resident groups do
  ///   not use it: their weights are in Plane::resting.
  void gather(
      PlaneId plane,
      PartId part,
      const at::Tensor& out,
      const Gather& gather);
  /// Derives a plane, or one part of it, from the all-gathered data of its
  /// source. On the current stream.
  void derive(
      PlaneId plane,
      PartId part,
      const at::Tensor& from,
      const at::Tensor& to) const;
  /// Parameter `i` of the group in a slot that contains `part` of the plane.
  PlaneView view(
      PlaneId plane,
      PartId part,
      std::int64_t i,
      const at::Tensor& slot) const {
    return codec_->view(planes_[plane], part, i, slot);
  }
  std::optional<float8::Recipe> recipe() const { return codec_->recipe(); }
  float8::WeightOperand operand(PlaneId plane, PlaneView view) const {
    return codec_->operand(planes_[plane], std::move(view));
  }

  /// Their version, and the latest version that was all-gathered.
  GatherProgress& progress() { return progress_; }
  std::int64_t version() const { return progress_.version(); }
  WeightReaders& readers() { return readers_; }

  /// If another writer changed main (in place, through a tensor operation),
  /// encodes the other planes again and returns true. On the current stream.
  bool adopt_foreign_writes();
  /// Called after other code wrote main in a way that no tensor's version
  /// shows.
  void mark_foreign_write() { seen_ = main_.local()._version() - 1; }

  /// The mesh has other communicators now.
  void use_mesh();
  /// The values of new weights are in main: the first version.
  void initialized() {
    end_write(*current_stream(context_.mesh->device()), Written::main_to_cast);
  }

  struct Bytes {
    std::int64_t main = 0, compute = 0;
  };
  Bytes nbytes() const;

 private:
  friend class WeightWrite;
  /// The planes that a write wrote.
  enum class Written {
    main,          ///< and failed on the way, perhaps
    main_to_cast,  ///< the other planes are made from it, in the write's stream
    all,           ///< compute_shard() and writer() as well
  };
  /// Work that `stream` has queued wrote weights.
  void end_write(Stream& stream, Written written);
  void allocate(Plane& plane) const;
  /// Encodes main where the writer does it. On the current stream.
  void encode_written();
  void refresh(const PlaneWriter* encoded);
  void plan_ways();
  const Redistribution& way_of(const Plane& plane, PartId part);
  /// Returns null when no peer copies these weights.
  const PeerBuffer* peers() const;

  const GroupContext& context_;
  std::unique_ptr<Codec> codec_;
  std::vector<Plane> planes_;
  FlatBuffer main_;
  std::unique_ptr<PostForwardShard> post_forward_;
  // Planned by the first plan_gather, where they are used; stored planes have
  // one layout.
  std::optional<Redistribution> spread_;
  std::vector<std::optional<Redistribution>> gathers_;  ///< of all, of parts

  GatherProgress progress_;
  mutable WeightReaders readers_;
  std::uint32_t seen_ = 0;  ///< main's tensor version, after our last write
};

}  // namespace flatshard
