#include "flatshard/checkpoint/owned_runs.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/format/manifest.h"

namespace flatshard {
namespace {

void append(
    std::vector<OwnedRun>& runs,
    std::string_view role,
    const std::vector<NamedShard>& shards,
    const ParamGroup::Replicas& replica) {
  for (const NamedShard& shard : shards) {
    if (shard.dropped) {
      continue;
    }
    const std::int64_t n = shard.tensor.numel();
    const std::int64_t first = n * replica.index / replica.count;
    const std::int64_t last = n * (replica.index + 1) / replica.count;
    runs.push_back(
        {.role = std::string(role),
         .names = shard.names,
         .shape = shard.shape,
         .begin = shard.begin + first,
         .values = shard.tensor.narrow(0, first, last - first)});
  }
}

void append(std::vector<OwnedRun>& runs, const WholeTensor& whole, bool owned) {
  FLATSHARD_CHECK(
      whole.tensor.is_contiguous(),
      usage,
      "checkpoint: expected {} to be contiguous",
      whole.name);
  const at::Tensor flat = whole.tensor.detach().view(-1);
  const std::int64_t n = owned ? flat.numel() : 0;
  runs.push_back(
      {.role = std::string(kBufferRole),
       .names = {whole.name},
       .shape = whole.tensor.sizes().vec(),
       .begin = 0,
       .values = flat.narrow(0, 0, n)});
}

std::vector<OwnedRun> runs_of(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole,
    bool share_replicas) {
  std::vector<OwnedRun> runs;
  for (const ParamGroup* group : groups) {
    const ParamGroup::Replicas replica =
        share_replicas ? group->replicas() : ParamGroup::Replicas{};
    append(runs, kWeightRole, group->main_shards(), replica);
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
      append(runs, name, shards, replica);
    }
  }
  const bool owned =
      !share_replicas || groups.front()->model_mesh()->rank() == 0;
  for (const WholeTensor& tensor : whole) {
    append(runs, tensor, owned);
  }
  return runs;
}

}  // namespace

std::vector<OwnedRun> owned_runs(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole) {
  return runs_of(groups, optimizer, whole, false);
}

std::vector<OwnedRun> runs_to_write(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole) {
  return runs_of(groups, optimizer, whole, true);
}

}  // namespace flatshard
