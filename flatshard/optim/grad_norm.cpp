#include "flatshard/optim/grad_norm.h"
#include "flatshard/comm/collective_scope.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

namespace flatshard {
namespace {

/// float32 on GPUs. On CPUs float64, so that the digits of float32 do not
/// depend on how many ranks add their shares.
at::ScalarType norm_dtype(at::Device device) {
  return device.is_cuda() ? at::kFloat : at::kDouble;
}

/// [] sum of the squares of flat values, on their device.
at::Tensor sum_of_squares(const at::Tensor& flat) {
  const at::ScalarType dtype = norm_dtype(flat.device());
  if (flat.is_cuda()) {
    return at::linalg_vector_norm(flat, 2, {}, false, dtype).square();
  }
  at::Tensor sum = at::zeros({}, dtype);
  constexpr std::int64_t kPart = 1 << 16;  // elements cast to float64 at once
  for (const at::Tensor& part : flat.split(kPart)) {
    sum += part.to(dtype).square_().sum();
  }
  return sum;
}

}  // namespace

GradNorm grad_norm_and_scale(
    const std::vector<ParamGroup*>& groups,
    double max_norm) {
  const at::NoGradGuard no_grad;
  FLATSHARD_CHECK(!groups.empty(), usage, "expected at least one group");
  Mesh& mesh = *groups.front()->model_mesh();
  const auto options = at::TensorOptions()
                           .dtype(norm_dtype(mesh.device()))
                           .device(mesh.device());
  std::vector<at::Tensor> parts;
  for (const ParamGroup* group : groups) {
    FLATSHARD_CHECK(
        group->model_mesh()->same_as(mesh),
        usage,
        "expected the groups of one model, on the mesh {}, got {} of a model "
        "on {}; clip each model's groups and combine the norms",
        mesh.to_string(),
        group->name(),
        group->model_mesh()->to_string());
    if (!group->trainable() || !group->gradients().reduced().exists()) {
      continue;
    }
    // Replicas store the same values, so each counts 1 / replicas of them.
    parts.push_back(sum_of_squares(group->gradients().reduced().local())
                        .div_(static_cast<double>(group->replicas().count))
                        .to(options));
  }
  at::Tensor total = parts.empty() ? at::zeros({1}, options)
                                   : at::stack(parts).sum().view({1});
  if (mesh.size() > 1) {
    const CollectiveScope scope("gradient norm");
    mesh.world(Purpose::reduce).all_reduce(total, ReduceOp::sum);
  }
  const at::Tensor norm = total.sqrt().squeeze(0).to(at::kFloat);
  if (max_norm <= 0) {
    return {norm, at::Tensor()};
  }
  return {norm, (max_norm / (norm + 1e-6)).clamp_max(1.0)};
}

}  // namespace flatshard
