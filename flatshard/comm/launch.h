#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard {

/// Who this process is among the ranks of a job.
struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< index on this machine, which GPU to take
  std::string master_addr;
  std::uint16_t master_port = 0;
  /// torchrun already serves the store at master_addr:master_port.
  bool launcher_serves_store = false;
  /// How often torchrun has restarted the ranks; its store outlives them.
  int restart_count = 0;
  /// The numbers are Slurm's.
  bool from_slurm = false;
  /// A listening socket on master_port inherited from the launcher; -1: none.
  int master_listen_fd = -1;
};

/// True when a launcher started this process: RANK is set (torchrun, our own
/// launcher) or SLURM_PROCID together with more than one SLURM_NTASKS.
bool launched_by_environment();

/// True in a rank that spawn_local_ranks started.
bool launched_by_this_program();

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, else
/// SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID; there MASTER_ADDR defaults to
/// the first host of SLURM_JOB_NODELIST and MASTER_PORT to a port made of
/// SLURM_JOB_ID. Without either: one rank, no address.
/// @throws Error{config} naming the variable that is missing or wrong.
RankEnvironment rank_environment_from_env();

/// Who tells the user why a job failed. Of the ranks that `spawn_local_ranks`
/// started, true for the first that asks and false for all later ones, whose
/// errors repeat it or follow from it. In any other process always true.
///
/// @param patience_ms  waits this long for another rank to ask first: for
///   errors that say no more than that a peer is gone.
bool claim_failure_report(int patience_ms = 0);

/// First host of a Slurm node list such as "gpu[007-9,12],login1".
std::string first_slurm_host(const std::string& nodelist);

struct SpawnOptions {
  /// Time between SIGTERM and SIGKILL when the others are ended.
  int grace_period_ms = 5000;
  /// Lines that other ranks than 0 write to standard error get "[rank N] "
  /// before them, unless they say "[rank N/" themselves. Those of rank 0 pass
  /// unchanged; a terminal stays its own: its last message is not repeated.
  bool prefix_stderr = true;
  /// Standard output of ranks other than 0: pass through or drop.
  bool other_ranks_stdout = true;
};

/// Runs this same program `nproc` times with torchrun's variables set, and
/// waits for all of them. `argv` is main's own.
///
/// Call it before any call into torch: it forks. The port is found free on
/// loopback and stays bound by this process; rank 0 inherits the socket.
/// SIGINT, SIGTERM and SIGUSR1 go to all ranks, which ignore SIGUSR1 unless
/// they do something with it. When one rank fails, the rest are ended
/// (SIGTERM, then SIGKILL) and the first failure is written to standard error
/// with its rank, exit code or signal, and last message, unless a rank has said
/// why itself (claim_failure_report). Ranks die with this process, also when it
/// is killed.
///
/// @param signalled  if not null: whether SIGINT, SIGTERM or SIGHUP came, so
///   that the ranks were to end. The result is 128 + that signal then.
/// @return 0, or the first failing rank's exit code (128 + signal).
int spawn_local_ranks(
    int nproc,
    const std::vector<std::string>& argv,
    const SpawnOptions& options = {},
    bool* signalled = nullptr);

}  // namespace flatshard
