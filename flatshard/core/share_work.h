#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace flatshard {

/// Calls worker(i) once for each i below `num_items`, on at most `num_threads`
/// threads, this one among them. Each thread makes its own worker by
/// `make_worker()`, and the worker fetches one item after the other. Returns
/// when all are done.
/// @throws what a worker threw first; items that were not started are left.
template <class MakeWorker>
void share_work(
    std::size_t num_items,
    int num_threads,
    const MakeWorker& make_worker) {
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      auto worker = make_worker();
      for (std::size_t i = next++; i < num_items; i = next++) {
        worker(i);
      }
    } catch (...) {
      next = num_items;
      const std::lock_guard lock(mutex);
      if (!error) {
        error = std::current_exception();
      }
    }
  };
  {
    const auto wanted = static_cast<std::size_t>(std::max(1, num_threads));
    std::vector<std::jthread> others;  // they join, also when one cannot start
    for (std::size_t i = 1; i < std::min(wanted, num_items); ++i) {
      others.emplace_back(work);
    }
    work();
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace flatshard
