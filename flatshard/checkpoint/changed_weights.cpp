#include "flatshard/checkpoint/changed_weights.h"

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace flatshard {
namespace {

/// Changed elements of one shard.
struct ShardChanges {
  NamedShard shard;
  std::size_t parameter = 0;
  ElementRun run;
  std::int64_t n = 0;
};

/// Returns the changes that this rank lists, in the order of its shards.
std::vector<ShardChanges> listed_changes(
    const ParamGroup& group,
    const ChangedElements& changed) {
  changed.counted.synchronize();
  const auto* num_before = changed.num_before.const_data_ptr<std::int64_t>();
  std::vector<ShardChanges> listed;
  std::size_t parameter = 0;
  for (const NamedShard& shard : group.main_shards()) {
    while (group.parameters()[parameter].names != shard.names) {
      ++parameter;
    }
    const std::int64_t before = *num_before++;
    const std::int64_t n = *num_before++ - before;
    if (n == 0 || shard.dropped || shard.replicas.index != 0) {
      continue;
    }
    const std::int64_t begin = shard.local_offset;
    listed.push_back(
        {.shard = shard,
         .parameter = parameter,
         .run =
             {.begin = begin,
              .end = begin + shard.tensor.numel(),
              .num_before = before,
              .shift = -begin},
         .n = n});
  }
  return listed;
}

/// Returns the places of a slice's elements in the flattened full parameter.
/// @param elements  int64 [n], of the shard, ascending.
at::Tensor places_of(const NamedShard& shard, const at::Tensor& elements) {
  const auto shape = shard.whole_shape();
  std::vector<at::Tensor> places{elements.narrow(0, 0, 0)};
  std::int64_t begin = 0;
  for (const Rectangle& box : shard.boxes()) {
    const std::int64_t end = begin + box.numel();
    at::Tensor rest = elements.masked_select(
                          elements.ge(begin).logical_and(elements.lt(end))) -
                      begin;
    begin = end;
    if (rest.numel() == 0) {
      continue;
    }
    at::Tensor place = at::zeros_like(rest);
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0; stride *= shape[d]) {
      place += (rest.remainder(box.length[d]) + box.start[d]) * stride;
      rest = rest.floor_divide(box.length[d]);
    }
    places.push_back(std::move(place));
  }
  return at::cat(places);
}

/// Writes the places in the flattened full parameter, and the values.
/// @param places  int32 or int64 [n]
void list_places(
    const ChangedElements& changed,
    const ShardChanges& part,
    const at::Tensor& places,
    const at::Tensor& values) {
  ElementRun run = part.run;
  if (part.shard.slice == TensorSlice()) {
    run.shift += part.shard.begin;
    list_elements(changed, run, places, values);
    return;
  }
  const at::Tensor elements = at::empty_like(places, at::kLong);
  list_elements(changed, run, elements, values);
  places.copy_(places_of(part.shard, elements));
}

/// The changes of one parameter on one rank.
struct Extent {
  std::int64_t n = 0;
  std::int64_t begin = 0;  ///< they are in [begin, end) of the flattened
  std::int64_t end = 0;    ///< parameter, unless it is sliced
};

std::vector<Extent> extents_of(
    const std::vector<ShardChanges>& parts,
    std::size_t num_parameters) {
  std::vector<Extent> extents(num_parameters);
  for (const ShardChanges& part : parts) {
    Extent& extent = extents[part.parameter];
    const std::int64_t begin = part.shard.begin;
    extent.begin = extent.n == 0 ? begin : std::min(extent.begin, begin);
    extent.end = std::max(extent.end, begin + part.shard.tensor.numel());
    extent.n += part.n;
  }
  return extents;
}

/// Returns every rank's `mine` [n]: [ranks, n]. Collective.
at::Tensor all_gather_rows(Communicator& world, const at::Tensor& mine) {
  if (world.size() == 1) {
    return mine.unsqueeze(0);
  }
  const at::Tensor out =
      at::empty({world.size() * mine.numel()}, mine.options());
  world.all_gather(out, mine);
  return out.view({world.size(), mine.numel()});
}

/// Returns every rank's extents, by rank. Collective; blocks the host if there
/// are several ranks.
std::vector<std::vector<Extent>> all_gather_extents(
    Communicator& world,
    std::vector<Extent> mine) {
  if (world.size() == 1) {
    return {std::move(mine)};
  }
  const auto nbytes = static_cast<std::int64_t>(mine.size() * sizeof(Extent));
  const at::Tensor all =
      all_gather_rows(
          world,
          at::from_blob(mine.data(), {nbytes}, at::kByte).to(world.device()))
          .cpu();
  std::vector<std::vector<Extent>> extents(world.size(), mine);
  for (std::int64_t rank = 0; rank < world.size(); ++rank) {
    std::memcpy(
        extents[rank].data(),
        all[rank].const_data_ptr(),
        static_cast<std::size_t>(nbytes));
  }
  return extents;
}

/// Some changes of a parameter: of one rank, or of several joined.
struct Places {
  Extent extent;
  at::Tensor indices;
  at::Tensor values;
};

/// Returns the changes of all ranks in ascending order.
/// @param parts  at least one.
Places joined(std::vector<Places> parts, bool is_sliced) {
  const auto begin = [](const Places& part) { return part.extent.begin; };
  const auto overlap = [](const Places& a, const Places& b) {
    return a.extent.end > b.extent.begin;
  };
  std::ranges::sort(parts, {}, begin);
  const bool is_ascending =
      !is_sliced && std::ranges::adjacent_find(parts, overlap) == parts.end();
  Places all = std::move(parts.front());
  if (parts.size() > 1) {
    std::vector<at::Tensor> indices{all.indices};
    std::vector<at::Tensor> values{all.values};
    for (std::size_t i = 1; i < parts.size(); ++i) {
      indices.push_back(parts[i].indices);
      values.push_back(parts[i].values);
    }
    all.indices = at::cat(indices);
    all.values = at::cat(values);
  }
  if (!is_ascending) {
    const auto [indices, order] = at::sort(all.indices);
    all.indices = indices;
    all.values = all.values.index_select(0, order);
  }
  return all;
}

}  // namespace

ChangedWeights::ChangedWeights(
    const std::vector<const ParamGroup*>& groups,
    const DtypeOf& dtype_of,
    std::shared_ptr<Mesh> mesh)
    : mesh_(std::move(mesh)) {
  const at::NoGradGuard no_grad;
  FLATSHARD_CHECK(!groups.empty(), usage, "expected at least one group");
  if (!mesh_) {
    mesh_ = groups.front()->model_mesh();
  }
  for (const ParamGroup* group : groups) {
    const at::Tensor main = group->weights().main_on_device().local();
    const at::Tensor now =
        main.to(dtype_of ? dtype_of(*group) : main.scalar_type());
    const bool shares = now.is_alias_of(group->weights().main().local());
    std::vector<std::int64_t> borders;
    for (const NamedShard& shard : group->main_shards()) {
      borders.push_back(shard.local_offset);
      borders.push_back(shard.local_offset + shard.tensor.numel());
    }
    groups_.push_back(
        {.group = group,
         .values = shares ? now.clone() : now,
         .borders = at::tensor(borders, at::kLong).to(now.device())});
  }
}

ChangedElements ChangedWeights::compare(Sent& sent) const {
  ChangedElements changed = compare_elements(
      sent.group->weights().main_on_device().local(),
      sent.values,
      sent.unsent,
      sent.borders);
  sent.unsent = changed.marks;
  return changed;
}

std::optional<std::vector<ChangedParameter>> ChangedWeights::next() {
  if (next_ == groups_.size()) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  Sent& sent = groups_[next_++];
  const ChangedElements changed =
      ahead_ ? *std::exchange(ahead_, {}) : compare(sent);
  // The device compares while the host handles the changes of this group.
  if (next_ < groups_.size()) {
    ahead_ = compare(groups_[next_]);
  }
  return on_all_ranks(*sent.group, changed);
}

bool ChangedWeights::finish(bool sent) {
  const auto sent_by =
      all_gather_values(mesh_->world(), static_cast<int>(sent));
  const bool by_all = std::ranges::min(sent_by) != 0;
  for (std::size_t i = 0; by_all && i < next_; ++i) {
    groups_[i].unsent.reset();
  }
  if (ahead_) {
    ahead_->counted.synchronize();  // the next pass may use another stream
    ahead_.reset();
  }
  next_ = 0;
  return by_all;
}

std::vector<ChangedParameter> ChangedWeights::on_all_ranks(
    const ParamGroup& group,
    const ChangedElements& changed) const {
  const auto& parameters = group.parameters();
  Communicator& world = mesh_->world();
  const std::vector<ShardChanges> mine = listed_changes(group, changed);
  const auto extents =
      all_gather_extents(world, extents_of(mine, parameters.size()));
  std::int64_t most = 0;  // changes of one rank
  for (const std::vector<Extent>& of_rank : extents) {
    std::int64_t n = 0;
    for (const Extent& extent : of_rank) {
      n += extent.n;
    }
    most = std::max(most, n);
  }
  if (most == 0) {
    return {};
  }
  const bool is_wide = std::ranges::any_of(parameters, [](const auto& p) {
    return c10::multiply_integers(p.whole_shape()) >
           std::numeric_limits<std::int32_t>::max();
  });
  const at::Tensor values = at::empty({most}, changed.copy.options());
  const at::Tensor places =
      at::empty({most}, values.options().dtype(is_wide ? at::kLong : at::kInt));
  std::int64_t done = 0;
  for (const ShardChanges& part : mine) {
    list_places(
        changed,
        part,
        places.narrow(0, done, part.n),
        values.narrow(0, done, part.n));
    done += part.n;
  }
  const at::Tensor all_places = all_gather_rows(world, places);
  const at::Tensor all_values = all_gather_rows(world, values);
  std::vector<std::int64_t> done_of(extents.size(), 0);
  std::vector<ChangedParameter> result;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    std::vector<Places> parts;
    for (std::size_t rank = 0; rank < extents.size(); ++rank) {
      const Extent& extent = extents[rank][p];
      if (extent.n > 0) {
        const auto row = static_cast<std::int64_t>(rank);
        parts.push_back(
            {.extent = extent,
             .indices = all_places[row].narrow(0, done_of[rank], extent.n),
             .values = all_values[row].narrow(0, done_of[rank], extent.n)});
        done_of[rank] += extent.n;
      }
    }
    if (parts.empty()) {
      continue;
    }
    const bool is_sliced = !(parameters[p].slice() == TensorSlice());
    Places all = joined(std::move(parts), is_sliced);
    result.push_back(
        {.name = parameters[p].names.front(),
         .shape = parameters[p].whole_shape(),
         .indices = std::move(all.indices),
         .values = std::move(all.values)});
  }
  return result;
}

}  // namespace flatshard
