#include "flatshard/fully_shard/tensor_parallel.h"

#include "flatshard/layout/tensor_slice.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <map>
#include <utility>

namespace flatshard {

std::function<ParameterPlacement(const std::string& name)> placement_of_parts(
    torch::nn::Module& root,
    const Mesh& mesh,
    const std::string& axis) {
  std::map<std::string, ParameterPlacement> placements;
  for (const auto& [name, cut] : nn::parts_below(root)) {
    placements[name] = ParameterPlacement::cut_over(
        mesh,
        {axis},
        TensorSlice()
            .take(cut.dim, cut.whole, {{cut.part.begin, cut.part.end}}));
  }
  const ParameterPlacement whole{
      .grad_divisor =
          1.0 / static_cast<double>(mesh.axis(mesh.axis_index(axis)).size)};
  return [placements = std::move(placements), whole](const std::string& name) {
    const auto found = placements.find(name);
    return found == placements.end() ? whole : found->second;
  };
}

}  // namespace flatshard
