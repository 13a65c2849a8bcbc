#pragma once

#include <memory>
#include <string>

#include "flatshard/comm/communicator.h"
#include "flatshard/comm/store.h"

namespace flatshard::testing {

/// make_communicator for ranks that are threads of one process: the CPU's
/// communicator, over memory instead of Gloo's connections. Most of a small
/// collective over loopback is the kernel's work: without it
/// runtime_parity_test takes 25 s of a core instead of 185.
///
/// @throws as over Gloo: Error{timeout} when a peer does not arrive within
///   options.timeout, Error{comm} when one is gone or has aborted.
std::shared_ptr<Communicator> make_thread_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& options);

}  // namespace flatshard::testing
