#include "flatshard/optim/newton_schulz.h"

#include "flatshard/core/error.h"
#include "flatshard/optim/muon_cuda.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

namespace flatshard {
namespace {

// Blocks of more rows are split further. Smaller blocks would leave out more of
// the elements above the diagonal, but their matmuls are slower.
constexpr std::int64_t kBlockRows = 1024;

// Returns the rows of the blocks on the diagonal of a symmetric matrix of
// `rows` rows: `rows` if it is not split.
std::int64_t block_rows(std::int64_t rows) {
  constexpr std::int64_t kMultiple = 128;
  while (rows > kBlockRows && rows % (2 * kMultiple) == 0) {
    rows /= 2;
  }
  return rows;
}

// out = beta * add + alpha * x x^T, or x x^T without `add`, for a symmetric
// `add`. Multiplies what is below the diagonal in batches of square blocks: one
// of half the rows, two of a quarter, and so on, and then the blocks on the
// diagonal. The elements above it are copies.
void symmetric_matmul(
    const at::Tensor& out,
    const at::Tensor& x,
    const std::optional<at::Tensor>& add = {},
    double beta = 0,
    double alpha = 1) {
  const std::int64_t rows = x.size(0);
  const std::int64_t least = block_rows(rows);
  // `height` rows from `first` on in each diagonal block of `n` rows, times the
  // first rows of the block.
  const auto multiply =
      [&](std::int64_t n, std::int64_t first, std::int64_t height) {
        const std::int64_t num = rows / n;
        const at::Tensor stacked = x.unflatten(0, {num, n});
        const auto blocks = [&](const at::Tensor& of) {
          return of.as_strided(
              {num, height, height},
              {n * (rows + 1), rows, 1},
              of.storage_offset() + first * rows);
        };
        at::Tensor to = blocks(out);
        const at::Tensor left = stacked.narrow(1, first, height);
        const at::Tensor right = stacked.narrow(1, 0, height).mT();
        if (add) {
          at::baddbmm_out(to, blocks(*add), left, right, beta, alpha);
        } else {
          at::bmm_out(to, left, right);
        }
      };
  for (std::int64_t n = rows; n > least; n /= 2) {
    multiply(n, n / 2, n / 2);
  }
  multiply(least, 0, least);
  mirror_lower_cuda(out);
}

// The iteration with symmetric matrices that are multiplied by blocks.
at::Tensor iterate_by_blocks(at::Tensor x, const NewtonSchulzOptions& options) {
  const auto [a, b, c] = options.coefficients;
  const at::Tensor gram = at::empty({x.size(0), x.size(0)}, x.options());
  const at::Tensor update = at::empty_like(gram);
  at::Tensor next = at::empty_like(x);
  for (std::int64_t step = 0; step < options.steps; ++step) {
    symmetric_matmul(gram, x);
    symmetric_matmul(update, gram, gram, b, c);
    add_matmul_cuda(next, update, x, a);
    std::swap(x, next);
  }
  return x;
}

}  // namespace

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
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16 && !is_batch &&
      block_rows(x.size(0)) < x.size(0)) {
    x = iterate_by_blocks(std::move(x), options);
    return is_tall ? x.mT() : x;
  }
  for (std::int64_t step = 0; step < options.steps; ++step) {
    const at::Tensor gram = at::matmul(x, x.mT());
    const at::Tensor update = is_batch ? at::baddbmm(gram, gram, gram, b, c)
                                       : at::addmm(gram, gram, gram, b, c);
    x = is_batch ? at::baddbmm(x, update, x, a) : at::addmm(x, update, x, a);
  }
  return is_tall ? x.mT() : x;
}

}  // namespace flatshard
