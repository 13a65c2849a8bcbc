#include "flatshard/group/post_forward_shard.h"

#include <ATen/ATen.h>

#include <utility>

#include "flatshard/group/post_forward_axis.h"

namespace flatshard {
std::unique_ptr<PostForwardShard> PostForwardShard::make(
    const GroupContext& context) {
  const int axis = post_forward_axis(context);
  if (!context.plan.has_post_forward()) {
    return nullptr;
  }
  const std::vector<Placement> cut{Placement::shard()};
  const std::vector<Placement> uncut{Placement::replicate()};
  const std::int64_t ranks = context.options.post_forward_ranks;
  const std::vector<std::int64_t> neighbours{ranks};
  const std::vector<std::int64_t> coordinate{
      context.mesh->coordinate(axis) % ranks};
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
