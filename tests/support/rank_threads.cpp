#include <ATen/Parallel.h>

#include <exception>
#include <mutex>
#include <thread>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "tests/support/ranks.h"
#include "tests/support/thread_groups.h"

namespace flatshard::testing {
namespace {

// Only the first failure has the cause, and the others are its echo. A peer may
// notice the connections that go with a rank's stack before that rank reports
// its error. So an error that only reports a lost peer gives way.
class FirstFailure {
 public:
  void keep(int rank, int world) {
    const std::lock_guard lock(mutex_);
    if (error_ && !(is_echo(*error_) && !is_echo_of_a_peer())) {
      return;
    }
    const std::string where = fmt::format("rank {}/{}", rank, world);
    try {
      throw;
    } catch (const Error& error) {
      error_ = error.context().starts_with(where) ? error
                                                  : error.with_context(where);
    } catch (const std::exception& error) {
      error_ = Error(ErrorCode::internal, error.what(), where);
    } catch (...) {
      error_ = Error(ErrorCode::internal, "unknown exception", where);
    }
  }

  static bool is_echo(const Error& error) {
    return error.code() == ErrorCode::comm ||
           error.code() == ErrorCode::timeout;
  }

  /// Returns whether the exception that is being handled is an echo.
  static bool is_echo_of_a_peer() {
    try {
      throw;
    } catch (const Error& error) {
      return is_echo(error);
    } catch (...) {
      return false;
    }
  }

  void rethrow() const {
    if (error_) {
      throw *error_;
    }
  }

 private:
  std::mutex mutex_;
  std::optional<Error> error_;
};

}  // namespace

std::shared_ptr<Mesh> RankContext::mesh(
    std::vector<MeshAxis> axes,
    const std::string& name) const {
  return Mesh::create(
      std::move(axes),
      rank,
      store,
      at::kCPU,
      {.communicator = {.timeout = kPeerTimeout},
       .make_communicator = make_communicator,
       .log = log,
       .name = name,
       .watcher = false});
}

std::shared_ptr<Communicator> RankContext::gloo(const std::string& name) const {
  return flatshard::make_communicator(
      store,
      rank,
      world,
      name,
      at::kCPU,
      {.timeout = kPeerTimeout});
}

void run_ranks(int world, const std::function<void(RankContext&)>& function) {
  FirstFailure failure;
  const StoreHandle store = make_local_store({.timeout = kPeerTimeout});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        RankContext context{
            .rank = rank,
            .world = world,
            .store = store,
            .log = std::make_shared<CollectiveLog>(),
            .make_communicator = make_thread_communicator};
        function(context);
      } catch (...) {
        failure.keep(rank, world);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  failure.rethrow();
}

}  // namespace flatshard::testing
