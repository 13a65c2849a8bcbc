#include "flatshard/fully_shard/tensor_parallel.h"

#include "flatshard/core/error.h"
#include "flatshard/fully_shard/copy_fences.h"
#include "flatshard/layout/tensor_slice.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/tensor_parallel/collective_tensor_parallel.h"
#include "flatshard/tensor_parallel/peer_tensor_parallel.h"

#include <map>
#include <memory>
#include <utility>

namespace flatshard {
namespace {

bool is_named(const std::string& name, const std::string& end) {
  return name == end || name.ends_with("." + end);
}

}  // namespace

nn::TensorParallelPtr make_tensor_parallel(
    Mesh& mesh,
    const std::string& axis,
    const TensorParallelOptions& options) {
  const int index = mesh.axis_index(axis);
  if (mesh.axis(index).size == 1) {
    return nullptr;
  }
  if (!options.copies) {
    return std::make_shared<CollectiveTensorParallel>(
        mesh.communicator(index, Purpose::exchange).shared_from_this(),
        options.stream);
  }
  return std::make_shared<PeerTensorParallel>(
      copy_fences(mesh, {&index, 1}),
      PeerTensorParallelOptions{
          .window_nbytes = options.window_nbytes,
          .stream = options.stream});
}

std::function<ParameterPlacement(const std::string& name)> tensor_parallel(
    torch::nn::Module& root,
    Mesh& mesh,
    const TensorParallelPlan& plan,
    const std::string& axis,
    const TensorParallelOptions& options) {
  const nn::TensorParallelPtr ranks = make_tensor_parallel(mesh, axis, options);
  for (const auto& [end, cut] : plan) {
    bool is_found = false;
    for (const auto& item : root.named_modules()) {
      auto* const layer = item.value()->as<nn::LinearImpl>();
      if (layer != nullptr && is_named(item.key(), end)) {
        layer->share(ranks, cut);
        is_found = true;
      }
    }
    FLATSHARD_CHECK(
        is_found,
        config,
        "tensor_parallel: expected nn::Linear layers named '{}' in the plan, "
        "found none; change the plan",
        end);
  }
  return placement_of_parts(root, mesh, axis);
}

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
