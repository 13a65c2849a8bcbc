#include "flatshard/group/frozen_float8.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {

void drop_main_weights(ParamGroup& group) {
  WeightPlanes& weights = group.weights();
  const auto& planes = weights.planes();
  const auto stored =
      std::find_if(planes.begin(), planes.end(), [](const Plane& plane) {
        return plane.stored();
      });
  FLATSHARD_CHECK(
      !group.trainable() && group.options().float8 && stored != planes.end() &&
          stored->resting.defined(),
      usage,
      "{}: main weights can be dropped only for a frozen group that stores FP8 "
      "weights between all-gathers",
      group.name());
  const at::NoGradGuard no_grad;
  const WeightPlanes::Gather first = weights.plan_gather();
  if (first.refresh) {
    // This call encodes. The data that it all-gathers is not needed.
    const at::Tensor out =
        weights.resident()
            ? at::Tensor()
            : at::empty(
                  {stored->whole.nbytes /
                   static_cast<std::int64_t>(c10::elementSize(stored->dtype))},
                  stored->resting.local().options());
    weights.gather(
        static_cast<PlaneId>(stored - planes.begin()),
        kWhole,
        out,
        first);
  }
  weights.main().local().storage().unsafeGetStorageImpl()->set_data_ptr(
      at::DataPtr(nullptr, weights.main().local().device()));
  weights.main().local().storage().unsafeGetStorageImpl()->set_nbytes(0);
  // The next all-gather waits for what was encoded here.
  weights.progress().advance(
      *current_stream(group.mesh()->device()),
      /*encoded=*/false);
}

bool has_main_weights(const ParamGroup& group) {
  const at::Tensor& main = group.weights().main().local();
  return main.numel() == 0 || main.storage().nbytes() > 0;
}

}  // namespace flatshard
