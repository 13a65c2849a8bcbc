#include "flatshard/train/plan/planned_matrices.h"

#include "flatshard/group/shard_axes.h"
#include "flatshard/optim/muon/newton_schulz.h"

#include <c10/util/accumulate.h>

#include <algorithm>

namespace flatshard {
namespace {

using plan::Kernel;

double as_double(std::int64_t n) {
  return static_cast<double>(n);
}

MatrixRanks ranks_of(const GroupDescription& group) {
  const GroupSpec& spec = group.spec;
  const Mesh& model = spec.model_mesh ? *spec.model_mesh : *spec.mesh;
  const std::vector<std::string> own = spec.mesh->axis_names();
  MatrixRanks ranks;
  for (const int axis : shard_axes(
           *spec.mesh,
           model,
           spec.strategy.optimizer,
           spec.parameters.front().placement.slice.has_value())) {
    const MeshAxis& of = model.axis(axis);
    if (of.size == 1) {
      continue;
    }
    std::int64_t stride = 1;
    for (int inner = axis + 1; inner < model.num_axes(); ++inner) {
      stride *= model.axis(inner).size;
    }
    ranks.axes.push_back(
        {.size = of.size,
         .stride = stride,
         .is_own = std::ranges::count(own, of.name) > 0});
  }
  return ranks;
}

/// Returns the kernels of Newton-Schulz of some matrices of one shape.
plan::Kernels kernels_of(
    const MatrixBatch& batch,
    const NewtonSchulzWork& work,
    std::int64_t ns_steps) {
  constexpr double kPasses = 5;  // norm, division, copy
  const double nbytes =
      as_double(batch.count * batch.shape.numel() * kDirectionNbytes);
  plan::Kernels kernels{Kernel::memory("sum", kPasses * nbytes)};
  for (std::int64_t step = 0; step < ns_steps; ++step) {
    for (const MatmulBatch& of : work.matmuls) {
      const double m = as_double(of.m);
      const double n = as_double(of.n);
      const double k = as_double(of.k);
      kernels.push_back(
          of.count == 1 ? Kernel::matmul(plan::Product::forward, m, n, k)
                        : Kernel::experts(
                              plan::Product::forward,
                              as_double(of.count),
                              m,
                              n,
                              k));
    }
    if (work.copied_nbytes > 0) {
      kernels.push_back(Kernel::memory("copy", as_double(work.copied_nbytes)));
    }
  }
  return kernels;
}

}  // namespace

std::vector<std::vector<std::int64_t>> shard_coordinates(
    const GroupShape& shape) {
  const std::vector<std::int64_t>& sizes = shape.mesh.sizes;
  std::vector<std::vector<std::int64_t>> all{
      std::vector<std::int64_t>(sizes.size(), 0)};
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    if (!shape.strategy.optimizer[axis].is_shard()) {
      continue;
    }
    std::vector<std::vector<std::int64_t>> more;
    for (const std::vector<std::int64_t>& coordinate : all) {
      for (std::int64_t i = 0; i < sizes[axis]; ++i) {
        more.push_back(coordinate);
        more.back()[axis] = i;
      }
    }
    all = std::move(more);
  }
  return all;
}

void PlannedMatrices::add(
    UnitId unit,
    const GroupDescription& group,
    const GroupPlan& plan,
    const UpdatePart& part) {
  const std::vector<GroupParameter>& parameters = group.spec.parameters;
  std::vector<std::vector<MatrixShape>> matrices(parameters.size());
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (part.row_of[i] != UpdateRange::kSkipped) {
      matrices[i] = groups_->muon.matrices_of(parameters[i]);
      for (const MatrixShape& matrix : matrices[i]) {
        numel += matrix.numel();
      }
    }
  }
  const MatrixRanks ranks = ranks_of(group);
  const std::size_t index = rule_.window_for(ranks, ranks.size(), numel);
  if (index == windows_.size()) {
    windows_.push_back({.ranks = ranks, .first = unit});
    windows_.back().boxes_of_ranks.resize(ranks.size());
  }
  Window& window = windows_[index];
  window.last = unit;
  std::vector<ShardPieces> shards;
  for (const auto& coordinate : shard_coordinates(plan.shape)) {
    shards.push_back(shard_pieces(plan, coordinate));
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (matrices[i].empty()) {
      continue;
    }
    std::vector<std::vector<Piece>> pieces;
    for (const ShardPieces& shard : shards) {
      pieces.push_back(shard.of_parameters[i]);
    }
    add_parameter(parameters[i], pieces, ranks, matrices[i], window);
    const std::size_t row = part.rows[part.row_of[i]];
    window.ns_steps.resize(
        window.matrices.size(),
        groups_->groups[row].values.muon.newton_schulz.steps);
  }
}

std::vector<plan::MatrixWork> PlannedMatrices::finish() {
  std::vector<plan::MatrixWork> works;
  for (Window& window : windows_) {
    works.push_back(work_of(std::move(window)));
  }
  return works;
}

/// Adds a parameter to a window: its matrices, and each rank's part of them. A
/// slice of tensor or expert parallelism counts as one of equal parts of the
/// flattened parameter: it has as many elements.
/// @param pieces  of each shard of its group.
/// @param ranks   of the group; for the window, its axes may count as parts.
void PlannedMatrices::add_parameter(
    const GroupParameter& parameter,
    const std::vector<std::vector<Piece>>& pieces,
    const MatrixRanks& ranks,
    const std::vector<MatrixShape>& matrices,
    Window& window) {
  const std::int64_t base = std::ssize(window.matrices);
  const std::vector<std::int64_t> whole = parameter.whole_shape();
  for (const MatrixShape& matrix : matrices) {
    window.matrices.push_back(
        {.shape = matrix, .parameter = base, .batched = whole.size() == 3});
  }
  const std::int64_t slice = c10::multiply_integers(parameter.shape);
  for (std::int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto [part, shard] = ranks.place_of(rank);
    std::vector<ShardBox> boxes;
    for (const Piece& piece : pieces[shard]) {
      const std::int64_t begin = part * slice + piece.tensor_offset;
      append_boxes(
          whole,
          TensorSlice().boxes(whole, begin, begin + piece.numel),
          0,
          matrices,
          base,
          boxes);
    }
    for (const ShardBox& box : boxes) {
      window.boxes_of_ranks[rank].push_back(box.box);
    }
  }
}

plan::MatrixWork PlannedMatrices::work_of(Window window) {
  std::vector<MatrixShape> shapes;
  for (const WindowMatrix& matrix : window.matrices) {
    shapes.push_back(matrix.shape);
  }
  const MatrixPlan plan =
      MatrixPlan::build(std::move(shapes), std::move(window.boxes_of_ranks));
  plan::MatrixWork work{.first = window.first, .last = window.last};
  for (const MatrixAxis& axis : window.ranks.axes) {
    work.axes.push_back({.size = axis.size, .stride = axis.stride});
  }
  int busiest = 0;
  std::int64_t sent = 0;
  const std::vector<std::int64_t> loads = plan.loads();
  for (int rank = 0; rank < plan.num_ranks(); ++rank) {
    busiest = loads[rank] > loads[busiest] ? rank : busiest;
    sent = std::max(sent, plan.sent_numel(rank));
  }
  // A rank keeps one part of an all-to-all's buffer and sends the others.
  const double kept = 1 / as_double(window.ranks.size());
  work.exchange_nbytes =
      sent == 0 ? 0 : as_double(sent * kDirectionNbytes) / (1 - kept);
  work.directions_nbytes = plan.stored_numel(busiest) * kDirectionNbytes;
  std::int64_t owned_numel = 0;
  std::int64_t scratch = 0;
  const std::vector<std::int64_t> owned = plan.owned(busiest);
  for (const MatrixBatch& batch : batches_of(window.matrices, owned)) {
    const NewtonSchulzWork each =
        newton_schulz_work(batch.count, batch.shape.rows, batch.shape.columns);
    const plan::Kernels kernels =
        kernels_of(batch, each, window.ns_steps[owned[batch.first]]);
    work.kernels.insert(work.kernels.end(), kernels.begin(), kernels.end());
    owned_numel += batch.count * batch.shape.numel();
    scratch = std::max(scratch, each.scratch_nbytes);
  }
  work.scratch_nbytes =
      scratch + (plan.is_local() ? 0 : owned_numel * kDirectionNbytes);
  return work;
}

}  // namespace flatshard
