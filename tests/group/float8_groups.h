#pragma once

#include "flatshard/group/float8_codec.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/group/groups.h"

namespace flatshard::testing {

/// Returns every recipe, with both kinds of columns where it has them.
inline std::vector<Float8Format> formats() {
  std::vector<Float8Format> all;
  for (const float8::Recipe recipe :
       {float8::Recipe::tensorwise,
        float8::Recipe::rowwise,
        float8::Recipe::blockwise,
        float8::Recipe::mxfp8}) {
    all.push_back({.recipe = recipe});
    if (float8::has_power_of_two_scales(recipe)) {
      all.push_back({.recipe = recipe, .stored_columns = true});
    }
  }
  all.push_back(
      {.recipe = float8::Recipe::mxfp8, .rounding = float8::Rounding::floor});
  all.push_back(
      {.recipe = float8::Recipe::rowwise, .gather_parts = GatherParts::unit});
  return all;
}

inline std::string name_of(const Float8Format& f) {
  return std::string(float8::to_string(f.recipe)) +
         (f.stored_columns ? ", stored columns" : ", derived columns") +
         (f.gather_parts == GatherParts::unit ? ", one part" : "");
}

// Widths that no segment shares, and rows that no number of ranks divides.
inline std::vector<GroupParameter> matrices(const Float8Format& format) {
  const std::int64_t n = format.recipe == float8::Recipe::blockwise ? 128 : 32;
  std::vector<GroupParameter> all;
  for (const auto& [name, rows, columns, deviation] :
       {std::tuple{"wide", 1, 4, 0.02F},
        {"tall", 5, 1, 1.0F},
        {"square", 3, 3, 30.0F}}) {
    all.push_back(
        {.names = {name},
         .shape = {rows * n, columns * n},
         .init = InitSpec::normal(0, deviation)});
  }
  return all;
}

inline std::unique_ptr<ParamGroup> fp8_group(
    const GroupCase& c,
    std::shared_ptr<Mesh> mesh,
    const Float8Format& format,
    bool trainable = true,
    bool keep_compute_weights = true,
    bool peers_read = false) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters = matrices(format),
          .mesh = std::move(mesh),
          .strategy =
              Strategy::named(c.strategy, static_cast<int>(c.mesh.size())),
          .trainable = trainable,
          .peers_read = peers_read},
      ParamGroupOptions{
          .keep_compute_weights = keep_compute_weights,
          .float8 = format},
      Initializer(kGroupSeed));
}

using Bytes = std::map<std::string, at::Tensor>;

inline at::Tensor copy_of(const at::Tensor& t) {
  return t.contiguous().clone();
}

inline float8::Plane values(const PlaneView& view) {
  return {view.data, view.scales};
}

// Returns all bytes of both planes by parameter, as a unit and in parts.
inline Bytes gathered(ParamGroup& group, bool from_peers = false) {
  WeightPlanes& weights = group.weights();
  const std::vector<Plane>& planes = weights.planes();
  Bytes bytes;
  const auto add = [&](PartId part, const std::string& suffix) {
    std::map<PlaneId, at::Tensor> slots;
    for (PlaneId id = 0; id < static_cast<PlaneId>(planes.size()); ++id) {
      const Plane& plane = planes[id];
      if (plane.empty()) {
        continue;
      }
      slots[id] =
          at::zeros({plane.part(part).nbytes}, at::TensorOptions(at::kByte));
      if (!plane.stored()) {
        weights.derive(id, part, slots.at(plane.source), slots[id]);
        continue;
      }
      weights.gather(id, part, slots[id], weights.plan_gather(from_peers));
      if (weights.resident()) {
        slots[id] = plane.resting.local();
        if (part != kWhole) {
          return;
        }
      }
    }
    for (const auto& [id, slot] : slots) {
      const Plane& plane = planes[id];
      const PlanePart& at = plane.part(part);
      for (std::int64_t i = at.first_parameter;
           i < at.first_parameter + at.num_parameters;
           ++i) {
        const auto view = weights.view(id, part, i, slot);
        const std::string name = group.parameters()[i].names.front() + "." +
                                 std::string(plane.name) + suffix;
        bytes[name] = copy_of(view.data.view(at::kByte));
        bytes[name + ".scales"] = copy_of(
            view.scales.scalar_type() == at::kFloat
                ? view.scales
                : view.scales.contiguous().view(at::kByte));
      }
    }
  };
  add(kWhole, "");
  const auto num_parts = static_cast<PartId>(planes.back().parts.size());
  for (PartId part = 0; part < num_parts; ++part) {
    add(part, " in parts");
  }
  return bytes;
}

inline void
expect_same(const Bytes& got, const Bytes& want, const std::string& what) {
  EXPECT_FALSE(got.empty());
  for (const auto& [name, tensor] : got) {
    // Parts have the bytes of the complete plane.
    const std::string key = name.substr(0, name.find(" in parts")) +
                            (name.ends_with(".scales") &&
                                     name.find(" in parts") != std::string::npos
                                 ? ".scales"
                                 : "");
    EXPECT_TRUE(tensor.equal(want.at(key))) << what << ": " << name;
  }
}

}  // namespace flatshard::testing
