#include "flatshard/comm/store.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

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
        fmt::format(
            "no store answered at {} within {} ms; is rank 0 running, and do "
            "MASTER_ADDR and MASTER_PORT name it?",
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

/// Logs a long wait and its reason.
class WaitNotice {
 public:
  WaitNotice(std::string text, std::chrono::milliseconds silence)
      : thread_([this, silence, text = std::move(text)] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_for(lock, silence, [this] { return over_; })) {
            log_info("{}", text);
          }
        }) {}
  ~WaitNotice() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  WaitNotice(const WaitNotice&) = delete;
  WaitNotice& operator=(const WaitNotice&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;  // last: it uses the others
};

std::string here_key(int rank) {
  return fmt::format("flatshard/here/{}", rank);
}

std::string waiting_for(
    const RankEnvironment& environment,
    const std::vector<int>& missing) {
  constexpr std::size_t kMostNamed = 8;
  const std::vector<int> named(
      missing.begin(),
      missing.begin() +
          static_cast<std::ptrdiff_t>(std::min(missing.size(), kMostNamed)));
  return fmt::format(
      "waiting for rank{} {}{} of {} at {}:{}{}",
      missing.size() == 1 ? "" : "s",
      fmt::join(named, ", "),
      missing.size() > named.size() ? ", ..." : "",
      environment.world_size,
      environment.master_addr,
      environment.master_port,
      environment.from_slurm
          ? "; SLURM_NTASKS is the expected number: srun starts all of them, "
            "and --nproc counts only where SLURM_NTASKS is not set"
          : "");
}

/// Every rank registers, and rank 0 waits for all of them.
void meet(
    c10d::Store& store,
    const RankEnvironment& environment,
    const StoreOptions& options) {
  store.set(here_key(environment.rank), std::vector<std::uint8_t>{1});
  if (environment.rank != 0) {
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  bool said = false;
  for (int rank = 1; rank < environment.world_size; ++rank) {
    auto pause = std::chrono::milliseconds(1);
    while (!store.check({here_key(rank)})) {
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(50));
      const auto waited = std::chrono::steady_clock::now() - begin;
      const bool late = waited >= options.timeout;
      if (!late && (said || waited < options.silence)) {
        continue;
      }
      std::vector<int> missing;
      for (int other = rank; other < environment.world_size; ++other) {
        if (!store.check({here_key(other)})) {
          missing.push_back(other);
        }
      }
      if (late && !missing.empty()) {
        throw Error(
            ErrorCode::timeout,
            fmt::format(
                "{}: expected {} ranks within {} ms and not all came; look for "
                "ranks that did not start or that have another MASTER_ADDR or "
                "MASTER_PORT",
                waiting_for(environment, missing),
                environment.world_size,
                options.timeout.count()),
            fmt::format("rank 0/{}", environment.world_size));
      }
      if (!std::exchange(said, true)) {
        log_info("{}", waiting_for(environment, missing));
      }
    }
  }
}

}  // namespace

StoreHandle make_tcp_store(
    const RankEnvironment& environment,
    StoreOptions options) {
  detail::ignore_broken_pipes();
  if (environment.world_size == 1) {
    return make_local_store(options);  // there are no clients
  }
  FLATSHARD_CHECK(
      !environment.master_addr.empty() && environment.master_port != 0,
      config,
      "the store needs an address; set MASTER_ADDR and MASTER_PORT");
  c10d::TCPStoreOptions tcp;
  tcp.port = environment.master_port;
  tcp.isServer = environment.rank == 0 && !environment.launcher_serves_store;
  tcp.timeout = options.timeout;
  tcp.waitWorkers = false;  // `meet` names the missing ranks
  if (tcp.isServer && environment.master_listen_fd >= 0) {
    tcp.masterListenFd = environment.master_listen_fd;
  }
  try {
    std::optional<WaitNotice> notice;
    if (!tcp.isServer) {
      notice.emplace(
          environment.launcher_serves_store
              ? fmt::format(
                    "waiting for the launcher's store at {}:{}",
                    environment.master_addr,
                    environment.master_port)
              : waiting_for(environment, {0}),
          options.silence);
    }
    StoreHandle store =
        c10::make_intrusive<c10d::TCPStore>(environment.master_addr, tcp);
    notice.reset();
    // Values that ranks wrote before a restart must not be read after it.
    if (environment.launcher_serves_store) {
      return make_prefix_store(
          fmt::format("attempt_{}", environment.restart_count),
          std::move(store));  // and the launcher has started all ranks
    }
    meet(*store, environment, options);
    return store;
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    throw_store_error(environment, options, error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw_store_error(environment, options, error.what());
  }
}

ServedStore serve_store(
    const std::string& host,
    std::chrono::milliseconds timeout) {
  detail::ignore_broken_pipes();
  c10d::TCPStoreOptions tcp;
  tcp.port = 0;
  tcp.isServer = true;
  tcp.timeout = timeout;
  tcp.waitWorkers = false;
  ServedStore served;
  detail::with_comm_errors(fmt::format("a store at {}", host), [&] {
    auto store = c10::make_intrusive<c10d::TCPStore>(host, tcp);
    served = {.store = store, .port = store->getPort()};
  });
  return served;
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
