#include "flatshard/mesh/mesh.h"

#include <algorithm>
#include <mutex>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/device/capability.h"
#include "flatshard/mesh/mesh_root.h"

namespace flatshard {

using detail::all_axes;
using detail::axes_to_string;
using detail::AxisSet;
using detail::check_axes;
using detail::coordinates_of;
using detail::num_ranks;

std::string_view to_string(Purpose purpose) {
  return purpose == Purpose::gather   ? "gather"
         : purpose == Purpose::reduce ? "reduce"
                                      : "exchange";
}

namespace {

/// Returns the items of `all` that `axes` names.
template <class T>
std::vector<T> chosen_of(
    const std::vector<T>& all,
    const std::vector<int>& axes) {
  std::vector<T> chosen;
  for (const int a : axes) {
    chosen.push_back(all[a]);
  }
  return chosen;
}

}  // namespace

Mesh::Mesh(std::shared_ptr<Root> root, std::vector<int> root_axes)
    : MeshCoordinates(
          chosen_of(root->axes, root_axes),
          chosen_of(root->coordinates, root_axes)),
      root_(std::move(root)),
      root_axes_(std::move(root_axes)) {
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
  check_gpu(device);  // before ranks meet
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

at::Device Mesh::device() const {
  return root_->device;
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
      "mesh {}: a group requires at least one axis",
      to_string());
  const auto own = own_.find({root_->key(chosen), purpose});
  return own != own_.end() ? *own->second : root_->get(chosen, purpose);
}

Communicator& Mesh::communicator(int axis, Purpose purpose) {
  return communicator(std::span<const int>(&axis, 1), purpose);
}

Communicator& Mesh::neighbours(int axis, std::int64_t size, Purpose purpose) {
  FLATSHARD_CHECK(
      size >= 1 && this->axis(axis).size % size == 0,
      config,
      "mesh {}: expected a divisor of the {} ranks of axis '{}' for groups of "
      "adjacent ranks, got {}",
      to_string(),
      this->axis(axis).size,
      this->axis(axis).name,
      size);
  return root_->get_neighbours(root_axes_[axis], size, purpose);
}

std::vector<Communicator*> Mesh::communicators(Purpose purpose) const {
  if (!root_->device.is_cpu()) {
    return {};
  }
  std::vector<Communicator*> found;
  const auto add = [&](const Groups& groups) {
    for (const auto& [key, communicator] : groups) {
      if (key.second == purpose) {
        found.push_back(communicator.get());
      }
    }
  };
  add(own_);
  const std::lock_guard lock(root_->mutex);
  add(root_->groups);
  for (const auto& [key, communicator] : root_->neighbours) {
    if (std::get<Purpose>(key) == purpose) {
      found.push_back(communicator.get());
    }
  }
  return found;
}

Communicator& Mesh::world(Purpose purpose) {
  return communicator(all_axes(axes().size()), purpose);
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

std::shared_ptr<Mesh> Mesh::data_mesh() const {
  return sub_mesh_of({AxisRole::data});
}

std::shared_ptr<Mesh> Mesh::token_mesh() const {
  return sub_mesh_of({AxisRole::data, AxisRole::sequence});
}

std::shared_ptr<Mesh> Mesh::sub_mesh_of(
    std::initializer_list<AxisRole> roles) const {
  std::vector<std::string> names;
  for (const MeshAxis& axis : axes()) {
    if (std::ranges::find(roles, axis.role) != roles.end()) {
      names.push_back(axis.name);
    }
  }
  FLATSHARD_CHECK(
      !names.empty(),
      config,
      "mesh {}: expected an axis along which ranks read different samples; add "
      "one of one rank",
      to_string());
  return sub_mesh(names);
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
  for (auto& [key, communicator] : root_->neighbours) {
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
