#include "flatshard/group/group_options.h"

#include <cmath>

namespace flatshard {
namespace {

// Returns the least power of two of at least the root, or the first that does
// not divide `divisor`.
double part_before(double divisor) {
  double part = 1;
  while (std::fmod(divisor, part) == 0 && divisor / part > part) {
    part *= 2;
  }
  return part;
}

}  // namespace

GradDivision grad_division(const ParamGroupOptions& options, int num_ranks) {
  if (options.scaling == GradScaling::pre_scaled) {
    return {.at_rest = options.grad_divisor};
  }
  const bool is_mean = options.scaling == GradScaling::mean;
  const double total = (is_mean ? num_ranks : 1) * options.grad_divisor;
  if (options.precision.reduce == at::kHalf) {
    const double before = part_before(total);
    return {.before = before, .on_wire = total / before};
  }
  if (options.sums_only) {
    return {.on_wire = total};
  }
  return {
      .op = is_mean ? ReduceOp::avg : ReduceOp::sum,
      .at_rest = options.grad_divisor};
}

}  // namespace flatshard
