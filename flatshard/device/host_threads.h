#pragma once

#include <ATen/Parallel.h>

namespace flatshard {

/// Threads that one ATen operation on the CPU may use when called from this
/// thread. Threads that have not computed yet use the last value set.
inline int host_threads() {
  return at::get_num_threads();
}

/// @param count at least 1. One of `n` ranks on a machine needs cores / n.
inline void set_host_threads(int count) {
  at::set_num_threads(count);
}

}  // namespace flatshard
