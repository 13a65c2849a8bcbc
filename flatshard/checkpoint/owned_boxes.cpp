#include "flatshard/checkpoint/owned_boxes.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/format/manifest.h"

namespace flatshard {
namespace {

/// Adds boxes whose elements follow each other in `values`, or one without
/// elements when `boxes` is empty.
void append(
    std::vector<OwnedBox>& owned,
    std::string_view role,
    const NamedShard& shard,
    const std::vector<Rectangle>& boxes,
    const at::Tensor& values) {
  OwnedBox next{
      .role = std::string(role),
      .names = shard.names,
      .shape = shard.whole_shape(),
      .box = {},
      .values = values};
  if (boxes.empty()) {
    owned.push_back(std::move(next));
    return;
  }
  std::int64_t done = 0;
  for (const Rectangle& box : boxes) {
    next.box = box;
    next.values = values.narrow(0, done, box.numel());
    done += box.numel();
    owned.push_back(next);
  }
}

void append(
    std::vector<OwnedBox>& owned,
    std::string_view role,
    const std::vector<NamedShard>& shards,
    bool share_replicas) {
  for (const NamedShard& shard : shards) {
    if (shard.dropped) {
      continue;
    }
    const Replicas replica = share_replicas ? shard.replicas : Replicas{};
    const std::int64_t n = shard.tensor.numel();
    const std::int64_t first = n * replica.index / replica.count;
    const std::int64_t last = n * (replica.index + 1) / replica.count;
    append(
        owned,
        role,
        shard,
        shard.slice.boxes(shard.shape, shard.begin + first, shard.begin + last),
        shard.tensor.narrow(0, first, last - first));
  }
}

void append(
    std::vector<OwnedBox>& owned,
    const WholeTensor& whole,
    bool is_owner) {
  FLATSHARD_CHECK(
      whole.tensor.is_contiguous(),
      usage,
      "checkpoint: expected {} to be contiguous",
      whole.name);
  const at::Tensor flat = whole.tensor.detach().view(-1);
  const std::int64_t n = is_owner ? flat.numel() : 0;
  owned.push_back(
      {.role = std::string(kBufferRole),
       .names = {whole.name},
       .shape = whole.tensor.sizes().vec(),
       .box = Rectangle::whole(whole.tensor.sizes()),
       .values = flat.narrow(0, 0, n)});
}

std::vector<OwnedBox> boxes_of(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole,
    bool share_replicas,
    bool owns_whole) {
  std::vector<OwnedBox> owned;
  for (const ParamGroup* group : groups) {
    append(owned, kWeightRole, group->main_shards(), share_replicas);
    if (optimizer == nullptr) {
      continue;
    }
    const auto& trained = optimizer->groups();
    const auto found = std::find(trained.begin(), trained.end(), group);
    if (found == trained.end()) {
      continue;  // frozen
    }
    const auto index = static_cast<std::size_t>(found - trained.begin());
    for (const auto& [name, shards] : optimizer->state_shards(index)) {
      append(owned, name, shards, share_replicas);
    }
  }
  for (const WholeTensor& tensor : whole) {
    append(owned, tensor, owns_whole);
  }
  return owned;
}

}  // namespace

std::vector<OwnedBox> owned_boxes(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole) {
  return boxes_of(groups, optimizer, whole, false, true);
}

std::vector<OwnedBox> boxes_to_write(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole,
    int rank) {
  return boxes_of(groups, optimizer, whole, true, rank == 0);
}

}  // namespace flatshard
