#pragma once

#include <cstdint>
#include <string>

namespace flatshard {

/// This process's place among the ranks of a job.
struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< index on this machine; selects the GPU
  std::string master_addr;
  std::uint16_t master_port = 0;
  /// torchrun already serves the store at master_addr:master_port.
  bool launcher_serves_store = false;
  /// Number of restarts by torchrun. Its store outlives the ranks.
  int restart_count = 0;
  /// Ranks of each machine; 0: unknown, or the numbers differ.
  int ranks_per_host = 0;
  /// The numbers come from Slurm.
  bool from_slurm = false;
  /// A listening socket on master_port inherited from the launcher; -1: none.
  int master_listen_fd = -1;
};

/// Returns true when a launcher started this process: RANK is set (torchrun,
/// Flatshard's launcher) or SLURM_PROCID together with more than one
/// SLURM_NTASKS.
bool launched_by_environment();

/// Returns how a Slurm job contradicts `--nproc`, with what to do, or an empty
/// text. On one node without a step of srun, `--nproc` starts the ranks itself.
/// @param nproc  as it was given; 0: it was not.
std::string slurm_conflict(int nproc);

/// Returns true if this process is the batch script of a Slurm job, before srun
/// has started its tasks: SLURM_NTASKS then counts ranks that were never
/// started.
bool in_slurm_batch_script();

/// Returns true in a rank that spawn_local_ranks started.
bool launched_by_this_program();

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and
/// LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE where they are set. Or else it reads
/// SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID, and SLURM_STEP_TASKS_PER_NODE
/// or SLURM_TASKS_PER_NODE. With these MASTER_ADDR defaults to the first host
/// of SLURM_JOB_NODELIST and MASTER_PORT to a port made of SLURM_JOB_ID.
/// Without either it returns one rank, no address.
/// @throws Error{config} naming the variable that is missing or wrong.
RankEnvironment rank_environment_from_env();

/// Returns the first host of a Slurm node list such as "gpu[007-9,12],login1".
std::string first_slurm_host(const std::string& nodelist);

}  // namespace flatshard
