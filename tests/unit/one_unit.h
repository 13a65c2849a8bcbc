#pragma once

#include "flatshard/fully_shard/unit_contents.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>

#include <memory>
#include <utility>

namespace flatshard::testing {

/// Returns the contents of a unit with a matrix "weight" [4, 2] and a vector
/// "bias" [3] of float32. They count up from 0 and from 100.
inline UnitContents one_unit_contents(
    const RankContext& context,
    const char* strategy) {
  GroupSpec spec{
      .name = "unit",
      .mesh = context.mesh(),
      .strategy = Strategy::named(strategy, 1)};
  const auto add = [&](const char* name, const at::Tensor& values) {
    spec.parameters.push_back(
        {.names = {name},
         .shape = values.sizes().vec(),
         .precision = Precision::full(),
         .values = values,
         .tensor = values.clone().requires_grad_()});
  };
  add("weight", at::arange(8, at::kFloat).view({4, 2}));
  add("bias", at::arange(100, 103, at::kFloat));
  return make_unit_contents(std::move(spec), {}, Initializer(0));
}

inline std::unique_ptr<Unit> one_unit(
    const RankContext& context,
    const char* strategy) {
  UnitContents contents = one_unit_contents(context, strategy);
  return std::make_unique<Unit>(
      0,
      "unit",
      nullptr,
      std::move(contents.groups),
      std::move(contents.parameters));
}

}  // namespace flatshard::testing
