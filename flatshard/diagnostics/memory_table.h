#pragma once

#include "flatshard/runtime/runtime.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// One line of the memory table: a role, how many bytes of this rank's device
/// it uses, and why.
struct MemoryRow {
  std::string role;
  std::int64_t nbytes = 0;
  std::string reason;
};

/// Returns the bytes by role on this rank: main weights, compute weights,
/// gradients, optimizer state, communication buffers and graphs. Gradient
/// buffers that the first backward allocates are included with their later
/// size. Activations and memory of NCCL or the driver are not included.
///
/// @param optimizer_nbytes  Optimizer::state_nbytes().
/// @param graphs  the captured graphs; empty: the graphs of regions, from the
///   Runtime. `StepGraph::stats` returns the graphs of steps.
std::vector<MemoryRow> memory_rows(
    const Runtime& runtime,
    std::int64_t optimizer_nbytes,
    const std::optional<GraphStats>& graphs = {});

/// Returns the sum of all rows.
std::int64_t total_nbytes(const std::vector<MemoryRow>& rows);

/// Returns a table with GiB or MiB. Host memory, on a machine with a GPU, is
/// listed below the sum.
std::string to_string(
    const std::vector<MemoryRow>& rows,
    const std::vector<MemoryRow>& host_rows = {});

}  // namespace flatshard
