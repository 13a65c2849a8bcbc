#include "flatshard/group/post_forward_shard.h"

#include <ATen/ATen.h>

#include <utility>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

// Returns the innermost axis that shards over several ranks, or -1.
// Axes of ranks that share layers are skipped, because parts of a layer are not
// sharded over them.
int innermost_sharded_axis(const Mesh& mesh, const Placements& placements) {
  for (int axis = mesh.num_axes() - 1; axis >= 0; --axis) {
    if (placements[axis].is_shard() && mesh.axis(axis).size > 1 &&
        mesh.axis(axis).role != AxisRole::model) {
      return axis;
    }
  }
  return -1;
}

}  // namespace

std::unique_ptr<PostForwardShard> PostForwardShard::make(
    const GroupContext& context) {
  const std::int64_t ranks = context.options.post_forward_ranks;
  const Placements& parameter = context.strategy.parameter;
  const Mesh& mesh = *context.mesh;
  const int axis = innermost_sharded_axis(mesh, parameter);
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
  if (!context.plan.has_post_forward()) {
    return nullptr;
  }
  const std::vector<Placement> cut{Placement::shard()};
  const std::vector<Placement> uncut{Placement::replicate()};
  const std::vector<std::int64_t> neighbours{ranks};
  const std::vector<std::int64_t> coordinate{mesh.coordinate(axis) % ranks};
  const FlatLayout& layout = *context.plan.layout;
  return std::unique_ptr<PostForwardShard>(new PostForwardShard(
      context.mesh->neighbours(axis, ranks, Purpose::gather),
      context.plan.post_forward_numel(),
      local_ranges(layout, cut, neighbours, coordinate),
      local_ranges(layout, uncut, neighbours, coordinate)));
}

PostForwardShard::PostForwardShard(
    Communicator& neighbours,
    std::int64_t numel,
    std::vector<LocalRange> slices,
    std::vector<LocalRange> segments)
    : neighbours_(neighbours),
      numel_(numel),
      slices_(std::move(slices)),
      segments_(std::move(segments)) {
}

void PostForwardShard::save(const at::Tensor& whole, const at::Tensor& shard)
    const {
  const at::NoGradGuard no_grad;
  for (const LocalRange& slice : slices_) {
    shard.narrow(0, slice.local_offset, slice.numel)
        .copy_(whole.narrow(0, slice.offset, slice.numel));
  }
}

void PostForwardShard::gather(const at::Tensor& shard, const at::Tensor& whole)
    const {
  std::vector<at::Tensor> out;
  std::vector<at::Tensor> in;
  for (std::size_t s = 0; s < slices_.size(); ++s) {
    out.push_back(whole.narrow(0, segments_[s].offset, segments_[s].numel));
    in.push_back(shard.narrow(0, slices_[s].local_offset, slices_[s].numel));
  }
  neighbours_.all_gather(out, in);
}

}  // namespace flatshard
