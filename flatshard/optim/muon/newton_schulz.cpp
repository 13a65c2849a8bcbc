#include "flatshard/optim/muon/newton_schulz.h"

#include "flatshard/core/error.h"
#include "flatshard/optim/muon/muon_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

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

// Square blocks of a symmetric matrix that are multiplied as a batch: in each
// block of `diagonal` rows on its diagonal, `height` rows from `first` on times
// the first rows of that block.
struct SymmetricBlocks {
  std::int64_t diagonal = 0;
  std::int64_t first = 0;
  std::int64_t height = 0;
};

// Returns the blocks below the diagonal, one of half the rows, two of a
// quarter, and so on, and then the blocks on the diagonal.
std::vector<SymmetricBlocks> symmetric_blocks(std::int64_t rows) {
  const std::int64_t least = block_rows(rows);
  std::vector<SymmetricBlocks> blocks;
  for (std::int64_t n = rows; n > least; n /= 2) {
    blocks.push_back({.diagonal = n, .first = n / 2, .height = n / 2});
  }
  blocks.push_back({.diagonal = least, .first = 0, .height = least});
  return blocks;
}

// out = beta * add + alpha * x x^T, or x x^T without `add`, for a symmetric
// `add`. Multiplies symmetric_blocks. The elements above the diagonal are
// copies.
void symmetric_matmul(
    const at::Tensor& out,
    const at::Tensor& x,
    const std::optional<at::Tensor>& add = {},
    double beta = 0,
    double alpha = 1) {
  const std::int64_t rows = x.size(0);
  for (const auto& [diagonal, first, height] : symmetric_blocks(rows)) {
    const std::int64_t num = rows / diagonal;
    const at::Tensor stacked = x.unflatten(0, {num, diagonal});
    const std::vector<std::int64_t> sizes = {num, height, height};
    const std::vector<std::int64_t> strides = {diagonal * (rows + 1), rows, 1};
    const auto blocks = [&](const at::Tensor& of) {
      return of.as_strided(sizes, strides, of.storage_offset() + first * rows);
    };
    at::Tensor to = blocks(out);
    const at::Tensor left = stacked.narrow(1, first, height);
    const at::Tensor right = stacked.narrow(1, 0, height).mT();
    if (add) {
      at::baddbmm_out(to, blocks(*add), left, right, beta, alpha);
    } else {
      at::bmm_out(to, left, right);
    }
  }
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

NewtonSchulzWork newton_schulz_work(
    std::int64_t count,
    std::int64_t rows,
    std::int64_t columns) {
  constexpr std::int64_t kNbytes = 2;
  const std::int64_t s = std::min(rows, columns);
  const std::int64_t l = std::max(rows, columns);
  const std::int64_t matrix = count * s * l;
  const std::int64_t square = count * s * s;
  const bool by_blocks = count == 1 && block_rows(s) < s;
  const std::vector<SymmetricBlocks> blocks =
      by_blocks ? symmetric_blocks(s)
                : std::vector<SymmetricBlocks>{{.diagonal = s, .height = s}};
  NewtonSchulzWork work;
  for (const std::int64_t k : {l, s}) {
    for (const auto& [diagonal, first, height] : blocks) {
      work.matmuls.push_back({count * (s / diagonal), height, height, k});
    }
  }
  work.matmuls.push_back({count, s, l, s});
  // Each element above a diagonal is read and written.
  work.copied_nbytes = by_blocks ? 2 * square * kNbytes : 0;
  // Two squares, and the next iterate; by_blocks the first one serves again.
  work.scratch_nbytes =
      (2 * square + (by_blocks ? matrix : 2 * matrix)) * kNbytes;
  return work;
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
