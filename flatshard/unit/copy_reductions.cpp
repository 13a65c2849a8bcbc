#include "flatshard/unit/copy_reductions.h"

#include "flatshard/buffer/transition.h"

#include <utility>
#include <vector>

namespace flatshard {

void reduce_by_copies(
    Mesh& mesh,
    const Strategy& strategy,
    std::int64_t nbytes,
    StreamOptions stream) {
  stream.high_priority = true;
  const Placements partial(mesh.num_axes(), Placement::partial(ReduceOp::sum));
  Placements inner = strategy.gradient;
  for (Placement& placement : inner) {
    if (placement.is_partial()) {
      placement = partial.front();
    }
  }
  const std::vector<std::pair<Placements, Placements>> ways{
      {partial, strategy.optimizer},
      {partial, inner},
      {inner, strategy.optimizer}};
  for (const auto& [from, to] : ways) {
    for (const TransitionStep& step : plan_transition(from, to)) {
      if (step.kind == TransitionStep::Kind::reduce_scatter) {
        mesh.communicator(step.axes, Purpose::reduce)
            .reduce_by_copies(nbytes, stream);
      }
    }
  }
}

}  // namespace flatshard
