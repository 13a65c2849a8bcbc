#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace flatshard {

class Unit;

/// Which transfers are copies between the memory of the ranks instead of
/// collectives. On GPUs copy engines make them, and leave the SMs to what
/// computes. All ranks of each group on one host.
///
/// A gather by copies takes no peer's doing, so nothing but a later collective
/// tells a rank that its weights were read: a backward's reductions do, and
/// where there were none (after an evaluation) WeightReaders::wait.
/// Optimizers and checkpoints call it before they write; whoever else writes
/// weights does, too.
struct CopyEngines {
  enum class Gathers { none, forward, all };
  /// Not with ParamGroupOptions::keep_compute_weights = false.
  Gathers gathers = Gathers::none;
  /// Reduce-scatters go through about so many bytes on each rank, for each
  /// group of ranks that has any; 0: they are collectives.
  std::int64_t reductions_nbytes = 0;

  /// On eight GPUs that makes pieces of 16 MiB from each to each.
  static constexpr std::int64_t kReductionsNbytes = std::int64_t{256} << 20;
  static CopyEngines all() { return {Gathers::all, kReductionsNbytes}; }

  bool gather() const { return gathers != Gathers::none; }
  bool any() const { return gather() || reductions_nbytes > 0; }
};

/// Gives the groups of `units` a mesh like `mesh`, the model's, that has peer
/// memory where their gathers and reductions need it. `mesh` itself, and who
/// else uses it, stay as they are. Collective where anything is asked for.
/// @param stream  of the copies.
/// @return  that mesh; `mesh` where nothing is asked for.
/// @throws Error{config, memory} as PeerMemory::create.
std::shared_ptr<Mesh> use_copy_engines(
    std::shared_ptr<Mesh> mesh,
    const std::vector<std::unique_ptr<Unit>>& units,
    const CopyEngines& copy_engines,
    const StreamOptions& stream);

}  // namespace flatshard
