#pragma once

#include "tests/support/ranks.h"

#include <functional>
#include <string>
#include <vector>

namespace flatshard::testing {

/// The fault of one rank, in step kFaultStep.
enum class Fault {
  none,
  kill,         ///< SIGKILL
  stop,         ///< SIGSTOP
  exit,         ///< leaves the program as if it were done
  exception,    ///< throws
  no_memory,    ///< throws what torch does when memory is used up
  hang,         ///< computes on and on, until the end
  device_hang,  ///< its GPU does, for much longer than the timeout
  skip_unit,    ///< leaves out a block
  other_order,  ///< swaps two blocks
  other_size,   ///< trains a wider model from the start
  other_dtype,  ///< computes in bfloat16 from the start
};

inline constexpr int kFaultStep = 3;

struct FaultCase {
  Fault fault = Fault::none;
  int world = 3;
  int culprit = 2;
  at::DeviceType device = at::kCPU;
  /// Ranks beyond it share GPUs: to NCCL, each further round is another host.
  int num_gpus = 0;
  std::string strategy = "zero3";
  bool copy_engines = false;  ///< gathers and reductions are copies
  bool whole_step = false;    ///< the step of the fault is a graph's replay
  std::vector<std::int64_t> mesh;  ///< axis sizes; empty: one axis
  int steps = 6;
  /// The compute of the other ranks before the step of the fault.
  std::chrono::milliseconds others_compute{0};
  std::chrono::seconds timeout{4};
};

/// How one rank ended.
struct FaultReport {
  RankOutcome outcome;
  std::string message;  ///< of its Error; empty: none came
};

/// Trains a toy model of blocks over `world` processes with a watcher while one
/// of them does wrong. A process that had to be killed has outcome.signal set.
std::vector<FaultReport> run_with_fault(const FaultCase& options);

/// Any function on `world` processes; what it throws is the message.
std::vector<FaultReport> run_reporting(
    int world,
    const std::function<void(RankContext&)>& function);

}  // namespace flatshard::testing
