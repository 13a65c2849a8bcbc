#pragma once

#include "tests/checkpoint/some_groups.h"
#include "tests/support/ranks.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {

struct Grid {
  std::int64_t dp = 1;
  std::int64_t ep = 1;
  std::int64_t tp = 1;
  std::string strategy = "zero3";
  Granularity granularity = Granularity::element();

  int world() const { return static_cast<int>(dp * ep * tp); }
  std::string to_string() const {
    return fmt::format(
        "dp {} ep {} tp {} {} {}",
        dp,
        ep,
        tp,
        strategy,
        granularity.to_string());
  }
};

/// Returns parameters of each kind: split by rows, by columns, in two sections,
/// unevenly and not at all; experts by their number and their width.
inline std::vector<SomeGroup> specs(const Mesh& mesh) {
  const std::int64_t tp = mesh.axis(mesh.axis_index("tp")).size;
  const std::int64_t ep = mesh.axis(mesh.axis_index("ep")).size;
  const std::int64_t t = mesh.coordinate("tp");
  const std::int64_t e = mesh.coordinate("ep");
  const auto parameter = [&](std::string name,
                             std::vector<std::int64_t> shape,
                             std::optional<ParameterPlacement> placement) {
    return GroupParameter{
        .names = {std::move(name)},
        .shape = std::move(shape),
        .placement = placement.value_or(ParameterPlacement{}),
        .init = InitSpec::normal(0, 1)};
  };
  const auto over_tp = [&](TensorSlice slice) {
    return ParameterPlacement::cut_over(mesh, {"tp"}, std::move(slice));
  };
  const auto experts = [&](TensorSlice slice) {
    return ParameterPlacement::cut_over(
        mesh,
        {"ep", "tp"},
        slice.cut(0, e, ep));
  };
  constexpr std::int64_t kVocab = 11;
  const IndexRange words{kVocab * t / tp, kVocab * (t + 1) / tp};
  return {
      {.parameters =
           {parameter(
                "embedding",
                {words.size(), 6},
                over_tp(TensorSlice().take(0, kVocab, {words}))),
            parameter(
                "q.weight",
                {8 / tp, 6},
                over_tp(TensorSlice().cut(0, t, tp))),
            parameter("q.bias", {8 / tp}, over_tp(TensorSlice().cut(0, t, tp))),
            parameter(
                "o.weight",
                {6, 8 / tp},
                over_tp(TensorSlice().cut(1, t, tp))),
            parameter(
                "gate_up.weight",
                {16 / tp, 6},
                over_tp(TensorSlice().cut(0, t, tp, 2))),
            parameter(
                "down.weight",
                {5, 8 / tp},
                over_tp(TensorSlice().cut(1, t, tp)))}},
      {.parameters =
           {parameter("norm.weight", {6}, std::nullopt),
            parameter("router.weight", {4, 6}, std::nullopt)}},
      {.parameters = {
           parameter(
               "experts.gate_up",
               {4 / ep, 16 / tp, 3},
               experts(TensorSlice().cut(1, t, tp, 2))),
           parameter(
               "experts.down",
               {4 / ep, 3, 8 / tp},
               experts(TensorSlice().cut(2, t, tp)))}}};
}

/// A model of these parameters on a grid.
struct GridModel {
  GridModel(RankContext& context, const Grid& grid)
      : mesh(context.mesh({{"dp", grid.dp}, {"ep", grid.ep}, {"tp", grid.tp}})),
        groups(
            specs(*mesh),
            {.strategy = grid.strategy, .granularity = grid.granularity},
            mesh) {}

  std::vector<const ParamGroup*> all() const {
    return {groups.groups.begin(), groups.groups.end()};
  }

  std::shared_ptr<Mesh> mesh;
  SomeGroups groups;
};

inline std::vector<Grid> grids() {
  return {
      {.dp = 2, .tp = 2},
      {},
      {.tp = 4},
      {.dp = 3, .granularity = Granularity::row()},
      {.ep = 2, .tp = 2},
      {.dp = 2,
       .tp = 2,
       .strategy = "zero1",
       .granularity = Granularity::row()},
      {.dp = 2, .ep = 2, .strategy = "zero0"},
      {.dp = 2, .ep = 2, .tp = 2}};
}

}  // namespace flatshard::testing
