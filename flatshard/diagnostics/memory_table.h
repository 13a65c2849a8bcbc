#pragma once

#include "flatshard/runtime/runtime.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// One line of the memory table: what holds how many bytes of this rank's
/// device, and why.
struct MemoryRow {
  std::string role;
  std::int64_t nbytes = 0;
  std::string reason;
};

/// Bytes by role on this rank: main weights, compute weights, gradients,
/// optimizer state, the slot pool and graphs. Gradient buffers that are
/// allocated with the first backward are counted with the size that they will
/// have. Activations and what NCCL or the driver take are not in it.
///
/// @param optimizer_nbytes  Optimizer::state_nbytes().
/// @param graphs  what is captured by now; empty: those of regions, which the
///   Runtime knows. StepGraph::stats are those of steps.
std::vector<MemoryRow> memory_rows(
    const Runtime& runtime,
    std::int64_t optimizer_nbytes,
    const std::optional<GraphStats>& graphs = {});

/// The sum of all rows.
std::int64_t total_nbytes(const std::vector<MemoryRow>& rows);

/// As a table with GiB or MiB. What is in host memory beside a GPU stands
/// below the sum.
std::string to_string(
    const std::vector<MemoryRow>& rows,
    const std::vector<MemoryRow>& host_rows = {});

}  // namespace flatshard
