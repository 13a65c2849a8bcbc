#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace flatshard {

/// Returns whether this process reports to the user why a job failed. Among the
/// ranks that `spawn_local_ranks` started, this is true for the first that asks
/// and false for all later ones. Their errors repeat it or follow from it. In
/// any other process always true.
///
/// @param patience_ms  waits this long for another rank to ask first: for
///   errors that only report a lost peer.
bool claim_failure_report(int patience_ms = 0);

/// Returns whether this process writes once for all of a job that nothing reads
/// their output any more (keep_output_in). Among the processes that
/// `spawn_local_ranks` started, this is true for the first that asks. In any
/// other process always true.
bool claim_output_notice();

/// Runs this same program `nproc` times with torchrun's variables set, and
/// waits for all of them. `argv` is main's own.
///
/// Call it before any call into torch: it forks. The port is found free on
/// loopback and stays bound by this process; rank 0 inherits the socket.
/// SIGINT, SIGTERM, SIGHUP and SIGUSR1 go to all ranks, unless the parent had
/// them ignored. SIGUSR1 is blocked in the ranks until they unblock it. A
/// second SIGINT or SIGTERM ends the ranks at once (SIGTERM, then SIGKILL).
/// When one rank fails, the rest are ended (SIGTERM, then SIGKILL). The first
/// failure is written to standard error with its rank, exit code or signal, and
/// last message. A rank that has reported it itself (claim_failure_report)
/// prevents that. Ranks die with this process, also when it is killed.
///
/// "[rank N] " is prepended to the lines that ranks other than 0 write to
/// standard error, unless they already start with "[rank N/". Lines of rank 0
/// pass unchanged.
/// A terminal stays its own: its last message is not repeated.
///
/// @param signalled  if not null: whether SIGINT, SIGTERM or SIGHUP came, so
///   that the ranks were to end. The result is 128 + that signal then.
/// @param grace_period  between SIGTERM and SIGKILL when ranks are ended.
/// @return 0, or the first failing rank's exit code (128 + signal).
int spawn_local_ranks(
    int nproc,
    const std::vector<std::string>& argv,
    bool* signalled = nullptr,
    std::chrono::milliseconds grace_period = std::chrono::seconds(5));

}  // namespace flatshard
