#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flatshard/comm/communicator.h"
#include "flatshard/comm/store.h"
#include "flatshard/flight/recorder.h"
#include "flatshard/mesh/axes.h"
#include "flatshard/mesh/coordinates.h"

namespace flatshard {

/// The use of a communicator. Reductions have their own, so that a waiting one
/// does not delay an all-gather, and so has the exchange of tokens.
enum class Purpose { gather, reduce, exchange };

std::string_view to_string(Purpose purpose);

/// make_communicator, or what else makes a group of more than one rank.
using MakeCommunicator = std::function<std::shared_ptr<Communicator>(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& options)>;

struct MeshOptions {
  CommunicatorOptions communicator;
  /// Empty: make_communicator. Equal on all ranks.
  MakeCommunicator make_communicator;
  /// Collectives of all communicators are appended here; may be null.
  std::shared_ptr<CollectiveLog> log;
  /// Key prefix in the store. Two meshes over one store need different ones.
  std::string name = "mesh";
  /// Watch the ranks: one that is missing, late or differs is named on every
  /// rank within communicator.timeout, and the collectives that wait end with
  /// an Error. See FlightRecorder. Equal on all ranks.
  bool watcher = true;
  /// How long the watchers wait for each other in `create`.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);
  /// RankEnvironment::launcher_serves_store, for the watcher's messages.
  bool launcher_serves_store = false;
  /// When the communicators cannot be ended after a fault.
  OnStuckAbort on_stuck_abort;
};

/// A communicator for Mesh::with_communicators.
struct MeshGroup {
  std::vector<std::string> axes;
  std::shared_ptr<Communicator> communicator;
  Purpose purpose = Purpose::gather;
};

/// Ranks along named axes (MeshCoordinates), and a communicator for each set of
/// axes and purpose. A communicator's ranks are in shard order.
///
/// Axes of size 1 never communicate.
class Mesh : public MeshCoordinates {
 public:
  /// Builds the communicators: per axis, and over all axes when more than one
  /// is larger than 1. Collective: all ranks call it with equal axes.
  ///
  /// @param rank of this process (or thread) in the mesh, 0 <= rank < product
  ///   of the axis sizes.
  /// @throws Error{config} for bad axes, Error{timeout} when peers are missing.
  static std::shared_ptr<Mesh> create(
      std::vector<MeshAxis> axes,
      int rank,
      StoreHandle store,
      at::Device device,
      MeshOptions options = {});

  /// Returns a mesh of one process, without communication. One axis of size 1.
  static std::shared_ptr<Mesh> single(
      at::Device device,
      std::string axis_name = "dp");

  at::Device device() const;

  /// Returns this rank's group over `axes` (ascending, at least one). A
  /// set of axes that `create` did not build is built now,
  /// collectively: ask for it once at build time, in the same order on
  /// all ranks.
  Communicator& communicator(std::span<const int> axes, Purpose purpose);
  Communicator& communicator(int axis, Purpose purpose);
  /// Returns this rank's group of `size` adjacent ranks along `axis`: each
  /// `size` ranks in the order of the axis are one. Created at its first
  /// use, collectively: ask for it at build time, in the same order on all
  /// ranks.
  /// @throws Error{config} unless `size` divides the axis' size.
  Communicator& neighbours(int axis, std::int64_t size, Purpose purpose);
  /// Returns all groups for `purpose` that were made so far, also over axes
  /// that this mesh lacks: what work for that purpose may use. Empty on GPUs,
  /// where queue_collectives has nothing to do.
  std::vector<Communicator*> communicators(Purpose purpose) const;
  /// Returns the group over all axes.
  Communicator& world(Purpose purpose = Purpose::reduce);

  /// Returns the mesh over the named axes (in this mesh's order) at this rank's
  /// coordinates of the others. Shares this mesh's communicators.
  std::shared_ptr<Mesh> sub_mesh(const std::vector<std::string>& names) const;
  /// Returns the mesh over the axes of data (AxisRole) at this rank's
  /// coordinates of the others: its rank() and size() are this rank's data
  /// coordinate and the number of ranks that read different samples.
  /// @throws Error{config} for a mesh without such an axis.
  std::shared_ptr<Mesh> data_mesh() const;
  /// Returns the same for the axes of data and of sequences: its ranks read
  /// different tokens, and the gradient is the mean over them.
  std::shared_ptr<Mesh> token_mesh() const;

  /// This mesh with another communicator for each given group and purpose: over
  /// the same ranks in the same order. All else is shared, also with further
  /// sub-meshes. Collective.
  std::shared_ptr<Mesh> with_communicators(std::vector<MeshGroup> groups) const;

  /// Same axes of the same mesh.
  bool same_as(const Mesh& other) const;
  /// Returns whether the axes of this one are axes of `other`, of the same
  /// mesh.
  bool is_part_of(const Mesh& other) const;
  /// Returns the store of `create`: for messages outside the order of
  /// collectives, under a separate prefix. Null when there was none.
  const StoreHandle& store() const;
  /// Returns the bytes that the communicators of with_communicators use on the
  /// device.
  std::int64_t communicator_nbytes() const;
  /// Communicator::restart for all of them.
  void restart_communicators();
  /// Aborts every communicator.
  void abort();

  /// Returns null for one rank, or with MeshOptions::watcher off.
  const std::shared_ptr<FlightRecorder>& flight_recorder() const;
  /// Throws what the watcher found. A program on GPUs calls it after it waited
  /// for the device and before it trusts what it reads: an aborted collective
  /// ends without a result.
  void check() const;
  /// Returns whether the watcher has found a fault: every collective throws it
  /// from now on.
  bool has_verdict() const;
  /// The step that the watcher's reports name.
  void set_step(std::int64_t step);
  /// Reports to the other ranks at once that this one leaves with an exception.
  /// See FlightRecorder::publish_failure.
  void publish_failure(const std::string& message);

 private:
  struct Root;
  Mesh(std::shared_ptr<Root> root, std::vector<int> root_axes);
  std::shared_ptr<Mesh> sub_mesh_of(
      std::initializer_list<AxisRole> roles) const;

  using Groups = std::
      map<std::pair<std::vector<int>, Purpose>, std::shared_ptr<Communicator>>;

  std::shared_ptr<Root> root_;  // the communicators, shared by sub-meshes
  Groups own_;                  // with_communicators: replace the root's ones
  std::vector<int> root_axes_;
};

}  // namespace flatshard
