#include "flatshard/comm/store.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "flatshard/comm/backend.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

[[noreturn]] void throw_store_error(
    const RankEnvironment& environment,
    const StoreOptions& options,
    const std::string& text) {
  const std::string address =
      fmt::format("{}:{}", environment.master_addr, environment.master_port);
  const bool serves =
      environment.rank == 0 && !environment.launcher_serves_store;
  const std::string context =
      fmt::format("rank {}/{}", environment.rank, environment.world_size);
  if (text.find("EADDRINUSE") != std::string::npos ||
      text.find("ddress already in use") != std::string::npos) {
    throw Error(
        ErrorCode::comm,
        fmt::format(
            "cannot serve the store at {}: the port is in use; set "
            "MASTER_PORT to a free one",
            address),
        context);
  }
  if (text.find("imed out") != std::string::npos ||
      text.find("imeout") != std::string::npos) {
    throw Error(
        ErrorCode::timeout,
        serves ? fmt::format(
                     "the store at {} expected {} ranks within {} ms and not "
                     "all came; look for ranks that did not start or that "
                     "have another MASTER_ADDR or MASTER_PORT",
                     address,
                     environment.world_size,
                     options.timeout.count())
               : fmt::format(
                     "no store answered at {} within {} ms; is rank 0 "
                     "running, and do MASTER_ADDR and MASTER_PORT name it?",
                     address,
                     options.timeout.count()),
        context);
  }
  throw Error(
      ErrorCode::comm,
      fmt::format(
          "cannot {} the store at {} (MASTER_ADDR:MASTER_PORT): {}",
          serves ? "serve" : "reach",
          address,
          text),
      context);
}

}  // namespace

StoreHandle make_tcp_store(
    const RankEnvironment& environment,
    StoreOptions options) {
  detail::ignore_broken_pipes();
  if (environment.world_size == 1) {
    return make_local_store(options);  // nobody else asks
  }
  FLATSHARD_CHECK(
      !environment.master_addr.empty() && environment.master_port != 0,
      config,
      "the store needs an address; set MASTER_ADDR and MASTER_PORT");
  c10d::TCPStoreOptions tcp;
  tcp.port = environment.master_port;
  tcp.isServer = environment.rank == 0 && !environment.launcher_serves_store;
  tcp.timeout = options.timeout;
  if (!environment.launcher_serves_store) {
    tcp.numWorkers = environment.world_size;
  }
  if (tcp.isServer && environment.master_listen_fd >= 0) {
    tcp.masterListenFd = environment.master_listen_fd;
  }
  try {
    auto store =
        c10::make_intrusive<c10d::TCPStore>(environment.master_addr, tcp);
    // What ranks wrote before a restart must not be read after it.
    return environment.launcher_serves_store
               ? make_prefix_store(
                     fmt::format("attempt_{}", environment.restart_count),
                     std::move(store))
               : StoreHandle(std::move(store));
  } catch (const c10::Error& error) {
    throw_store_error(environment, options, error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw_store_error(environment, options, error.what());
  }
}

StoreHandle make_local_store(StoreOptions options) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(options.timeout);
  return store;
}

StoreHandle make_prefix_store(const std::string& prefix, StoreHandle store) {
  FLATSHARD_CHECK(
      store,
      usage,
      "prefix '{}': expected a store, got null",
      prefix);
  return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
}

}  // namespace flatshard
