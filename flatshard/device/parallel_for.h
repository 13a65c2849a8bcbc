#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "flatshard/device/host_threads.h"

#include "flatshard/core/rounding.h"

namespace flatshard {

/// Calls f(from, to) for parts that make up [`begin`, `end`), each on a
/// separate thread: as many as host_threads(), none for less than `grain`.
/// Returns when all are done. `f` must not throw.
///
/// at::parallel_for does this in code that was compiled with OpenMP. In other
/// code it is a loop.
template <class F>
void parallel_for(
    std::int64_t begin,
    std::int64_t end,
    std::int64_t grain,
    const F& f) {
  const std::int64_t wanted = ceil_div(end - begin, grain);
  const std::int64_t num =
      std::clamp<std::int64_t>(wanted, 1, std::max(1, host_threads()));
  const auto edge = [&](std::int64_t part) {
    return begin + (end - begin) / num * part +
           std::min(part, (end - begin) % num);
  };
  std::vector<std::jthread> others;  // they join, also when one cannot start
  for (std::int64_t part = 1; part < num; ++part) {
    others.emplace_back(
        [&f, from = edge(part), to = edge(part + 1)] { f(from, to); });
  }
  f(edge(0), edge(1));
}

}  // namespace flatshard
