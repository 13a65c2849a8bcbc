#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "flatshard/comm/communicator.h"

namespace flatshard {

struct PageCommunicatorOptions {
  /// Largest tensor that a rank contributes to one all-gather.
  std::int64_t max_nbytes = 4096;
  /// How long a rank waits for its peers in each collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Connects the hosts of the ranks of `group`, also of ranks on GPUs, through
/// pages that their processes share: for small numbers that the hosts exchange
/// often. A rank writes its own and reads its peers' when they have arrived,
/// without a device or a network.
///
/// Tensors are on the CPU. Supports only all-gather and rejects all other
/// collectives. Collective.
///
/// @param group  connects the ranks, now and in restart().
/// @throws Error{config} when ranks are on different hosts, Error{memory}.
std::shared_ptr<Communicator> make_page_communicator(
    std::shared_ptr<Communicator> group,
    const PageCommunicatorOptions& options = {});

}  // namespace flatshard
