#include "flatshard/optim/grad_norm.h"
#include "flatshard/comm/collective_scope.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

namespace flatshard {
namespace {

/// [] float32 norm of flat values. CPUs add squares in one float32 pass, which
/// loses digits over millions of them, and others for other shards: there rows
/// come first.
at::Tensor norm_of(const at::Tensor& flat) {
  const auto norm = [](const at::Tensor& values, at::OptionalIntArrayRef dim) {
    return at::linalg_vector_norm(values, 2, dim, false, at::kFloat);
  };
  constexpr std::int64_t kRow = 1024;
  const std::int64_t rows = flat.numel() / kRow;
  if (flat.is_cuda() || rows == 0) {
    return norm(flat, {});
  }
  const at::Tensor norms = at::cat(
      {norm(flat.narrow(0, 0, rows * kRow).view({rows, kRow}), {1}),
       norm(flat.slice(0, rows * kRow), {}).view({1})});
  return at::linalg_vector_norm(norms.to(at::kDouble), 2).to(at::kFloat);
}

}  // namespace

GradNorm grad_norm_and_scale(
    const std::vector<ParamGroup*>& groups,
    double max_norm) {
  const at::NoGradGuard no_grad;
  FLATSHARD_CHECK(!groups.empty(), usage, "expected at least one group");
  Mesh& mesh = *groups.front()->model_mesh();
  std::vector<at::Tensor> parts;
  for (const ParamGroup* group : groups) {
    FLATSHARD_CHECK(
        group->model_mesh()->same_as(mesh),
        usage,
        "expected the groups of one model, on the mesh {}, got {} of a model "
        "on "
        "{}; clip each model's groups and combine the norms",
        mesh.to_string(),
        group->name(),
        group->model_mesh()->to_string());
    if (!group->trainable() || !group->gradients().has_reduced()) {
      continue;
    }
    const at::Tensor norm = norm_of(group->gradients().reduced().local());
    // Replicas hold the same values: each counts for its part.
    parts.push_back(norm.square()
                        .div_(static_cast<double>(group->replicas().count))
                        .to(mesh.device()));
  }
  const auto options =
      at::TensorOptions().dtype(at::kFloat).device(mesh.device());
  at::Tensor total = parts.empty() ? at::zeros({1}, options)
                                   : at::stack(parts).sum().view({1});
  if (mesh.size() > 1) {
    const CollectiveScope scope("gradient norm");
    mesh.world(Purpose::reduce).all_reduce(total, ReduceOp::sum);
  }
  const at::Tensor norm = total.sqrt().squeeze(0);
  if (max_norm <= 0) {
    return {norm, at::Tensor()};
  }
  return {norm, (max_norm / (norm + 1e-6)).clamp_max(1.0)};
}

}  // namespace flatshard
