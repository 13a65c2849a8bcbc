#pragma once

#include <cstdint>
#include <memory>

#include "flatshard/comm/communicator.h"
#include "flatshard/device/stream.h"

namespace flatshard {

struct PeerCommunicatorOptions {
  /// The approximate memory on each rank for reduce-scatters by copies
  /// (CopyReducer), all of them from one stream. Over NCCL, too, sums are then
  /// float32 with one rounding. 0: `group` reduces.
  std::int64_t reductions_nbytes = 0;
  /// The stream of these copies.
  StreamOptions stream;
};

/// Connects the ranks of `group` through memory that they share. Fences between
/// GPUs are a PeerFence where the ranks can have one. Reduce-scatters of
/// float32, bfloat16 and float16 are copies into peers' memory and sums there.
/// `group` handles all else. It does not see these, and an abort of this one
/// does not end it. Belongs to the model that requested it. Collective.
///
/// @return  `group` itself where it has one rank.
/// @throws Error{config, memory} as PeerMemory::create.
std::shared_ptr<Communicator> make_peer_communicator(
    std::shared_ptr<Communicator> group,
    const PeerCommunicatorOptions& options);

}  // namespace flatshard
