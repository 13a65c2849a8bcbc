#include "flatshard/checkpoint/changed_weights.h"

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace flatshard {
namespace {

/// Returns the values as integers of their size: NaN equals itself, and 0
/// differs from -0.
at::Tensor bits_of(const at::Tensor& values) {
  switch (values.element_size()) {
    case 1:
      return values.view(at::kByte);
    case 2:
      return values.view(at::kShort);
    case 4:
      return values.view(at::kInt);
    default:
      return values.view(at::kLong);
  }
}

bool fits_int32(std::int64_t numel) {
  return numel <= std::numeric_limits<std::int32_t>::max();
}

at::Tensor weights_of(const ParamGroup& group, at::ScalarType dtype) {
  return group.weights().main_on_device().local().to(dtype);
}

/// Returns the places of a shard's elements in the flattened full parameter.
/// @param elements  of the shard, ascending.
at::Tensor places_of(const NamedShard& shard, const at::Tensor& elements) {
  if (shard.slice == TensorSlice()) {
    return elements + shard.begin;
  }
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

/// Returns the tensors one after another, without a copy of a single one.
at::Tensor joined(const std::vector<at::Tensor>& parts) {
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

/// Returns every rank's `mine` [n], filled up to `most` elements: [ranks,
/// most]. Collective.
at::Tensor all_gather_padded(
    Communicator& world,
    const at::Tensor& mine,
    std::int64_t most) {
  if (world.size() == 1) {
    return mine.unsqueeze(0);
  }
  const at::Tensor in = at::zeros({most}, mine.options());
  in.narrow(0, 0, mine.numel()).copy_(mine);
  const at::Tensor out = at::empty({world.size() * most}, in.options());
  world.all_gather(out, in);
  return out.view({world.size(), most});
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
    const at::ScalarType own = group->weights().main().dtype();
    const at::Tensor now =
        weights_of(*group, dtype_of ? dtype_of(*group) : own);
    const bool shares = now.is_alias_of(group->weights().main().local());
    groups_.push_back({.group = group, .values = shares ? now.clone() : now});
  }
}

std::optional<std::vector<ChangedParameter>> ChangedWeights::next() {
  if (next_ == groups_.size()) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  Sent& sent = groups_[next_++];
  const at::Tensor now = weights_of(*sent.group, sent.values.scalar_type());
  Elements changed;
  changed.positions = bits_of(now).ne(bits_of(sent.values)).nonzero().view(-1);
  changed.values = now.index_select(0, changed.positions);
  sent.returned = {
      changed.positions.to(fits_int32(now.numel()) ? at::kInt : at::kLong),
      changed.values};
  return on_all_ranks(*sent.group, changed);
}

bool ChangedWeights::finish(bool sent) {
  const at::NoGradGuard no_grad;
  const auto sent_by =
      all_gather_values(mesh_->world(), static_cast<int>(sent));
  const bool by_all = std::ranges::min(sent_by) != 0;
  for (Sent& group : groups_) {
    const auto [positions, values] = std::exchange(group.returned, {});
    if (by_all && positions.defined()) {
      group.values.index_copy_(0, positions.to(at::kLong), values);
    }
  }
  next_ = 0;
  return by_all;
}

std::vector<ChangedParameter> ChangedWeights::on_all_ranks(
    const ParamGroup& group,
    const Elements& changed) const {
  const auto& parameters = group.parameters();
  const auto num = static_cast<std::int64_t>(parameters.size());
  const std::vector<NamedShard> shards = group.main_shards();
  const at::Device device = changed.positions.device();

  // The changes of each shard are a run of all changes of the rank.
  std::vector<std::int64_t> borders;
  for (const NamedShard& shard : shards) {
    borders.push_back(shard.local_offset);
    borders.push_back(shard.local_offset + shard.tensor.numel());
  }
  const at::Tensor runs = at::searchsorted(
                              changed.positions,
                              at::tensor(borders, at::kLong).to(device))
                              .cpu();
  const auto* run = runs.const_data_ptr<std::int64_t>();
  const at::Tensor counts = at::zeros({num}, at::kLong);
  std::vector<at::Tensor> values{changed.values.narrow(0, 0, 0)};
  const bool is_wide = std::ranges::any_of(parameters, [](const auto& p) {
    return !fits_int32(c10::multiply_integers(p.whole_shape()));
  });
  std::vector<at::Tensor> places{
      changed.positions.narrow(0, 0, 0).to(is_wide ? at::kLong : at::kInt)};
  std::size_t i = 0;  // the parameter of a shard
  for (const NamedShard& shard : shards) {
    while (parameters[i].names != shard.names) {
      ++i;
    }
    const std::int64_t first = *run++;
    const std::int64_t n = *run++ - first;
    if (n == 0 || shard.dropped || shard.replicas.index != 0) {
      continue;
    }
    counts.mutable_data_ptr<std::int64_t>()[i] += n;
    places.push_back(
        places_of(
            shard,
            changed.positions.narrow(0, first, n) - shard.local_offset)
            .to(places.front().scalar_type()));
    values.push_back(changed.values.narrow(0, first, n));
  }

  Communicator& world = mesh_->world();
  const at::Tensor count_of_ranks =
      all_gather_padded(world, counts.to(device), num).cpu();
  const auto* count = count_of_ranks.const_data_ptr<std::int64_t>();
  const auto most = count_of_ranks.sum(1).max().item<std::int64_t>();
  if (most == 0) {
    return {};
  }
  const at::Tensor all_places = all_gather_padded(world, at::cat(places), most);
  const at::Tensor all_values = all_gather_padded(world, at::cat(values), most);
  std::vector<std::int64_t> done(world.size(), 0);
  std::vector<ChangedParameter> result;
  for (std::int64_t p = 0; p < num; ++p) {
    std::vector<at::Tensor> place_of;
    std::vector<at::Tensor> value_of;
    for (std::int64_t rank = 0; rank < world.size(); ++rank) {
      const std::int64_t n = count[rank * num + p];
      if (n > 0) {
        place_of.push_back(all_places[rank].narrow(0, done[rank], n));
        value_of.push_back(all_values[rank].narrow(0, done[rank], n));
        done[rank] += n;
      }
    }
    if (place_of.empty()) {
      continue;
    }
    ChangedParameter changes{
        .name = parameters[p].names.front(),
        .shape = parameters[p].whole_shape(),
        .indices = joined(place_of),
        .values = joined(value_of)};
    if (place_of.size() > 1 || parameters[p].slice() != TensorSlice()) {
      const auto [indices, order] = at::sort(changes.indices);
      changes.indices = indices;
      changes.values = changes.values.index_select(0, order);
    }
    result.push_back(std::move(changes));
  }
  return result;
}

}  // namespace flatshard
