#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/peer_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/device/stream.h"
#include "flatshard/group/float8_planes.h"
#include "flatshard/group/gather_progress.h"
#include "flatshard/group/group_options.h"
#include "flatshard/group/post_forward_shard.h"
#include "flatshard/group/weight_readers.h"

namespace flatshard {

/// One representation of a group's weights: what this rank holds of it. Plain
/// data, for reports and checks.
struct WeightPlane {
  /// Where its values come from.
  enum class Origin {
    stored,   ///< it is what the optimizer updates
    derived,  ///< cast from the stored one when that was written
  };
  std::string_view name;
  Origin origin = Origin::stored;
  at::ScalarType dtype = at::kFloat;
  const FlatBuffer* data = nullptr;  ///< not defined: it rests nowhere
};

/// The weights of a ParamGroup: their planes, and what keeps them equal.
///
/// | plane   | dtype       | placement | holds                              |
/// |---------|-------------|-----------|------------------------------------|
/// | main    | main_params | optimizer | what the optimizer updates         |
/// | compute | compute     | parameter | what is gathered for the kernels;  |
/// |         |             |           | see keep_compute_weights           |
///
/// With ParamGroupOptions::float8 there is no compute plane but Float8Planes:
/// rows and columns, made anew by the first gather after a change, or begun by
/// the optimizer's update (float8_outputs).
///
/// Without ParamGroupOptions::has_weights main is on the meta device and there
/// is no other plane. When both have one dtype they share memory. A frozen
/// group has one plane, compute. With ParamGroupOptions::offload main (a frozen
/// group's too, in compute's dtype) is in host memory and shares none.
///
/// Which version of them was gathered is GatherProgress; who may still read
/// them is WeightReaders. They are written by WeightWrite, and by nobody else.
class WeightPlanes {
 public:
  /// @param context  outlives this.
  explicit WeightPlanes(const GroupContext& context);
  WeightPlanes(const WeightPlanes&) = delete;
  WeightPlanes& operator=(const WeightPlanes&) = delete;

  /// main first.
  std::vector<WeightPlane> planes() const;
  /// [shard] main weights; frozen groups: the compute weights.
  const FlatBuffer& main() const { return main_; }
  /// The same on the mesh's device: a copy, queued on the current stream, where
  /// main is in host memory.
  FlatBuffer main_on_device() const;
  /// Not defined when compute weights are not kept.
  const FlatBuffer& compute() const { return compute_; }
  /// Null: weights are gathered in compute's dtype.
  const Float8Planes* float8() const { return float8_.get(); }
  /// [shard] the slice of the compute weights that belongs to `main`; the
  /// optimizer may write it together with main. Undefined when main is that
  /// slice or when there is none.
  at::Tensor compute_shard() const;
  /// Null: there is none.
  const PostForwardShard* post_forward() const { return post_forward_.get(); }
  /// What the optimizer may write in its pass over main: see
  /// Float8Planes::outputs. Null: nothing.
  const Float8Outputs* float8_outputs();

  /// True when compute weights rest whole on every rank.
  bool resident() const { return resident_; }
  /// True when the ranks hold pieces that a change of the weights has to spread
  /// (ZeRO-1/2, HFSDP).
  bool has_refresh() const { return has_refresh_; }

  /// How one gather runs: decided on the host, carried out later on the gather
  /// stream.
  struct Gather {
    /// No gather since the last change of the weights: GatherProgress::wait.
    bool is_first = false;
    /// First spread the optimizer's slices to `compute`. Collective.
    bool refresh = false;
    /// Refresh: the optimizer wrote float8_outputs together with main.
    bool float8_begun = false;
    /// By copies of what the peers hold, which on GPUs copy engines make; else
    /// an all-gather, a collective.
    bool copy_engines = false;
    /// Before the copies: the peers have written theirs. Collective.
    bool fence = false;
  };
  /// Call it once per gather and then carry that out: what it plans for a
  /// change of the weights it does not plan again.
  /// @param copy_engines  where the peers can read; equal on all ranks.
  Gather plan_gather(bool copy_engines = false);
  /// Carries it out. Inside Stream::submit.
  /// @param out  [layout.numel()] compute dtype, the whole weights. Resident
  ///   groups do not use it: theirs are in `compute`.
  void gather(const at::Tensor& out, const Gather& gather);
  /// The same of a stored plane of float8(), or of one part of it.
  /// @param out  [Float8Planes::slot_nbytes] uint8. Resident groups do not use
  ///   it.
  void gather(
      Float8Planes::Plane plane,
      int part,
      const at::Tensor& out,
      const Gather& gather);

  /// Their version, and up to which one they were gathered.
  GatherProgress& progress() { return progress_; }
  std::int64_t version() const { return progress_.version(); }
  WeightReaders& readers() { return readers_; }

  /// When somebody else wrote main (in place, through a tensor operation),
  /// makes the other planes anew and says so. On the current stream.
  bool adopt_foreign_writes();
  /// Somebody else wrote main in a way that no tensor's version shows.
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
  /// main -> compute's slice of it. On the current stream.
  void cast();
  /// What a write wrote.
  enum class Written {
    main,          ///< and failed on the way, perhaps
    main_to_cast,  ///< the other planes are made from it, in the write's stream
    all,           ///< compute_shard() and float8_outputs() as well
  };
  /// What `stream` has queued wrote weights.
  void end_write(Stream& stream, Written written);
  void plan_ways();
  void unshard(const at::Tensor& out);
  /// Null: nobody copies these weights.
  const PeerBuffer* peers() const;

  const GroupContext& context_;
  bool resident_ = true;
  bool has_refresh_ = false;
  bool main_is_compute_ = false;
  std::unique_ptr<PeerBuffer> peers_;  ///< owns compute_, where there is one
  std::unique_ptr<Float8Planes> float8_;
  std::unique_ptr<PostForwardShard> post_forward_;
  FlatBuffer compute_;
  FlatBuffer compute_shard_;  ///< optimizer placement; mostly a view
  FlatBuffer main_;
  // Planned by the first plan_gather, where they are used.
  std::optional<Redistribution> refresh_;
  std::optional<Redistribution> gather_;

  GatherProgress progress_;
  mutable WeightReaders readers_;
  std::uint32_t seen_ = 0;  ///< main's tensor version, after our last write
};

}  // namespace flatshard
