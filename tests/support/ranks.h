#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "flatshard/comm/store.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard::testing {

/// The environment of a rank of a test.
struct RankContext {
  int rank = 0;
  int world = 1;
  StoreHandle store;
  /// All collectives of meshes made by `mesh` are appended here.
  std::shared_ptr<CollectiveLog> log;
  std::vector<MeshAxis> axes;
  /// Makes the communicators of the meshes made by `mesh`. Threads:
  /// make_thread_communicator.
  MakeCommunicator make_communicator;

  /// Returns a CPU mesh over all ranks of the test. Each call of a test needs
  /// another name, since the store is shared. All ranks call it in the same
  /// order. It has no watcher: tests/faults has those.
  std::shared_ptr<Mesh> mesh(
      std::vector<MeshAxis> axes,
      const std::string& name = "mesh") const;
  /// Returns a communicator over all of them through Gloo. Each call needs
  /// another name.
  std::shared_ptr<Communicator> gloo(const std::string& name) const;
  /// Over `axes`, or else one axis "dp" over all ranks.
  std::shared_ptr<Mesh> mesh() const {
    return mesh(axes.empty() ? std::vector<MeshAxis>{{"dp", world}} : axes);
  }
};

/// How long a rank waits for its peers before the test fails.
inline constexpr std::chrono::seconds kPeerTimeout{60};

/// Runs `function` for `world` ranks, each on its own thread with one ATen
/// thread, over memory and a shared store. When ranks throw, the first
/// exception is rethrown as an Error whose context names the rank. Ranks that
/// wait for it fail when its communicators go.
///
/// Threads share torch's default generator: use explicit ones.
void run_ranks(int world, const std::function<void(RankContext&)>& function);

/// How a rank process ended.
struct RankOutcome {
  int exit_code = 0;  ///< 0: `function` returned and no expectation failed
  int signal = 0;     ///< not 0: it was ended by this signal
  bool operator==(const RankOutcome&) const = default;
};

/// Runs `function` in `world` forked processes over a TCP store on loopback
/// and returns how each ended. Exceptions go to standard error and give exit
/// code 1, failed GoogleTest expectations exit code 2. Ranks that stopped
/// themselves are killed when the others have ended; after `timeout` all are.
///
/// The calling process must have one thread: keep such tests in a separate
/// program, apart from run_ranks.
std::vector<RankOutcome> rank_process_outcomes(
    int world,
    const std::function<void(RankContext&)>& function,
    std::chrono::seconds timeout = std::chrono::seconds(120));

/// The same; throws Error{comm} naming the ranks that did not end well.
void run_rank_processes(
    int world,
    const std::function<void(RankContext&)>& function);

}  // namespace flatshard::testing
