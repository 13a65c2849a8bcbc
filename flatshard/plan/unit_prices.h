#pragma once

#include "flatshard/plan/job.h"

#include <cstdint>

namespace flatshard::plan {

inline double as_double(std::int64_t n) {
  return static_cast<double>(n);
}

/// Seconds of an all-gather.
struct Gathers {
  double by_collective = 0;
  double by_copies = 0;
};

/// Seconds of a unit's collectives, by purpose.
struct UnitPrices {
  Gathers compute;  ///< all stored planes of this kind
  Gathers float8;
  double cast = 0;    ///< main weights, before each all-gather
  double spread = 0;  ///< with the first all-gather after a change
  double encode = 0;  ///< in FP8, likewise
  double derive = 0;
  double from_post_forward = 0;
  double save_post_forward = 0;
  double reduce = 0;  ///< a microbatch that is not the last
  double reduce_last = 0;
  double reduce_sum = 0;  ///< its kernels; they share the GPU with compute
  /// The outer axis where it is reduced apart from the inner ones, in the last
  /// microbatch.
  double outer = 0;
  double outer_early = 0;  ///< likewise, in a microbatch that is not the last
  double accumulate = 0;
  /// Whether the ranks are on several hosts.
  bool gathers_leave_host = false;
  bool reductions_leave_host = false;
  bool outer_leaves_host = false;
  bool outer_by_copies = false;
  double norm = 0;
};

/// Returns the prices of a unit's collectives, and of the passes over its
/// weights and gradients.
UnitPrices price_unit(const UnitPlan& unit, const Job& job, const Gpu& gpu);

}  // namespace flatshard::plan
