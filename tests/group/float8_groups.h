#pragma once

#include "flatshard/group/float8_planes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/group/groups.h"

namespace flatshard::testing {

/// Every recipe, with both kinds of columns where it has them.
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
  all.push_back({.recipe = float8::Recipe::rowwise, .cut_in_parts = false});
  return all;
}

inline std::string name_of(const Float8Format& f) {
  return std::string(float8::to_string(f.recipe)) +
         (f.stored_columns ? ", stored columns" : ", derived columns") +
         (f.cut_in_parts ? "" : ", one part");
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
    bool copy_engines = false) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters = matrices(format),
          .mesh = std::move(mesh),
          .strategy =
              Strategy::named(c.strategy, static_cast<int>(c.mesh.size())),
          .trainable = trainable,
          .copy_engines = copy_engines},
      ParamGroupOptions{
          .keep_compute_weights = keep_compute_weights,
          .float8 = format},
      Initializer(kGroupSeed));
}

using Bytes = std::map<std::string, at::Tensor>;

inline at::Tensor copy_of(const at::Tensor& t) {
  return t.contiguous().clone();
}

// All bytes of both planes by parameter, gathered whole and in parts.
inline Bytes gathered(ParamGroup& group, bool copy_engines = false) {
  WeightPlanes& weights = group.weights();
  const Float8Planes& planes = *weights.float8();
  const auto slot = [&](Float8Planes::Plane plane, int part) {
    return at::zeros(
        {planes.slot_nbytes(plane, part)},
        at::TensorOptions(at::kByte));
  };
  Bytes bytes;
  const auto add = [&](int part, const std::string& suffix) {
    std::map<Float8Planes::Plane, at::Tensor> slots;
    for (const auto plane : {Float8Planes::kRows, Float8Planes::kColumns}) {
      slots[plane] = slot(plane, part);
      if (!planes.stores(plane)) {
        planes.derive(part, slots[Float8Planes::kRows], slots[plane]);
        continue;
      }
      weights
          .gather(plane, part, slots[plane], weights.plan_gather(copy_engines));
      if (weights.resident()) {
        slots[plane] = planes.resting(plane);
        if (part != Float8Planes::kWhole) {
          return;
        }
      }
    }
    for (std::size_t i = 0; i < group.parameters().size(); ++i) {
      if (part != Float8Planes::kWhole &&
          planes.part_of(static_cast<std::int64_t>(i)) != part) {
        continue;
      }
      for (const auto plane : {Float8Planes::kRows, Float8Planes::kColumns}) {
        const auto view = planes.view(
            plane,
            static_cast<std::int64_t>(i),
            part,
            slots[plane]);
        const std::string name =
            group.parameters()[i].names.front() +
            (plane == Float8Planes::kRows ? ".rows" : ".columns") + suffix;
        bytes[name] = copy_of(view.data.view(at::kByte));
        bytes[name + ".scales"] = copy_of(
            view.scales.scalar_type() == at::kFloat
                ? view.scales
                : view.scales.contiguous().view(at::kByte));
      }
    }
  };
  add(Float8Planes::kWhole, "");
  for (int part = 0; part < planes.num_parts(); ++part) {
    add(part, " in parts");
  }
  return bytes;
}

inline void
expect_same(const Bytes& got, const Bytes& want, const std::string& what) {
  EXPECT_FALSE(got.empty());
  for (const auto& [name, tensor] : got) {
    // Parts hold what the whole has.
    const std::string key = name.substr(0, name.find(" in parts")) +
                            (name.ends_with(".scales") &&
                                     name.find(" in parts") != std::string::npos
                                 ? ".scales"
                                 : "");
    EXPECT_TRUE(tensor.equal(want.at(key))) << what << ": " << name;
  }
}

}  // namespace flatshard::testing
