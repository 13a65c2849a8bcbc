#include "flatshard/fully_shard/expert_parallel.h"

#include <utility>

namespace flatshard {

TensorSlice expert_slice(std::string_view name, const ExpertPart& part) {
  const TensorSlice slice = TensorSlice().cut(0, part.rank, part.ranks);
  if (part.width_ranks == 1) {
    return slice;
  }
  return name.ends_with("gate_up_proj")
             ? slice.cut(1, part.width_rank, part.width_ranks, /*sections=*/2)
             : slice.cut(2, part.width_rank, part.width_ranks);
}

ParameterPlacement expert_placement(
    const Mesh& mesh,
    const std::vector<std::string>& axes,
    TensorSlice slice) {
  ParameterPlacement placement =
      ParameterPlacement::cut_over(mesh, axes, std::move(slice));
  placement.grad_divisor = static_cast<double>(mesh.token_mesh()->size()) /
                           static_cast<double>(placement.mesh->size());
  return placement;
}

}  // namespace flatshard
