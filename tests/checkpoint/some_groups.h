#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/optim/adamw.h"

namespace flatshard::testing {

/// Parameters of one group, whatever the mesh. Parameters of a group that is
/// not on all of it have a placement with a mesh.
struct SomeGroup {
  std::vector<GroupParameter> parameters;
  bool trainable = true;
};

/// How a model is sharded: what two runs of it may differ in.
struct Sharding {
  std::string strategy = "zero3";
  std::vector<MeshAxis> axes = {{"dp", 1}};
  Granularity granularity = Granularity::element();
  Precision precision = Precision::full();
  StateFormat states = StateFormat::float32;
  bool offloads_states = false;

  int world() const {
    std::int64_t world = 1;
    for (const MeshAxis& axis : axes) {
      world *= axis.size;
    }
    return static_cast<int>(world);
  }
  std::string to_string() const {
    std::string text = strategy;
    for (const MeshAxis& axis : axes) {
      text += fmt::format(" {}", axis.size);
    }
    return text + " " + granularity.to_string();
  }
};

/// Groups and an optimizer without a model around them.
struct SomeGroups {
  SomeGroups(
      const std::vector<SomeGroup>& specs,
      const Sharding& sharding,
      const std::shared_ptr<Mesh>& mesh) {
    for (std::size_t i = 0; i < specs.size(); ++i) {
      std::vector<GroupParameter> parameters = specs[i].parameters;
      for (GroupParameter& parameter : parameters) {
        parameter.placement.granularity = sharding.granularity;
      }
      const auto& part = parameters.front().placement.mesh;
      const std::shared_ptr<Mesh>& own = part ? part : mesh;
      owned.push_back(std::make_unique<ParamGroup>(
          GroupSpec{
              .name = fmt::format("group {}", i),
              .parameters = std::move(parameters),
              .mesh = own,
              .strategy = Strategy::named(sharding.strategy, own->num_axes()),
              .model_mesh = mesh,
              .trainable = specs[i].trainable},
          ParamGroupOptions{
              .precision = sharding.precision,
              .alignment = sharding.states == StateFormat::int8
                               ? kInt8Alignment
                               : kLayoutAlignment},
          Initializer(3)));
      groups.push_back(owned.back().get());
    }
    optimizer = std::make_unique<AdamW>(
        groups,
        AdamWOptions{
            .state_dtype = sharding.states,
            .offload = {
                .enabled = sharding.offloads_states,
                .streams = {.delay_seed = 3, .max_delay_us = 5000}}});
  }

  /// Returns element `i` of a tensor in these tests, exact in any dtype.
  static float value(const std::string& role, const std::string& name, int i) {
    const std::size_t seed = std::hash<std::string>()(role + "/" + name);
    return static_cast<float>((seed + static_cast<std::size_t>(i) * 37) % 251);
  }

  static at::Tensor expected(const OwnedBox& owned) {
    at::Tensor values = at::empty({owned.values.numel()});
    if (values.numel() > 0) {
      for_each_run(
          FlatRuns(owned.shape, owned.box),
          0,
          values.numel(),
          [&](std::int64_t first, std::int64_t at, std::int64_t n) {
            for (std::int64_t i = 0; i < n; ++i) {
              values[at + i] = value(
                  owned.role,
                  owned.names.front(),
                  static_cast<int>(first + i));
            }
          });
    }
    return values.to(owned.values.scalar_type());
  }

  /// Gives everything its value. Parameter j of group i was updated i + j + 1
  /// times.
  void fill() const {
    for (const OwnedBox& each : owned_boxes(groups, optimizer.get())) {
      each.values.copy_(expected(each));
    }
    const auto trained = optimizer->groups().size();
    for (std::size_t i = 0; i < trained; ++i) {
      for (std::size_t j = 0; j < optimizer->groups()[i]->parameters().size();
           ++j) {
        optimizer->set_num_updates(i, j, static_cast<std::int64_t>(i + j) + 1);
      }
    }
    optimizer->set_num_steps(9);
  }

  void fill_with(double number) const {
    for (const OwnedBox& each : owned_boxes(groups, optimizer.get())) {
      each.values.fill_(number);
    }
  }

  /// Returns the names of the tensors that do not have their value.
  std::vector<std::string> wrong() const {
    std::vector<std::string> names;
    for (const OwnedBox& each : owned_boxes(groups, optimizer.get())) {
      if (!each.values.equal(expected(each))) {
        names.push_back(each.role + "/" + each.names.front());
      }
    }
    for (const ParamGroup* group : groups) {
      const at::Tensor compute = group->weights().compute_shard();
      if (compute.defined() &&
          !compute.equal(
              group->weights().main().local().to(compute.scalar_type()))) {
        names.push_back("compute weights of " + group->name());
      }
    }
    return names;
  }

  bool all_are(double number) const {
    for (const OwnedBox& each : owned_boxes(groups, optimizer.get())) {
      if (!each.values.equal(at::full_like(each.values, number))) {
        return false;
      }
    }
    return true;
  }

  std::vector<std::unique_ptr<ParamGroup>> owned;
  std::vector<ParamGroup*> groups;
  std::unique_ptr<AdamW> optimizer;
};

}  // namespace flatshard::testing
