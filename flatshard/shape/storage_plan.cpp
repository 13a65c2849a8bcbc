#include "flatshard/shape/storage_plan.h"

#include <algorithm>

namespace flatshard {
namespace {

// Returns whether two placements put the same elements on a rank.
bool same_elements(
    const Placements& a,
    const Placements& b,
    const std::vector<std::int64_t>& sizes) {
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] > 1 && a[axis] != b[axis]) {
      return false;
    }
  }
  return true;
}

// Returns whether a rank has less than all. Weights that are made for each
// all-gather are not stored on a single rank either.
bool any_sharded(
    const Placements& placements,
    const std::vector<std::int64_t>& sizes,
    bool made_for_gathers) {
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    if ((sizes[axis] > 1 || made_for_gathers) && placements[axis].is_shard()) {
      return true;
    }
  }
  return false;
}

StoragePlan::Outer outer_of(const GroupShape& shape) {
  using Outer = StoragePlan::Outer;
  const MeshShape& mesh = shape.mesh;
  const Strategy& strategy = shape.strategy;
  if (!shape.trainable || !mesh.has_outer_axis || mesh.sizes.front() == 1) {
    return Outer::together;
  }
  if (mesh.num_ranks() == mesh.sizes.front()) {
    // Without inner ranks in the model the outer axis has the communicator of
    // the full mesh, and other groups use it on the reduce stream.
    return mesh.model_ranks > mesh.num_ranks() ? Outer::alone : Outer::together;
  }
  // ZeRO-1 over two axes is one reduce-scatter over all ranks.
  const bool splits = strategy.gradient.front().is_partial() &&
                      num_sharded_axes(strategy.optimizer) > 0 &&
                      (strategy.optimizer.front().is_replicate() ||
                       num_sharded_axes(strategy.gradient) > 0);
  return splits ? Outer::after : Outer::together;
}

}  // namespace

StoragePlan storage_plan(const GroupShape& shape) {
  using Main = StoragePlan::Main;
  using Planes = StoragePlan::Planes;
  const Strategy& strategy = shape.strategy;
  const std::vector<std::int64_t>& sizes = shape.mesh.sizes;
  StoragePlan plan{
      .outer = outer_of(shape),
      .sums_inner =
          shape.trainable &&
          std::ranges::any_of(strategy.gradient, &Placement::is_partial)};
  if (!shape.has_weights) {
    return plan;
  }
  const bool cut_alike =
      same_elements(strategy.parameter, strategy.optimizer, sizes);
  plan.encodes = shape.float8.has_value();
  plan.spreads = !cut_alike && (shape.trainable || plan.encodes);
  plan.main = shape.offload                                   ? Main::host
              : !plan.encodes && shape.main_has_compute_dtype ? Main::compute
                                                              : Main::device;
  const bool made_for_gathers =
      !shape.keep_compute_weights && !plan.main_is_compute() && cut_alike;
  if (!any_sharded(strategy.parameter, sizes, made_for_gathers)) {
    plan.planes = Planes::whole;
  } else if (
      shape.keep_compute_weights || plan.main_is_compute() || plan.spreads) {
    plan.planes = Planes::sharded;
  } else {
    plan.planes = Planes::made;
  }
  return plan;
}

std::string to_string(const StoragePlan& plan) {
  using Main = StoragePlan::Main;
  using Planes = StoragePlan::Planes;
  using Outer = StoragePlan::Outer;
  std::string text = plan.main == Main::absent    ? "no weights"
                     : plan.main == Main::compute ? "main is compute"
                     : plan.main == Main::device  ? "main on device"
                                                  : "main on host";
  if (plan.main != Main::absent) {
    text += plan.planes == Planes::made      ? ", planes made"
            : plan.planes == Planes::sharded ? ", planes sharded"
                                             : ", planes unsharded";
    text += plan.spreads ? ", spread" : "";
    text += plan.encodes ? ", encoded" : "";
  }
  text += plan.sums_inner ? ", inner sums" : "";
  text += plan.outer == Outer::after   ? ", outer axis after the inner ones"
          : plan.outer == Outer::alone ? ", outer axis only"
                                       : "";
  return text;
}

}  // namespace flatshard
