#pragma once

#include "flatshard/group/param_group.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace flatshard::testing {

/// A strategy on a mesh of these axis sizes, outermost first.
struct GroupCase {
  std::string strategy;
  std::vector<std::int64_t> mesh;

  int world() const {
    int product = 1;
    for (const std::int64_t size : mesh) {
      product *= static_cast<int>(size);
    }
    return product;
  }
  std::vector<MeshAxis> axes() const {
    std::vector<MeshAxis> all;
    for (const std::int64_t size : mesh) {
      all.push_back({"axis" + std::to_string(all.size()), size});
    }
    return all;
  }
  /// Returns the number of shards of a buffer with these placements.
  std::int64_t parts(const Placements& placements) const {
    std::int64_t product = 1;
    for (std::size_t i = 0; i < mesh.size(); ++i) {
      product *= placements[i].is_shard() ? mesh[i] : 1;
    }
    return product;
  }
  friend std::ostream& operator<<(std::ostream& out, const GroupCase& c) {
    out << c.strategy;
    for (const std::int64_t size : c.mesh) {
      out << "_" << size;
    }
    return out;
  }
};

inline const std::vector<GroupCase>& all_cases() {
  static const std::vector<GroupCase> cases{
      {"zero0", {1}},
      {"zero3", {1}},
      {"zero0", {2}},
      {"zero1", {2}},
      {"zero2", {3}},
      {"zero3", {4}},
      {"zero3", {2, 2}},
      {"zero1", {2, 2}},
      {"hsdp", {2, 2}},
      {"hfsdp", {2, 2}},
      {"hfsdp", {2, 3}},
      {"hsdp_zero1", {2, 2}},
      {"hsdp_zero2", {2, 2}}};
  return cases;
}

/// Returns a matrix, a tied vector with an attribute, a scalar and an empty
/// tensor.
inline std::vector<GroupParameter> some_parameters(Granularity matrix = {}) {
  return {
      {.names = {"weight"},
       .shape = {10, 7},
       .placement = {.granularity = matrix},
       .init = InitSpec::normal(0, 1)},
      {.names = {"bias", "tied.bias"},
       .shape = {37},
       .init = InitSpec::uniform(-1, 1),
       .attributes = {{"weight_decay", "none"}}},
      {.names = {"scale"}, .shape = {}, .init = InitSpec::normal(2, 1)},
      {.names = {"empty"}, .shape = {0, 4}, .init = InitSpec::ones()}};
}

inline constexpr std::uint64_t kGroupSeed = 3;

inline std::unique_ptr<ParamGroup> make_group(
    const GroupCase& c,
    std::shared_ptr<Mesh> mesh,
    Precision precision = {.reduce = at::kBFloat16},
    GradScaling scaling = GradScaling::mean,
    double grad_divisor = 1,
    Granularity matrix = {},
    bool grads_in_reduce_dtype = false,
    bool keep_compute_weights = true,
    bool offload = false) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters = some_parameters(matrix),
          .mesh = std::move(mesh),
          .strategy =
              Strategy::named(c.strategy, static_cast<int>(c.mesh.size()))},
      ParamGroupOptions{
          .precision = precision,
          .scaling = scaling,
          .grad_divisor = grad_divisor,
          .grads_in_reduce_dtype = grads_in_reduce_dtype,
          .keep_compute_weights = keep_compute_weights,
          .offload = offload},
      Initializer(kGroupSeed));
}

/// Returns the first values of a parameter, float32, flat.
inline at::Tensor initial(const GroupParameter& p) {
  at::Tensor values = at::empty({c10::multiply_integers(p.shape)});
  Initializer(kGroupSeed).fill(values, p.names.front(), p.init, 0);
  return values;
}

/// Returns the sum of |x| over the padding elements of a full flat
/// tensor.
inline double padding_sum(const FlatLayout& layout, const at::Tensor& flat) {
  double sum = 0;
  for (const FlatRange& range : layout.padding_ranges()) {
    sum += flat.narrow(0, range.offset, range.numel)
               .to(at::kFloat)
               .abs()
               .sum()
               .item<double>();
  }
  return sum;
}

}  // namespace flatshard::testing
