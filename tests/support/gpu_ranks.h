#pragma once

#include "flatshard/comm/store.h"
#include "flatshard/launch/environment.h"
#include "flatshard/mesh/mesh.h"

#include <memory>
#include <string>
#include <vector>

namespace flatshard::testing {

/// GPUs that a program started here can use, by /dev and CUDA_VISIBLE_DEVICES:
/// without a call into CUDA, so that ranks can be forked.
int num_visible_gpus();

/// This process as one rank of a test over NCCL, one rank per GPU.
struct GpuRanks {
  RankEnvironment environment;
  StoreHandle store;  ///< null for one rank
  at::Device device{at::kCUDA, 0};

  int rank() const { return environment.rank; }
  int world() const { return environment.world_size; }
  /// Returns a mesh over all ranks. Each call needs another name.
  std::shared_ptr<Mesh> mesh(
      std::vector<MeshAxis> axes,
      const std::string& name,
      std::shared_ptr<CollectiveLog> log = nullptr) const;
};

/// Filled by gpu_ranks_main. If there is no GPU, it is one rank that nothing
/// can use.
const GpuRanks& gpu_ranks();

/// main of a GoogleTest program over NCCL. By default, it starts itself once
/// per GPU of the machine; under torchrun or Slurm it is one of their ranks.
int gpu_ranks_main(int argc, char** argv);

}  // namespace flatshard::testing
