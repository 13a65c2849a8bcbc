#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/group/param_group.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/optim/optimizer.h"

namespace flatshard {

struct LoadOptions {
  /// The ranks that load together. Null: the ranks of the model's mesh.
  std::shared_ptr<Mesh> mesh;
  /// Shell patterns over parameter names such as "lm_head.*": these parameters
  /// are neither required in the checkpoint nor changed in the model. Their
  /// data in the checkpoint is ignored.
  std::vector<std::string> exclude;
  /// Threads of this rank that read and check; 0: this machine's cores over
  /// the ranks of the mesh, from 2 to 16.
  int num_threads = 0;
  /// Tensors of the model in addition to its groups; overwritten like weights.
  std::vector<WholeTensor> whole_tensors;
};

/// The contents of a checkpoint in addition to its tensors.
struct LoadedCheckpoint {
  std::int64_t step = 0;
  std::map<std::string, std::string> state;
  std::uint64_t read_nbytes = 0;  ///< by this rank
  double read_seconds = 0;        ///< on this rank, with all checks
};

/// Reads a checkpoint into the shards of this rank. Names, shapes and dtypes
/// must match; world size, mesh and strategy of the writer may differ. Each
/// rank reads only what it owns, in complete digest blocks. Collective; blocks
/// until all ranks have loaded.
///
/// Everything is read and checked, on all ranks, before the first element of
/// the model changes. Until then it is in host memory: as many bytes as this
/// rank's shards of main weights and optimizer state.
///
/// @param folder     a step-N folder.
/// @param groups     of the runtime, frozen ones as well.
/// @param optimizer  null: weights only; the checkpoint's optimizer state is
///   ignored.
/// @throws Error{io} or Error{format} on every rank, naming file, tensor, what
/// was expected and what was found: a missing or unexpected tensor, another
/// shape or dtype, a damaged, truncated or foreign file.
LoadedCheckpoint load_checkpoint(
    const std::filesystem::path& folder,
    const std::vector<ParamGroup*>& groups,
    Optimizer* optimizer,
    const LoadOptions& options = {});

}  // namespace flatshard
