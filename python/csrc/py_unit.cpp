#include "python/csrc/py_unit.h"

#include "flatshard/core/error.h"
#include "flatshard/layout/local_range.h"
#include "flatshard/optim/moments.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace flatshard::python {
namespace {

bool is_computed_with(at::ScalarType dtype) {
  return at::isFloatingType(dtype) && c10::elementSize(dtype) > 1;
}

// Returns the number of elements of one slice along the first dimension. A
// DTensor may be split between slices.
std::int64_t slice_numel(const std::vector<std::int64_t>& shape) {
  return Granularity::dim0().granule_numel(shape);
}

// With int8 states a shard consists of full blocks and full slices. So it may
// have this many slices of a member more than its fair share.
constexpr std::int64_t kMaxSlicesOfBlocks = 8;

bool is_odd(const PyUnit::Member& member) {
  if (member.granularity.kind() != Granularity::Kind::dim0) {
    return false;  // the other kinds are not split at blocks
  }
  const std::int64_t width = slice_numel(member.values.sizes().vec());
  return std::lcm(width, kInt8Alignment) >
         std::max(kMaxSlicesOfBlocks * width, kInt8Alignment);
}

// Such a parameter keeps float32 states, see state_format_of.
bool is_small(const PyUnit::Member& member, std::int64_t number_of_slices) {
  return member.values.numel() * number_of_slices < kMinInt8Numel;
}

}  // namespace

PyUnit::PyUnit(
    const std::vector<Member>& members,
    const std::shared_ptr<Mesh>& mesh,
    Options options)
    : int8_states_(options.int8_states),
      grads_in_place_(options.grads_in_place || options.float8.has_value()) {
  const std::int64_t num_slices = options.number_of_slices;
  const auto odd = std::ranges::find_if(members, [&](const Member& member) {
    return is_odd(member) && !is_small(member, num_slices);
  });
  if (odd != members.end()) {
    odd_member_ = odd - members.begin();
  }
  const bool may_have_blocks =
      !odd_member_ && std::ranges::any_of(members, [&](const Member& member) {
        return is_computed_with(member.values.scalar_type()) &&
               !is_small(member, num_slices);
      });
  const bool has_blocks = int8_states_.value_or(may_have_blocks);
  if (has_blocks) {
    options.group.alignment = kInt8Alignment;
  }
  std::vector<GroupParameter> list;
  for (const Member& member : members) {
    const at::ScalarType own = member.values.scalar_type();
    const auto shape = member.values.sizes().vec();
    // Slices of a small parameter that are blocks would be larger than it.
    const bool is_split =
        !has_blocks || !is_odd(member) || !is_small(member, num_slices);
    ParameterPlacement placement{
        .mesh = options.part,
        .granularity = is_split ? member.granularity : Granularity::tensor()};
    if (num_slices > 1) {
      FLATSHARD_CHECK(
          !shape.empty(),
          usage,
          "parameter {} has no dimension to be a slice along; expected at "
          "least one for a module on a part of the model's mesh",
          member.name);
      placement.slice = TensorSlice().cut(0, options.which_slice, num_slices);
      placement.grad_divisor = static_cast<double>(num_slices);
    }
    if (shape.empty()) {
      // A parameter without a dimension for a DTensor to split: every rank
      // stores and updates all of it, and its gradient is all-reduced.
      placement.strategy = Strategy::named(
          "zero0",
          (options.part ? *options.part : *mesh).num_axes());
    } else if (options.part) {
      placement.strategy =
          Strategy::named(options.strategy, options.part->num_axes());
    }
    list.push_back(
        {.names = {member.name},
         .shape = shape,
         .placement = std::move(placement),
         .precision =
             Precision{
                 .compute = is_computed_with(own)
                                ? member.compute_dtype.value_or(own)
                                : own,
                 .reduce = member.reduce_dtype,
                 .main_params = own,
                 .main_grads = own},
         .float8 = member.float8 ? options.float8 : std::nullopt,
         .trainable = member.trainable,
         .apart = member.apart,
         .has_weights = member.has_weights,
         .init = InitSpec::zeros(),
         .values =
             member.values.is_meta() ? at::Tensor() : member.values.detach(),
         .tensor = member.whole});
    if (member.float32_states) {
      list.back().attributes[kStateDtypeAttribute] = "float32";
    }
  }
  options.group.keep_compute_weights = options.peers_read;
  const py::gil_scoped_release no_gil;
  contents_ = make_unit_contents(
      {.name = members.empty() ? "unit" : "unit of " + members[0].name,
       .parameters = std::move(list),
       .mesh = mesh,
       .strategy = options.part
                       ? Strategy::named("zero0", mesh->num_axes())
                       : Strategy::named(options.strategy, mesh->num_axes()),
       .peers_read = options.peers_read},
      options.group,
      Initializer(0));
  for (const auto& group : contents_.groups) {
    groups_.push_back(group.get());
  }
  for (const UnitParameter& p : contents_.parameters) {
    places_.push_back({.group = p.group, .index = p.index});
    find_rows(places_.back());
    wholes_.push_back(p.tensor);
  }
}

void PyUnit::find_rows(PlaceInGroup& place) const {
  const ParamGroup& g = *groups_[place.group];
  place.shape = g.parameters().at(place.index).shape;
  std::int64_t numel = 0;
  for (const Piece& piece : g.weights().main().local_pieces(place.index)) {
    place.offset = piece.local_offset;
    numel = piece.numel;
  }
  if (!place.shape.empty() && !is_whole(g)) {
    place.shape[0] = numel / slice_numel(place.shape);
  }
  if (c10::multiply_integers(place.shape) == 0) {
    place.nowhere = std::make_shared<char>();
  }
}

void PyUnit::check_int8_states() const {
  FLATSHARD_CHECK(
      int8_states_ != false,
      config,
      "state_dtype = torch.int8: unit {} has ShardOptions(int8_states=False); "
      "leave the option out",
      name_);
  if (!odd_member_ || int8_states_ == true) {
    return;
  }
  const PlaceInGroup& place = places_.at(*odd_member_);
  const GroupParameter& p = groups_[place.group]->parameters().at(place.index);
  FLATSHARD_THROW(
      config,
      "state_dtype = torch.int8: parameter {} of shape [{}] has slices of {} "
      "elements along its first dimension, so shards of full blocks of {} "
      "elements would be padded; accept that with fully_shard(..., "
      "options=ShardOptions(int8_states=True)) for its unit (as_fsdp2: "
      "--int8-states), or use another state_dtype for the unit",
      p.names.front(),
      fmt::join(p.shape, ", "),
      slice_numel(p.shape),
      kInt8Alignment);
}

bool PyUnit::is_whole(const ParamGroup& group) {
  return group.weights().main().local().numel() == group.layout().numel();
}

at::Tensor PyUnit::rows_of(std::size_t i, const at::Tensor& flat) const {
  return rows_at(i, flat, places_.at(i).offset);
}

at::Tensor PyUnit::rows_at(
    std::size_t i,
    const at::Tensor& flat,
    std::int64_t begin) const {
  const PlaceInGroup& place = places_.at(i);
  // It has a separate storage, since a program that saves or stages a tensor
  // uses its storage, and finds shared tensors by the storage's address. Also
  // without rows it keeps `flat`.
  char* const data =
      place.nowhere
          ? place.nowhere.get()
          : static_cast<char*>(flat.data_ptr()) +
                begin * static_cast<std::int64_t>(flat.element_size());
  return at::for_blob(data, place.shape)
      .deleter([flat, nowhere = place.nowhere](void*) {})
      .options(flat.options())
      .target_device(flat.device())
      .make_tensor();
}

at::Tensor PyUnit::shard(std::size_t i) const {
  return rows_of(i, group(i).weights().main().local());
}

std::optional<at::Tensor> PyUnit::grad(std::size_t i) const {
  const ParamGroup& g = group(i);
  if (!g.trainable() || !g.gradients().reduced().exists()) {
    return std::nullopt;
  }
  return rows_of(i, g.gradients().reduced().local());
}

std::vector<std::int64_t> PyUnit::cuts(std::size_t i) const {
  if (is_whole(group(i))) {
    return {};
  }
  const FlatLayout& layout = group(i).layout();
  const std::int64_t width =
      slice_numel(group(i).parameters().at(places_[i].index).shape);
  std::vector<std::int64_t> cuts{0};
  for (std::int64_t s = 0; s < layout.num_shards(); ++s) {
    std::int64_t numel = 0;
    for (const Piece& piece : layout.shard_pieces(places_[i].index, s)) {
      numel += piece.numel;
    }
    cuts.push_back(cuts.back() + numel / width);
  }
  return cuts;
}

std::vector<std::int64_t> PyUnit::shard_of_ranks(std::size_t i) const {
  const ParamGroup& g = group(i);
  const Mesh& mesh = *g.mesh();
  const auto sizes = mesh.axis_sizes();
  std::vector<std::int64_t> shards;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    std::vector<std::int64_t> coordinate(sizes.size());
    std::int64_t rest = rank;
    for (std::size_t axis = sizes.size(); axis-- > 0; rest /= sizes[axis]) {
      coordinate[axis] = rest % sizes[axis];
    }
    shards.push_back(shard_span(
                         g.layout().num_shards(),
                         g.strategy().optimizer,
                         sizes,
                         coordinate)
                         .first);
  }
  return shards;
}

void PyUnit::set_part(
    std::size_t i,
    const std::optional<std::vector<Cut>>& cuts,
    Replicas outside) {
  ParamGroup& g = group(i);
  const std::int64_t index = places_.at(i).index;
  TensorSlice slice = g.parameters().at(index).slice();
  if (cuts) {
    slice = TensorSlice();
    for (const auto& [dim, whole, begin, end] : *cuts) {
      slice = slice.take(dim, whole, {{begin, end}});
    }
  }
  g.set_part(index, std::move(slice), outside);
}

void PyUnit::join(PyUnit& other) {
  FLATSHARD_CHECK(
      !adopted_ && !other.adopted_,
      usage,
      "units {} and {} can no longer be joined: one of them has a runtime",
      name_,
      other.name_);
  const std::size_t first = groups_.size();
  std::move(
      other.contents_.groups.begin(),
      other.contents_.groups.end(),
      std::back_inserter(contents_.groups));
  for (UnitParameter& p : other.contents_.parameters) {
    p.group += first;
    contents_.parameters.push_back(std::move(p));
  }
  for (PlaceInGroup& place : other.places_) {
    place.group += first;
    places_.push_back(std::move(place));
  }
  groups_.insert(groups_.end(), other.groups_.begin(), other.groups_.end());
  wholes_.insert(wholes_.end(), other.wholes_.begin(), other.wholes_.end());
  grads_in_place_ = grads_in_place_ || other.grads_in_place_;
  other.contents_ = {};
  other.places_.clear();
  other.groups_.clear();
  other.wholes_.clear();
}

void PyUnit::set_names(
    const std::string& unit,
    const std::vector<std::vector<std::string>>& names) {
  FLATSHARD_CHECK(!adopted_, usage, "unit {} has its names already", name_);
  name_ = unit;
  contents_.set_names(unit, names);
}

std::unique_ptr<Unit> PyUnit::adopt(UnitId id) {
  FLATSHARD_CHECK(!adopted_, usage, "unit {} has a runtime already", name_);
  adopted_ = true;
  auto unit = std::make_unique<Unit>(
      id,
      name_,
      nullptr,
      std::move(contents_.groups),
      std::move(contents_.parameters));
  unit->gradients().set_writes_in_place(grads_in_place_);
  return unit;
}

std::vector<ParamGroup*> groups_of(
    const std::vector<std::shared_ptr<PyUnit>>& units) {
  std::vector<ParamGroup*> groups;
  for (const auto& unit : units) {
    for (std::size_t g = 0; g < unit->num_groups(); ++g) {
      groups.push_back(&unit->group_at(g));
    }
  }
  return groups;
}

std::vector<ParamGroup*> trainable_groups_of(
    const std::vector<std::shared_ptr<PyUnit>>& units) {
  std::vector<ParamGroup*> groups = groups_of(units);
  std::erase_if(groups, [](const ParamGroup* g) { return !g->trainable(); });
  return groups;
}

}  // namespace flatshard::python
