#include "flatshard/plan/links.h"

#include <algorithm>

namespace flatshard::plan {
namespace {

constexpr double kBytesPerGb = 1e9;
constexpr double kMicro = 1e-6;

const Curve& curve_of(const LinkRates& links, Transfer transfer) {
  switch (transfer) {
    case Transfer::all_gather:
      return links.all_gather;
    case Transfer::reduce_scatter:
      return links.reduce_scatter;
    case Transfer::all_reduce:
      return links.all_reduce;
    case Transfer::all_to_all:
      break;
  }
  return links.all_to_all;
}

}  // namespace

Group group_of(
    std::int64_t size,
    std::int64_t stride,
    std::int64_t ranks_per_host) {
  return {
      .size = size,
      .per_host = std::clamp<std::int64_t>(ranks_per_host / stride, 1, size)};
}

Group group_of(
    const std::vector<AxisRanks>& axes,
    std::int64_t ranks_per_host) {
  Group group;
  for (const AxisRanks& axis : axes) {
    const Group ranks = group_of(axis.size, axis.stride, ranks_per_host);
    group.size *= ranks.size;
    group.per_host *= ranks.per_host;
  }
  return group;
}

double
seconds(const Gpu& gpu, Transfer transfer, double nbytes, const Group& group) {
  if (group.size == 1 || nbytes == 0) {
    return 0;
  }
  const auto size = static_cast<double>(group.size);
  const auto hosts = static_cast<double>(group.hosts());
  const auto per_host = static_cast<double>(group.per_host);
  const double passes = transfer == Transfer::all_reduce ? 2 : 1;
  const double steps =
      transfer == Transfer::all_to_all ? 1 : passes;  // rings are walked
  double inside = 0;
  if (group.per_host > 1) {
    const double rate = curve_of(gpu.nvlink, transfer).at(nbytes);
    inside = passes * nbytes * (size - 1) / size / (rate * kBytesPerGb);
  }
  double between = 0;
  double latency = 0;
  if (group.hosts() > 1) {
    // The bytes of an all-to-all are per rank, while the bytes of a ring are
    // per host.
    const double ports = transfer == Transfer::all_to_all ? 1 : per_host;
    between = passes * nbytes * (hosts - 1) / hosts /
              (ports * gpu.network_gb_s * kBytesPerGb);
    latency = steps * (hosts - 1) * gpu.network_hop_us * kMicro;
    if (transfer != Transfer::all_to_all) {
      latency += steps * (size - hosts) * gpu.nvlink_hop_us * kMicro;
    }
  } else {
    // The measured rate includes the latency of a pair.
    latency = steps * (size - 2) * gpu.nvlink_hop_us * kMicro;
  }
  return std::max(inside, between) + latency;
}

double copy_seconds(const Gpu& gpu, double nbytes, const Group& group) {
  if (group.size == 1 || nbytes == 0) {
    return 0;
  }
  const auto size = static_cast<double>(group.size);
  return nbytes * (size - 1) / size /
             (gpu.nvlink.copies.at(nbytes) * kBytesPerGb) +
         gpu.pass_seconds("engine_copy", nbytes / size);
}

double
copied_reduction_seconds(const Gpu& gpu, double nbytes, const Group& group) {
  if (group.size == 1 || nbytes == 0) {
    return 0;
  }
  const auto size = static_cast<double>(group.size);
  return nbytes * (size - 1) / size /
         (gpu.nvlink.copied_reductions.at(nbytes) * kBytesPerGb);
}

double host_copy_seconds(const Gpu& gpu, double nbytes) {
  return nbytes / (gpu.host_gb_s * kBytesPerGb);
}

Gpu with_slowed_links(Gpu gpu) {
  const auto slow = [](Curve& curve, double times) {
    for (double& rate : curve.rates) {
      rate /= times;
    }
  };
  for (Curve* curve :
       {&gpu.nvlink.all_gather,
        &gpu.nvlink.reduce_scatter,
        &gpu.nvlink.all_reduce,
        &gpu.nvlink.all_to_all}) {
    slow(*curve, gpu.contention.slowed_collectives);
  }
  slow(gpu.nvlink.copies, gpu.contention.slowed_copies);
  slow(gpu.nvlink.copied_reductions, gpu.contention.slowed_copies);
  gpu.passes["engine_copy"] /= gpu.contention.slowed_copies;
  return gpu;
}

}  // namespace flatshard::plan
