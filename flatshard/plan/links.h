#pragma once

#include "flatshard/plan/gpu.h"

#include "flatshard/core/rounding.h"

#include <cstdint>
#include <vector>

namespace flatshard::plan {

/// Ranks of a collective, and how many of them share a host.
struct Group {
  std::int64_t size = 1;
  std::int64_t per_host = 1;

  std::int64_t hosts() const { return ceil_div(size, per_host); }
  bool operator==(const Group&) const = default;
};

/// Returns the group of `size` ranks that are `stride` apart.
Group group_of(
    std::int64_t size,
    std::int64_t stride,
    std::int64_t ranks_per_host);

/// The ranks of one axis of a mesh.
struct AxisRanks {
  std::int64_t size = 1;
  std::int64_t stride = 1;  ///< of the model's ranks between adjacent ones
};

/// Returns the group of the ranks of several axes.
Group group_of(const std::vector<AxisRanks>& axes, std::int64_t ranks_per_host);

enum class Transfer { all_gather, reduce_scatter, all_reduce, all_to_all };

/// Returns the seconds of a collective of `nbytes`: the full buffer, for an
/// all-to-all the bytes that one rank sends. Inside a host it uses the measured
/// rate, between hosts the network of all GPUs of the group on a host. The
/// longer of both counts, with the latency of each step of a ring.
double
seconds(const Gpu& gpu, Transfer transfer, double nbytes, const Group& group);

/// Returns the seconds of an all-gather by copy engines: the pieces of all
/// peers, and a rank's own piece. The group is on one host.
double copy_seconds(const Gpu& gpu, double nbytes, const Group& group);

/// Returns the seconds of a reduce-scatter by copy engines, with the sums.
double
copied_reduction_seconds(const Gpu& gpu, double nbytes, const Group& group);

/// Returns the seconds of a copy between a GPU and the memory of its host.
double host_copy_seconds(const Gpu& gpu, double nbytes);

/// Returns a GPU whose links inside a host are as slow as they are while
/// compute runs. The network is not slower then.
Gpu with_slowed_links(Gpu gpu);

}  // namespace flatshard::plan
