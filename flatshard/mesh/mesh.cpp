#include "flatshard/mesh/mesh.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using AxisSet = std::vector<int>;

std::string joined_names(
    const std::vector<MeshAxis>& axes,
    std::span<const int> chosen) {
  std::string text;
  for (const int axis : chosen) {
    text += (text.empty() ? "" : "+") + axes[axis].name;
  }
  return text;
}

std::string axes_to_string(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes) {
    text +=
        fmt::format("{}{}: {}", text.empty() ? "" : ", ", axis.name, axis.size);
  }
  return "{" + text + "}";
}

std::int64_t num_ranks(const std::vector<MeshAxis>& axes) {
  std::int64_t ranks = 1;
  for (const MeshAxis& axis : axes) {
    ranks *= axis.size;
  }
  return ranks;
}

void check_axes(const std::vector<MeshAxis>& axes, int rank) {
  FLATSHARD_CHECK(
      !axes.empty(),
      config,
      "a mesh needs at least one axis, got none");
  std::set<std::string> names;
  for (const MeshAxis& axis : axes) {
    FLATSHARD_CHECK(
        !axis.name.empty() && names.insert(axis.name).second,
        config,
        "mesh {}: expected axis names that are not empty and differ, got '{}'",
        axes_to_string(axes),
        axis.name);
    FLATSHARD_CHECK(
        axis.size >= 1,
        config,
        "mesh {}: expected size >= 1 for axis '{}', got {}",
        axes_to_string(axes),
        axis.name,
        axis.size);
  }
  FLATSHARD_CHECK(
      rank >= 0 && rank < num_ranks(axes),
      config,
      "mesh {}: expected a rank below {}, got {}",
      axes_to_string(axes),
      num_ranks(axes),
      rank);
}

// C order: the last axis varies fastest.
std::vector<std::int64_t> coordinates_of(
    const std::vector<MeshAxis>& axes,
    std::int64_t rank) {
  std::vector<std::int64_t> coordinates(axes.size());
  for (std::size_t a = axes.size(); a-- > 0;) {
    coordinates[a] = rank % axes[a].size;
    rank /= axes[a].size;
  }
  return coordinates;
}

// Shard order: the innermost axis is cut first and counts most.
std::int64_t shard_index(
    const std::vector<MeshAxis>& axes,
    const std::vector<std::int64_t>& coordinates,
    std::span<const int> chosen) {
  std::int64_t index = 0;
  for (std::size_t i = chosen.size(); i-- > 0;) {
    index = index * axes[chosen[i]].size + coordinates[chosen[i]];
  }
  return index;
}

std::int64_t product(
    const std::vector<MeshAxis>& axes,
    std::span<const int> chosen) {
  std::int64_t ranks = 1;
  for (const int axis : chosen) {
    ranks *= axes[axis].size;
  }
  return ranks;
}

AxisSet all_axes(std::size_t count) {
  AxisSet axes(count);
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

}  // namespace

std::string_view to_string(Purpose purpose) {
  return purpose == Purpose::gather ? "gather" : "reduce";
}

// Everything that a mesh and its sub-meshes share.
struct Mesh::Root {
  std::vector<MeshAxis> axes;
  std::vector<std::int64_t> coordinates;
  StoreHandle store;  // null: no group can be made
  at::Device device;
  MeshOptions options;
  // Ends after the communicators: their end may have to be watched, too.
  std::shared_ptr<FlightRecorder> flight;
  std::mutex mutex;
  Groups groups;
  // Of meshes made by with_communicators, and how many there were by then.
  std::vector<std::weak_ptr<Communicator>> derived;

  // Axes of size 1 do not matter, unless there is nothing else.
  AxisSet key(AxisSet chosen) const {
    AxisSet real;
    std::copy_if(
        chosen.begin(),
        chosen.end(),
        std::back_inserter(real),
        [&](int a) { return axes[a].size > 1; });
    return real.empty() ? chosen : real;
  }

  Communicator& get(const AxisSet& chosen, Purpose purpose) {
    const std::lock_guard lock(mutex);
    const AxisSet wanted = key(chosen);
    auto found = groups.find({wanted, purpose});
    if (found == groups.end() && !store) {
      const Purpose other =
          purpose == Purpose::gather ? Purpose::reduce : Purpose::gather;
      found = groups.find({wanted, other});
    }
    if (found == groups.end()) {
      FLATSHARD_CHECK(
          store || product(axes, wanted) == 1,
          usage,
          "mesh {}: no group was given for the axes '{}'; pass one to "
          "Mesh::from_groups",
          axes_to_string(axes),
          joined_names(axes, wanted));
      found = groups.insert({{wanted, purpose}, make(wanted, purpose)}).first;
    }
    return *found->second;
  }

  std::shared_ptr<Communicator> make(const AxisSet& chosen, Purpose purpose) {
    const std::string name = fmt::format(
        "{}.{}",
        joined_names(axes, chosen),
        flatshard::to_string(purpose));
    const std::string prefix = prefix_of(chosen);
    const auto size = static_cast<int>(product(axes, chosen));
    auto communicator =
        size == 1
            ? make_self_communicator(name, device)
            : make_communicator(
                  make_prefix_store(prefix, store),
                  static_cast<int>(shard_index(axes, coordinates, chosen)),
                  size,
                  name,
                  device,
                  options.communicator);
    observe(*communicator, prefix + "/" + name);
    return communicator;
  }

  // The groups over the same axes differ in the other coordinates.
  std::string prefix_of(const AxisSet& chosen) const {
    std::string prefix = options.name;
    for (int a = 0; a < static_cast<int>(axes.size()); ++a) {
      if (std::find(chosen.begin(), chosen.end(), a) == chosen.end()) {
        prefix += fmt::format("/{}={}", axes[a].name, coordinates[a]);
      }
    }
    return prefix;
  }

  void observe(Communicator& communicator, const std::string& group) const {
    communicator.set_log(options.log);
    if (flight && communicator.size() > 1) {
      communicator.set_observer(flight, group);
    }
  }
};

Mesh::Mesh(std::shared_ptr<Root> root, std::vector<int> root_axes)
    : root_(std::move(root)), root_axes_(std::move(root_axes)) {
  std::int64_t rank = 0;
  for (const int a : root_axes_) {
    axes_.push_back(root_->axes[a]);
    coordinates_.push_back(root_->coordinates[a]);
    rank = rank * root_->axes[a].size + root_->coordinates[a];
  }
  rank_ = static_cast<int>(rank);
}

std::shared_ptr<Mesh> Mesh::create(
    std::vector<MeshAxis> axes,
    int rank,
    StoreHandle store,
    at::Device device,
    MeshOptions options) {
  check_axes(axes, rank);
  FLATSHARD_CHECK(
      !device.is_cuda() || device.has_index(),
      config,
      "mesh {}: expected a GPU with an index such as cuda:0, got '{}'",
      axes_to_string(axes),
      device.str());
  FLATSHARD_CHECK(
      store || num_ranks(axes) == 1,
      usage,
      "mesh {}: expected a store for more than one rank, got null",
      axes_to_string(axes));
  auto coordinates = coordinates_of(axes, rank);
  auto root = std::shared_ptr<Root>(new Root{
      .axes = std::move(axes),
      .coordinates = std::move(coordinates),
      .store = std::move(store),
      .device = device,
      .options = std::move(options)});
  if (root->options.watcher && num_ranks(root->axes) > 1) {
    root->flight = std::make_shared<FlightRecorder>(
        rank,
        static_cast<int>(num_ranks(root->axes)),
        root->store,
        device,
        FlightRecorderOptions{
            .timeout = root->options.communicator.timeout,
            .connect_timeout = root->options.connect_timeout,
            .name = root->options.name,
            .launcher_serves_store = root->options.launcher_serves_store,
            .on_stuck_abort = root->options.on_stuck_abort});
  }
  const AxisSet all = all_axes(root->axes.size());
  // The same order on all ranks.
  for (const Purpose purpose : {Purpose::gather, Purpose::reduce}) {
    for (const int a : all) {
      root->get({a}, purpose);
    }
    root->get(all, purpose);
  }
  return std::shared_ptr<Mesh>(new Mesh(std::move(root), all));
}

std::shared_ptr<Mesh> Mesh::single(at::Device device, std::string axis_name) {
  return create({{std::move(axis_name), 1}}, 0, {}, device);
}

std::shared_ptr<Mesh> Mesh::from_groups(
    std::vector<MeshAxis> axes,
    int rank,
    at::Device device,
    std::vector<MeshGroup> groups) {
  check_axes(axes, rank);
  auto coordinates = coordinates_of(axes, rank);
  auto root = std::shared_ptr<Root>(new Root{
      .axes = std::move(axes),
      .coordinates = std::move(coordinates),
      .store = {},
      .device = device,
      .options = {}});
  std::shared_ptr<Mesh> mesh(new Mesh(root, all_axes(root->axes.size())));
  for (MeshGroup& group : groups) {
    AxisSet chosen;
    for (const std::string& name : group.axes) {
      chosen.push_back(mesh->axis_index(name));
    }
    std::sort(chosen.begin(), chosen.end());
    FLATSHARD_CHECK(
        group.communicator && !chosen.empty(),
        usage,
        "mesh {}: a group needs axes and a communicator",
        mesh->to_string());
    FLATSHARD_CHECK(
        group.communicator->size() == mesh->group_size(chosen) &&
            group.communicator->rank() == mesh->group_index(chosen),
        usage,
        "mesh {}: expected rank {} of {} in the group over '{}' (innermost "
        "axis first), got rank {} of {} in '{}'",
        mesh->to_string(),
        mesh->group_index(chosen),
        mesh->group_size(chosen),
        joined_names(root->axes, chosen),
        group.communicator->rank(),
        group.communicator->size(),
        group.communicator->name());
    root->groups[{root->key(chosen), group.purpose}] =
        std::move(group.communicator);
  }
  return mesh;
}

int Mesh::size() const {
  return static_cast<int>(num_ranks(axes_));
}

std::vector<std::int64_t> Mesh::axis_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const MeshAxis& axis : axes_) {
    sizes.push_back(axis.size);
  }
  return sizes;
}

int Mesh::axis_index(std::string_view name) const {
  for (int a = 0; a < num_axes(); ++a) {
    if (axes_[a].name == name) {
      return a;
    }
  }
  FLATSHARD_THROW(usage, "mesh {} has no axis '{}'", to_string(), name);
}

std::int64_t Mesh::coordinate(std::string_view name) const {
  return coordinates_[axis_index(name)];
}

at::Device Mesh::device() const {
  return root_->device;
}

std::int64_t Mesh::group_size(std::span<const int> axes) const {
  return product(axes_, axes);
}

std::int64_t Mesh::group_index(std::span<const int> axes) const {
  return shard_index(axes_, coordinates_, axes);
}

Communicator& Mesh::communicator(std::span<const int> axes, Purpose purpose) {
  AxisSet chosen;
  for (const int axis : axes) {
    FLATSHARD_CHECK(
        axis >= 0 && axis < num_axes() &&
            (chosen.empty() || chosen.back() < root_axes_[axis]),
        usage,
        "mesh {}: expected ascending axes below {}, got axis {}",
        to_string(),
        num_axes(),
        axis);
    chosen.push_back(root_axes_[axis]);
  }
  FLATSHARD_CHECK(
      !chosen.empty(),
      usage,
      "mesh {}: expected at least one axis for a group, got none",
      to_string());
  const auto own = own_.find({root_->key(chosen), purpose});
  return own != own_.end() ? *own->second : root_->get(chosen, purpose);
}

Communicator& Mesh::communicator(int axis, Purpose purpose) {
  return communicator(std::span<const int>(&axis, 1), purpose);
}

Communicator& Mesh::world(Purpose purpose) {
  return communicator(all_axes(axes_.size()), purpose);
}

std::shared_ptr<Mesh> Mesh::sub_mesh(
    const std::vector<std::string>& names) const {
  FLATSHARD_CHECK(
      !names.empty(),
      usage,
      "mesh {}: a sub-mesh needs axes",
      to_string());
  std::vector<int> chosen;
  for (const std::string& name : names) {
    chosen.push_back(root_axes_[axis_index(name)]);
  }
  std::sort(chosen.begin(), chosen.end());
  FLATSHARD_CHECK(
      std::adjacent_find(chosen.begin(), chosen.end()) == chosen.end(),
      usage,
      "mesh {}: a sub-mesh names each axis once",
      to_string());
  std::shared_ptr<Mesh> mesh(new Mesh(root_, std::move(chosen)));
  mesh->own_ = own_;
  return mesh;
}

std::shared_ptr<Mesh> Mesh::with_communicators(
    std::vector<MeshGroup> groups) const {
  std::shared_ptr<Mesh> mesh(new Mesh(*this));
  for (MeshGroup& group : groups) {
    AxisSet chosen;
    for (const std::string& name : group.axes) {
      chosen.push_back(root_axes_[axis_index(name)]);
    }
    std::sort(chosen.begin(), chosen.end());
    chosen = root_->key(std::move(chosen));
    const std::lock_guard lock(root_->mutex);
    const auto shared = root_->groups.find({chosen, group.purpose});
    if (shared == root_->groups.end() || shared->second != group.communicator) {
      root_->derived.push_back(group.communicator);
      root_->observe(
          *group.communicator,
          fmt::format(
              "{}/{}/{}",
              root_->prefix_of(chosen),
              group.communicator->name(),
              root_->derived.size()));
    }
    mesh->own_[{std::move(chosen), group.purpose}] =
        std::move(group.communicator);
  }
  return mesh;
}

bool Mesh::same_as(const Mesh& other) const {
  return root_ == other.root_ && root_axes_ == other.root_axes_;
}

bool Mesh::is_part_of(const Mesh& other) const {
  return root_ == other.root_ && std::includes(
                                     other.root_axes_.begin(),
                                     other.root_axes_.end(),
                                     root_axes_.begin(),
                                     root_axes_.end());
}

std::vector<std::string> Mesh::axis_names() const {
  std::vector<std::string> names;
  for (const MeshAxis& axis : axes_) {
    names.push_back(axis.name);
  }
  return names;
}

std::string Mesh::to_string() const {
  return axes_to_string(axes_);
}

const std::shared_ptr<FlightRecorder>& Mesh::flight_recorder() const {
  return root_->flight;
}

void Mesh::check() const {
  if (root_->flight) {
    root_->flight->check();
  }
}

bool Mesh::has_verdict() const {
  return root_->flight && root_->flight->verdict().has_value();
}

void Mesh::set_step(std::int64_t step) {
  if (root_->flight) {
    root_->flight->set_step(step);
  }
}

void Mesh::publish_failure(const std::string& message) {
  if (root_->flight) {
    root_->flight->publish_failure(message);
  }
}

const StoreHandle& Mesh::store() const {
  return root_->store;
}

std::int64_t Mesh::communicator_nbytes() const {
  std::int64_t nbytes = 0;
  for (const auto& [key, communicator] : own_) {
    nbytes += communicator->nbytes();
  }
  return nbytes;
}

void Mesh::restart_communicators() {
  for (const auto& [key, communicator] : own_) {
    communicator->restart();
  }
}

void Mesh::abort() {
  const std::lock_guard lock(root_->mutex);
  std::vector<std::shared_ptr<Communicator>> all;
  for (auto& [key, communicator] : root_->groups) {
    all.push_back(communicator);
  }
  for (const auto& weak : root_->derived) {
    if (auto communicator = weak.lock()) {
      all.push_back(std::move(communicator));
    }
  }
  abort_together(all);
}

}  // namespace flatshard
