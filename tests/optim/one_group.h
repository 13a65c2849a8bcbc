#pragma once

#include "flatshard/group/param_group.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {

/// Returns a group of two parameters, "weight" [40] and "bias" [25] (no decay).
inline std::unique_ptr<ParamGroup> make_group(
    std::shared_ptr<Mesh> mesh,
    const std::string& strategy = "zero3",
    Precision precision = {.reduce = at::kBFloat16},
    bool trainable = true) {
  const int num_axes = mesh->num_axes();
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters =
              {{.names = {"weight"},
                .shape = {40},
                .init = InitSpec::normal(0, 1)},
               {.names = {"bias"},
                .shape = {25},
                .init = InitSpec::normal(0, 1),
                .attributes = {{"weight_decay", "none"}}}},
          .mesh = std::move(mesh),
          .strategy = Strategy::named(strategy, num_axes),
          .trainable = trainable},
      ParamGroupOptions{.precision = precision},
      Initializer(5));
}

/// Returns a full gradient: `values` in both parameters, padding zero.
inline at::Tensor whole_gradient(
    const ParamGroup& group,
    const at::Tensor& weight,
    const at::Tensor& bias) {
  const at::Tensor flat = at::zeros({group.layout().numel()});
  flat.narrow(0, group.layout().tensor_offset(0), 40).copy_(weight);
  flat.narrow(0, group.layout().tensor_offset(1), 25).copy_(bias);
  return flat.to(group.options().precision.reduce);
}

inline void reduce(ParamGroup& group, const at::Tensor& gradient) {
  group.gradients().reduce(gradient, group.plan_reduction(true, true));
}

}  // namespace flatshard::testing
