#include "flatshard/diagnostics/norms.h"

#include "flatshard/group/frozen_float8.h"
#include "flatshard/runtime/model_meshes.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

namespace flatshard {
namespace {

// Index into the sums of squares for each partial norm.
struct Parts {
  std::vector<at::Tensor> pieces;
  std::vector<std::int64_t> rows;
  std::vector<double> weights;  ///< 1 / replicas
};

void add_shards(
    const ParamGroup& group,
    const at::Tensor& flat,
    std::int64_t first_row,
    Parts& parts) {
  // shards_of lists the parameters in order; one may have several pieces.
  std::int64_t row = first_row - 1;
  const std::string* name = nullptr;
  for (const NamedShard& shard : group.shards_of(flat)) {
    if (name == nullptr || *name != shard.name()) {
      ++row;
    }
    name = &group.parameters()[row - first_row].names.front();
    if (shard.tensor.numel() > 0) {
      parts.pieces.push_back(shard.tensor.to(group.mesh()->device()));
      parts.rows.push_back(row);
      parts.weights.push_back(
          1.0 / static_cast<double>(group.replicas().count));
    }
  }
}

// [num_rows] sums of squares over the pieces of this rank.
at::Tensor
sums_of_squares(const Parts& parts, std::int64_t num_rows, at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
  at::Tensor sums = at::zeros({num_rows}, options);
  if (parts.pieces.empty()) {
    return sums;
  }
  const auto norms = at::_foreach_norm(parts.pieces, 2, at::kFloat);
  const at::Tensor squares = at::stack(norms).to(at::kDouble).square();
  const at::Tensor weights = at::tensor(parts.weights, at::kDouble).to(device);
  const at::Tensor rows = at::tensor(parts.rows, at::kLong).to(device);
  sums.index_add_(0, rows, squares * weights);
  return sums;
}

// Adds up the sums of the parameters on `mesh` over its ranks.
void add_up(
    Mesh& mesh,
    const std::vector<const Mesh*>& meshes,
    const at::Tensor& sums) {
  const auto num = static_cast<std::int64_t>(meshes.size());
  std::vector<std::int64_t> own;
  for (const std::int64_t first : {std::int64_t{0}, num}) {
    for (std::int64_t i = 0; i < num; ++i) {
      if (meshes[i]->same_as(mesh)) {
        own.push_back(first + i);
      }
    }
  }
  if (mesh.size() == 1 || own.empty()) {
    return;
  }
  const at::Tensor rows = at::tensor(own, at::kLong).to(sums.device());
  const at::Tensor of_mesh = sums.index_select(0, rows);
  mesh.world(Purpose::reduce).all_reduce(of_mesh, ReduceOp::sum);
  sums.index_copy_(0, rows, of_mesh);
}

}  // namespace

std::vector<ParameterNorm> parameter_norms(const Runtime& runtime) {
  const at::NoGradGuard no_grad;
  // Rows of the sums: the weights of all parameters, then their gradients.
  std::vector<ParameterNorm> result;
  Parts parts;
  std::vector<bool> has_grad;
  std::vector<const Mesh*> meshes;  // of these parameters
  for (const auto& unit : runtime.units()) {
    for (const auto& group : unit->groups()) {
      if (!has_main_weights(*group)) {
        continue;  // frozen, and dropped
      }
      const auto first = static_cast<std::int64_t>(result.size());
      add_shards(*group, group->weights().main().local(), first, parts);
      for (const GroupParameter& p : group->parameters()) {
        result.push_back({.name = p.names.front()});
        meshes.push_back(group->model_mesh().get());
        has_grad.push_back(
            group->trainable() && group->gradients().reduced().exists());
      }
    }
  }
  const auto num = static_cast<std::int64_t>(result.size());
  std::int64_t first = 0;
  for (const auto& unit : runtime.units()) {
    for (const auto& group : unit->groups()) {
      if (group->trainable() && group->gradients().reduced().exists()) {
        add_shards(
            *group,
            group->gradients().reduced().local(),
            num + first,
            parts);
      }
      if (has_main_weights(*group)) {
        first += static_cast<std::int64_t>(group->parameters().size());
      }
    }
  }
  const at::Tensor sums =
      sums_of_squares(parts, 2 * num, runtime.mesh()->device());
  for (const auto& mesh : model_meshes(runtime.mesh(), runtime.units())) {
    add_up(*mesh, meshes, sums);
  }
  const at::Tensor norms = sums.sqrt().cpu();
  const auto values = norms.accessor<double, 1>();
  for (std::int64_t i = 0; i < num; ++i) {
    result[i].weight = values[i];
    if (has_grad[i]) {
      result[i].grad = values[num + i];
    }
  }
  return result;
}

std::string to_string(const std::vector<ParameterNorm>& norms) {
  std::size_t width = 9;
  for (const ParameterNorm& n : norms) {
    width = std::max(width, n.name.size());
  }
  std::string text = fmt::format(
      "{:<{}}  {:>11}  {:>11}  {:>11}",
      "parameter",
      width,
      "weight",
      "grad",
      "grad/weight");
  for (const ParameterNorm& n : norms) {
    text += fmt::format("\n{:<{}}  {:>11.4e}", n.name, width, n.weight);
    text += n.grad ? fmt::format("  {:>11.4e}", *n.grad)
                   : fmt::format("  {:>11}", "-");
    text += n.grad && n.weight > 0
                ? fmt::format("  {:>11.4e}", *n.grad / n.weight)
                : fmt::format("  {:>11}", "-");
  }
  return text;
}

}  // namespace flatshard
