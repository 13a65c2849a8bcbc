#include "flatshard/optim/newton_schulz.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <utility>

namespace flatshard {

void NewtonSchulzOptions::validate() const {
  constexpr std::int64_t kMostSteps = 99;  // torch's limit
  FLATSHARD_CHECK(
      steps >= 1 && steps <= kMostSteps,
      config,
      "expected optimizer.ns_steps from 1 to {}, got {}",
      kMostSteps,
      steps);
  FLATSHARD_CHECK(
      eps > 0,
      config,
      "expected optimizer.muon_eps > 0, got {}",
      eps);
}

at::Tensor newton_schulz(
    at::Tensor matrices,
    const NewtonSchulzOptions& options) {
  const at::NoGradGuard no_grad;
  const auto [a, b, c] = options.coefficients;
  const bool is_batch = matrices.dim() == 3;
  at::Tensor x = std::move(matrices);
  const bool is_tall = x.size(-2) > x.size(-1);
  if (is_tall) {
    x = x.mT();
  }
  const at::Tensor norm =
      is_batch ? at::linalg_vector_norm(x, 2, at::IntArrayRef{-2, -1}, true)
               : at::linalg_vector_norm(x, 2);
  x.div_(norm.clamp_min(options.eps));
  for (std::int64_t step = 0; step < options.steps; ++step) {
    const at::Tensor gram = at::matmul(x, x.mT());
    const at::Tensor update = is_batch ? at::baddbmm(gram, gram, gram, b, c)
                                       : at::addmm(gram, gram, gram, b, c);
    x = is_batch ? at::baddbmm(x, update, x, a) : at::addmm(x, update, x, a);
  }
  return is_tall ? x.mT() : x;
}

}  // namespace flatshard
