#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>

#include "flatshard/launch/environment.h"

namespace flatshard {

/// torch's key-value store, through which ranks find each other.
using StoreHandle = c10::intrusive_ptr<c10d::Store>;

struct StoreOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Connects to (rank 0: serves, unless the launcher already does) the store at
/// `environment.master_addr:master_port`. A single rank gets a local store.
/// Ignores SIGPIPE from then on when it had its default action, so that a peer
/// that dies is an error in a collective and not the end of this process.
/// @throws Error{comm} port in use or host unknown, Error{timeout} when rank 0
///   or other ranks do not come.
StoreHandle make_tcp_store(
    const RankEnvironment& environment,
    StoreOptions options = {});

/// A store for ranks that are threads of one process.
StoreHandle make_local_store(StoreOptions options = {});

/// The same store seen through a key prefix.
StoreHandle make_prefix_store(const std::string& prefix, StoreHandle store);

}  // namespace flatshard
