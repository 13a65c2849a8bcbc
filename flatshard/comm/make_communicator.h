#pragma once

#include <memory>
#include <string>

#include "flatshard/comm/communicator.h"
#include "flatshard/comm/store.h"

namespace flatshard {

/// Returns a group of `size` ranks that meet in `store`: NCCL on a GPU, Gloo on
/// the CPU, no backend for one rank. Collective. NCCL's connections are made
/// now, not in the first step.
///
/// @param name names the group in messages and logs, and its keys in the
///   store; equal on all ranks, unique in the store.
/// @throws Error{timeout} when peers are missing, Error{comm} on other
///   failures, Error{config} for CUDA in a build without it.
std::shared_ptr<Communicator> make_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    CommunicatorOptions options = {});

/// One rank: collectives copy, and nothing is scaled.
std::shared_ptr<Communicator> make_self_communicator(
    const std::string& name,
    at::Device device);

}  // namespace flatshard
