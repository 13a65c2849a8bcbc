#include "flatshard/group/post_forward_axis.h"

#include "flatshard/core/error.h"

namespace flatshard {

int post_forward_axis(const GroupContext& context) {
  const std::int64_t ranks = context.options.post_forward_ranks;
  const Mesh& mesh = *context.mesh;
  // Axes of ranks that share layers are skipped, because parts of a layer are
  // not sharded over them.
  int axis = mesh.num_axes() - 1;
  while (axis >= 0 && (!context.strategy.parameter[axis].is_shard() ||
                       mesh.axis(axis).size == 1 ||
                       mesh.axis(axis).role == AxisRole::model)) {
    --axis;
  }
  const std::int64_t size = axis < 0 ? 1 : mesh.axis(axis).size;
  FLATSHARD_CHECK(
      !context.options.float8,
      config,
      "{}: post_forward_ranks = {} cannot be combined with FP8 weights, "
      "because forward and backward all-gather different planes; choose one",
      context.name,
      ranks);
  FLATSHARD_CHECK(
      ranks > 1 && size % ranks == 0,
      config,
      "{}: expected post_forward_ranks to be a divisor of the {} ranks of the "
      "innermost axis that weights are sharded on, mesh {}, and more than 1 "
      "(reshard_after_forward = false keeps full weights), got {}",
      context.name,
      size,
      mesh.to_string(),
      ranks);
  return axis;
}

}  // namespace flatshard
