#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/mesh/axes.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// Everything that a mesh and its sub-meshes share.
struct Mesh::Root {
  std::vector<MeshAxis> axes;
  std::vector<std::int64_t> coordinates;
  StoreHandle store;  // null: there is one rank
  at::Device device;
  MeshOptions options;
  // Ends after the communicators: their end may have to be watched, too.
  std::shared_ptr<FlightRecorder> flight;
  std::mutex mutex;
  Groups groups;
  /// The key is an axis and a number of ranks; see Mesh::neighbours.
  std::
      map<std::tuple<int, std::int64_t, Purpose>, std::shared_ptr<Communicator>>
          neighbours;
  // The communicators of meshes made by with_communicators, and how many there
  // were by then.
  std::vector<std::weak_ptr<Communicator>> derived;

  // Axes of size 1 do not matter, unless there is nothing else.
  detail::AxisSet key(detail::AxisSet chosen) const {
    detail::AxisSet real;
    std::copy_if(
        chosen.begin(),
        chosen.end(),
        std::back_inserter(real),
        [&](int a) { return axes[a].size > 1; });
    return real.empty() ? chosen : real;
  }

  Communicator& get(const detail::AxisSet& chosen, Purpose purpose) {
    const std::lock_guard lock(mutex);
    const detail::AxisSet wanted = key(chosen);
    auto found = groups.find({wanted, purpose});
    if (found == groups.end()) {
      found = groups.insert({{wanted, purpose}, make(wanted, purpose)}).first;
    }
    return *found->second;
  }

  std::shared_ptr<Communicator> make(
      const detail::AxisSet& chosen,
      Purpose purpose) {
    return make_group(
        fmt::format(
            "{}.{}",
            detail::joined_names(axes, chosen),
            flatshard::to_string(purpose)),
        prefix_of(chosen),
        detail::shard_index(axes, coordinates, chosen),
        detail::product(axes, chosen));
  }

  Communicator& get_neighbours(int axis, std::int64_t size, Purpose purpose) {
    const std::lock_guard lock(mutex);
    auto& found = neighbours[{axis, size, purpose}];
    if (found == nullptr) {
      FLATSHARD_CHECK(
          store || size == 1,
          usage,
          "mesh {}: no group can be made of {} ranks of axis '{}', since the "
          "mesh has no store; make it with Mesh::create",
          detail::axes_to_string(axes),
          size,
          axes[axis].name);
      const std::int64_t at = coordinates[axis];
      found = make_group(
          fmt::format(
              "{} of {}.{}",
              size,
              axes[axis].name,
              flatshard::to_string(purpose)),
          fmt::format(
              "{}/{}={}+{}",
              prefix_of({axis}),
              axes[axis].name,
              at / size * size,
              size),
          at % size,
          size);
    }
    return *found;
  }

  std::shared_ptr<Communicator> make_group(
      const std::string& name,
      const std::string& prefix,
      std::int64_t rank,
      std::int64_t size) {
    const MakeCommunicator make = options.make_communicator
                                      ? options.make_communicator
                                      : make_communicator;
    auto communicator = size == 1 ? make_self_communicator(name, device)
                                  : make(
                                        make_prefix_store(prefix, store),
                                        static_cast<int>(rank),
                                        static_cast<int>(size),
                                        name,
                                        device,
                                        options.communicator);
    observe(*communicator, prefix + "/" + name);
    return communicator;
  }

  // The groups over the same axes differ in the other coordinates.
  std::string prefix_of(const detail::AxisSet& chosen) const {
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

}  // namespace flatshard
