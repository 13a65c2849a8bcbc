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
  /// A longer wait is logged, with the ranks that are missing.
  std::chrono::milliseconds silence = std::chrono::seconds(5);
};

/// Connects to (rank 0: serves, unless the launcher does, and waits for all)
/// the store at `environment.master_addr:master_port`. A single rank gets a
/// local one. Ignores SIGPIPE from then on when it had its default action: a
/// peer that dies is then an error in a collective, not this process's end.
/// @throws Error{comm} port in use or host unknown, Error{timeout} when rank 0
///   or other ranks do not join.
StoreHandle make_tcp_store(
    const RankEnvironment& environment,
    StoreOptions options = {});

struct ServedStore {
  StoreHandle store;
  std::uint16_t port = 0;
};

/// Serves a store at a free port of this machine, for another program that
/// connects to it as torch's TCPStore.
/// @param host     this machine's address, as the other program reaches it.
/// @param timeout  of waits for a key.
/// @throws Error{comm} if this machine does not have that address.
ServedStore serve_store(
    const std::string& host,
    std::chrono::milliseconds timeout);

/// Returns a store for ranks that are threads of one process.
StoreHandle make_local_store(StoreOptions options = {});

/// Returns the same store with a prefix for all keys.
StoreHandle make_prefix_store(const std::string& prefix, StoreHandle store);

}  // namespace flatshard
