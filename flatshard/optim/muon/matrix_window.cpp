#include "flatshard/optim/muon/matrix_window.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

// Matrices with a larger short side keep a GPU busy one by one.
constexpr std::int64_t kLargestInBatch = 1024;

/// Returns the boxes of all ranks. Collective.
std::vector<std::vector<MatrixBox>> gather_boxes(
    Communicator* ranks,
    const std::vector<MatrixBox>& mine) {
  if (ranks == nullptr) {
    return {mine};
  }
  const CollectiveScope scope("muon plan");
  constexpr std::int64_t kFields = 5;
  const auto counts = all_gather_values(*ranks, std::ssize(mine));
  const std::int64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<std::vector<MatrixBox>> boxes(counts.size());
  if (most == 0) {
    return boxes;
  }
  const at::Tensor own = at::zeros({most * kFields}, at::kLong);
  auto* to = own.mutable_data_ptr<std::int64_t>();
  for (const MatrixBox& b : mine) {
    for (const auto value : {b.matrix, b.row, b.column, b.rows, b.columns}) {
      *to++ = value;
    }
  }
  const at::Tensor in = own.to(ranks->device());
  const at::Tensor out = at::empty({ranks->size() * in.numel()}, in.options());
  ranks->all_gather(out, in);
  const at::Tensor all = out.cpu();
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    const std::int64_t* from =
        all.const_data_ptr<std::int64_t>() + rank * most * kFields;
    for (std::int64_t i = 0; i < counts[rank]; ++i, from += kFields) {
      boxes[rank].push_back({from[0], from[1], from[2], from[3], from[4]});
    }
  }
  return boxes;
}

std::vector<RowsOfPeer> rows_of(const std::vector<MatrixTransfer>& transfers) {
  std::vector<RowsOfPeer> rows;
  for (const MatrixTransfer& t : transfers) {
    rows.push_back({t.peer, t.begin, t.numel});
  }
  return rows;
}

at::Tensor matrix_at(
    const at::Tensor& buffer,
    std::int64_t begin,
    const MatrixShape& shape) {
  return buffer.narrow(0, begin, shape.numel())
      .view({shape.rows, shape.columns});
}

/// Adds the parts of matrices that are rows [first, first + rows) and some
/// columns of a parameter, seen as one matrix of all its rows.
/// @param ends  the row after each of the parameter's matrices.
/// @param base  the first of these matrices.
/// @return  the local offset after these rows.
std::int64_t append_rows(
    const std::vector<std::int64_t>& ends,
    std::int64_t base,
    MatrixBox rows,
    std::int64_t local_offset,
    std::vector<ShardBox>& boxes) {
  while (rows.rows > 0) {
    const auto matrix =
        std::upper_bound(ends.begin(), ends.end(), rows.row) - ends.begin();
    const std::int64_t begin = matrix == 0 ? 0 : ends[matrix - 1];
    const std::int64_t n = std::min(rows.rows, ends[matrix] - rows.row);
    const MatrixBox box{
        .matrix = base + matrix,
        .row = rows.row - begin,
        .column = rows.column,
        .rows = n,
        .columns = rows.columns};
    boxes.push_back({box, local_offset});
    local_offset += box.numel();
    rows.row += n;
    rows.rows -= n;
  }
  return local_offset;
}

}  // namespace

void append_boxes(
    const std::vector<std::int64_t>& whole_shape,
    const std::vector<Rectangle>& parts,
    std::int64_t local_offset,
    const std::vector<MatrixShape>& matrices,
    std::int64_t base,
    std::vector<ShardBox>& boxes) {
  std::vector<std::int64_t> ends;
  for (const MatrixShape& matrix : matrices) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + matrix.rows);
  }
  const bool is_stack = whole_shape.size() == 3;
  const std::size_t row_dim = whole_shape.size() - 2;
  for (const Rectangle& part : parts) {
    const std::int64_t first = is_stack ? part.start[0] : 0;
    const std::int64_t count = is_stack ? part.length[0] : 1;
    for (std::int64_t i = first; i < first + count; ++i) {
      local_offset = append_rows(
          ends,
          base,
          {.row = i * whole_shape[row_dim] + part.start[row_dim],
           .column = part.start[row_dim + 1],
           .rows = part.length[row_dim],
           .columns = part.length[row_dim + 1]},
          local_offset,
          boxes);
    }
  }
}

std::vector<MatrixBatch> batches_of(
    const std::vector<WindowMatrix>& matrices,
    const std::vector<std::int64_t>& owned) {
  std::vector<MatrixBatch> batches;
  const WindowMatrix* last = nullptr;  // of the last batch
  for (std::size_t i = 0; i < owned.size(); ++i) {
    const WindowMatrix& matrix = matrices.at(owned[i]);
    const MatrixShape& shape = matrix.shape;
    const bool is_small =
        std::min(shape.rows, shape.columns) <= kLargestInBatch;
    if (last != nullptr && is_small && matrix.batched &&
        last->parameter == matrix.parameter && last->shape == shape) {
      ++batches.back().count;
    } else {
      batches.push_back({.first = i, .shape = shape});
    }
    last = &matrix;
  }
  return batches;
}

MatrixWindow::MatrixWindow(
    Communicator* ranks,
    std::vector<WindowMatrix> matrices,
    std::vector<ShardBox> boxes)
    : ranks_(ranks),
      matrices_(std::move(matrices)),
      boxes_(std::move(boxes)),
      plan_([&] {
        std::vector<MatrixShape> shapes;
        for (const WindowMatrix& matrix : matrices_) {
          shapes.push_back(matrix.shape);
        }
        std::vector<MatrixBox> mine;
        for (const ShardBox& box : boxes_) {
          mine.push_back(box.box);
        }
        return MatrixPlan::build(std::move(shapes), gather_boxes(ranks, mine));
      }()) {
  if (ranks == nullptr) {
    return;
  }
  const CollectiveScope scope("muon plan");
  for (const std::uint64_t hash : all_gather_values(*ranks, plan_.hash())) {
    FLATSHARD_CHECK(
        hash == plan_.hash(),
        usage,
        "Muon: the ranks of '{}' have different plans; create the optimizer "
        "with equal options and matrices on all ranks",
        ranks->name());
  }
}

const std::vector<DirectionRun>& MatrixWindow::begin(
    const std::function<bool(const WindowMatrix&)>& is_active) {
  end();
  std::vector<bool> matrices;
  for (const WindowMatrix& matrix : matrices_) {
    matrices.push_back(is_active(matrix));
  }
  if (matrices == active_) {
    return runs_;
  }
  active_ = std::move(matrices);
  exchange_ = plan_.exchange(ranks_ == nullptr ? 0 : ranks_->rank(), active_);
  runs_.clear();
  const WindowMatrix* last = nullptr;  // of the run before
  // The buffer is in the order of owners.
  for (int owner = 0; owner < plan_.num_ranks(); ++owner) {
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      const MatrixBox& box = boxes_[i].box;
      if (exchange_.begin_of_box[i] < 0 || plan_.owner(box.matrix) != owner) {
        continue;
      }
      const WindowMatrix& matrix = matrices_[box.matrix];
      const DirectionRun run{
          .group = matrix.group,
          .index = matrix.index,
          .local_offset = boxes_[i].local_offset,
          .begin = exchange_.begin_of_box[i],
          .numel = box.numel(),
          .shape = matrix.shape};
      if (last != nullptr && last->parameter == matrix.parameter &&
          last->shape == matrix.shape &&
          runs_.back().local_offset + runs_.back().numel == run.local_offset) {
        runs_.back().numel += run.numel;
      } else {
        runs_.push_back(run);
      }
      last = &matrix;
    }
  }
  return runs_;
}

const at::Tensor& MatrixWindow::buffer(at::Device device) {
  if (!buffer_.defined()) {
    buffer_ = at::empty(
        {exchange_.boxes_numel},
        at::TensorOptions().dtype(at::kBFloat16).device(device));
  }
  return buffer_;
}

void MatrixWindow::orthogonalize(const NewtonSchulzOf& options_of) {
  if (std::ranges::count(active_, true) == 0) {
    return;
  }
  if (plan_.is_local()) {
    run_newton_schulz(buffer_, options_of);
    return;
  }
  const CollectiveScope scope("muon");
  const at::Tensor matrices =
      at::empty({exchange_.matrices_numel}, buffer_.options());
  const auto sends = rows_of(exchange_.sends);
  const auto receives = rows_of(exchange_.receives);
  const auto for_staged = [&](auto copy) {
    for (const MatrixExchange::Staged& staged : exchange_.staged) {
      const MatrixBox& box = staged.box;
      copy(
          matrix_at(matrices, staged.matrix_begin, plan_.matrices()[box.matrix])
              .narrow(0, box.row, box.rows)
              .narrow(1, box.column, box.columns),
          matrix_at(matrices, staged.begin, {box.rows, box.columns}));
    }
  };
  ranks_->all_to_all(matrices, buffer_, receives, sends);
  for_staged([](const at::Tensor& in_matrix, const at::Tensor& apart) {
    in_matrix.copy_(apart);
  });
  run_newton_schulz(matrices, options_of);
  for_staged([](const at::Tensor& in_matrix, const at::Tensor& apart) {
    apart.copy_(in_matrix);
  });
  ranks_->all_to_all(buffer_, matrices, sends, receives);
}

void MatrixWindow::run_newton_schulz(
    const at::Tensor& matrices,
    const NewtonSchulzOf& options_of) const {
  std::vector<std::int64_t> owned;
  for (const MatrixExchange::Owned& matrix : exchange_.owned) {
    owned.push_back(matrix.matrix);
  }
  for (const auto& [first, count, shape] : batches_of(matrices_, owned)) {
    const std::int64_t begin = exchange_.owned[first].begin;
    const at::Tensor values =
        count == 1 ? matrix_at(matrices, begin, shape)
                   : matrices.narrow(0, begin, count * shape.numel())
                         .view({count, shape.rows, shape.columns});
    values.copy_(newton_schulz(values, options_of(matrices_[owned[first]])));
  }
}

}  // namespace flatshard
