#include "flatshard/buffer/peer_mesh.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "flatshard/buffer/transition.h"
#include "flatshard/peer/peer_communicator.h"

namespace flatshard {
namespace {

// Returns the axes of each step of this kind.
std::vector<std::vector<int>> axes_of(
    TransitionStep::Kind kind,
    const Placements& from,
    const Placements& to) {
  std::vector<std::vector<int>> axes;
  for (const TransitionStep& step : plan_transition(from, to)) {
    if (step.kind == kind) {
      axes.push_back(step.axes);
    }
  }
  return axes;
}

// Partial gradients to their storage, at once or by way of the inner axes.
std::vector<std::pair<Placements, Placements>> gradient_redistributions(
    const Strategy& strategy) {
  const Placements partial(
      strategy.gradient.size(),
      Placement::partial(ReduceOp::sum));
  Placements inner = strategy.gradient;
  for (Placement& placement : inner) {
    if (placement.is_partial()) {
      placement = partial.front();
    }
  }
  return {
      {partial, strategy.optimizer},
      {partial, inner},
      {inner, strategy.optimizer}};
}

}  // namespace

std::vector<std::vector<int>> scattered_axes(const Strategy& strategy) {
  std::vector<std::vector<int>> all;
  for (const auto& [from, to] : gradient_redistributions(strategy)) {
    std::ranges::move(
        axes_of(TransitionStep::Kind::reduce_scatter, from, to),
        std::back_inserter(all));
  }
  return all;
}

std::shared_ptr<Mesh> with_peer_memory(
    std::shared_ptr<Mesh> mesh,
    std::span<const PeerUse> uses,
    PeerMeshOptions options) {
  options.stream.high_priority = true;
  // The memory for the reductions of each group, by axes of `mesh`. The fences
  // of an all-gather are in both.
  std::map<std::pair<std::vector<int>, Purpose>, std::int64_t> groups;
  const auto axes_in_mesh = [&](const Mesh& of, const std::vector<int>& axes) {
    std::vector<int> found;
    for (const int axis : axes) {
      found.push_back(mesh->axis_index(of.axis(axis).name));
    }
    return found;
  };
  for (const auto& [of, strategy] : uses) {
    if (options.gathers) {
      const Placements whole(of->num_axes(), Placement::replicate());
      for (const auto& axes : axes_of(
               TransitionStep::Kind::all_gather,
               strategy.parameter,
               whole)) {
        groups.insert({{axes_in_mesh(*of, axes), Purpose::gather}, 0});
        groups.insert({{axes_in_mesh(*of, axes), Purpose::reduce}, 0});
      }
    }
    if (options.reductions_nbytes > 0) {
      for (const auto& axes : scattered_axes(strategy)) {
        groups[{axes_in_mesh(*of, axes), Purpose::reduce}] =
            options.reductions_nbytes;
      }
    }
  }
  std::vector<MeshGroup> over_peers;
  for (const auto& [key, nbytes] : groups) {
    const auto& [axes, purpose] = key;
    std::vector<std::string> names;
    for (const int axis : axes) {
      names.push_back(mesh->axis(axis).name);
    }
    over_peers.push_back(
        {std::move(names),
         make_peer_communicator(
             mesh->communicator(axes, purpose).shared_from_this(),
             {.reductions_nbytes = nbytes, .stream = options.stream}),
         purpose});
  }
  return mesh->with_communicators(std::move(over_peers));
}

}  // namespace flatshard
