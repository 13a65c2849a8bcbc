#include "flatshard/optim/muon/matrix_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"

namespace flatshard {
namespace {

bool overlap(const MatrixBox& a, const MatrixBox& b) {
  return a.row < b.row + b.rows && b.row < a.row + a.rows &&
         a.column < b.column + b.columns && b.column < a.column + a.columns;
}

bool is_contiguous_in(const MatrixBox& box, const MatrixShape& matrix) {
  return box.rows == 1 || box.columns == matrix.columns;
}

}  // namespace

MatrixPlan MatrixPlan::build(
    std::vector<MatrixShape> matrices,
    std::vector<std::vector<MatrixBox>> boxes_of_ranks) {
  MatrixPlan plan;
  plan.matrices_ = std::move(matrices);
  plan.boxes_ = std::move(boxes_of_ranks);
  plan.check();
  plan.assign();
  return plan;
}

void MatrixPlan::check() const {
  std::vector<std::vector<const MatrixBox*>> of_matrix(matrices_.size());
  for (const std::vector<MatrixBox>& boxes : boxes_) {
    for (const MatrixBox& box : boxes) {
      const bool exists = box.matrix >= 0 && box.matrix < std::ssize(matrices_);
      FLATSHARD_CHECK(
          exists && box.row >= 0 && box.column >= 0 && box.rows > 0 &&
              box.columns > 0 &&
              box.row + box.rows <= matrices_[box.matrix].rows &&
              box.column + box.columns <= matrices_[box.matrix].columns,
          internal,
          "a box of {} x {} at ({}, {}) is not in matrix {}",
          box.rows,
          box.columns,
          box.row,
          box.column,
          box.matrix);
      of_matrix[box.matrix].push_back(&box);
    }
  }
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    std::int64_t numel = 0;
    bool is_disjoint = true;
    std::vector<const MatrixBox*>& boxes = of_matrix[i];
    std::ranges::sort(boxes, {}, [](const MatrixBox* b) { return b->row; });
    for (std::size_t a = 0; a < boxes.size(); ++a) {
      const MatrixBox& box = *boxes[a];
      numel += box.numel();
      for (std::size_t b = a + 1;
           b < boxes.size() && boxes[b]->row < box.row + box.rows;
           ++b) {
        is_disjoint = is_disjoint && !overlap(box, *boxes[b]);
      }
    }
    FLATSHARD_CHECK(
        is_disjoint && numel == matrices_[i].numel(),
        internal,
        "expected each element of matrix {} ({} x {}) on one rank, got {} "
        "elements{}",
        i,
        matrices_[i].rows,
        matrices_[i].columns,
        numel,
        is_disjoint ? "" : ", some of them twice");
  }
}

std::int64_t MatrixPlan::cost(std::int64_t matrix) const {
  const MatrixShape& m = matrices_.at(matrix);
  const std::int64_t s = std::min(m.rows, m.columns);
  const std::int64_t l = std::max(m.rows, m.columns);
  return s * s * (2 * l + s);
}

std::vector<std::int64_t> MatrixPlan::loads() const {
  std::vector<std::int64_t> loads(boxes_.size());
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    loads[owners_[i]] += cost(static_cast<std::int64_t>(i));
  }
  return loads;
}

std::vector<std::int64_t> MatrixPlan::owned(int rank) const {
  std::vector<std::int64_t> owned;
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    if (owners_[i] == rank) {
      owned.push_back(static_cast<std::int64_t>(i));
    }
  }
  return owned;
}

std::int64_t MatrixPlan::stored_numel(int rank) const {
  std::int64_t sum = 0;
  for (const MatrixBox& box : boxes_.at(rank)) {
    sum += box.numel();
  }
  return sum;
}

void MatrixPlan::assign() {
  const auto num_ranks = boxes_.size();
  // The elements of each matrix on the ranks that store some of it.
  std::vector<std::map<std::size_t, std::int64_t>> stored(matrices_.size());
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    for (const MatrixBox& box : boxes_[rank]) {
      stored[box.matrix][rank] += box.numel();
    }
  }
  std::vector<std::int64_t> order(matrices_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(
      order.begin(),
      order.end(),
      [&](std::int64_t a, std::int64_t b) { return cost(a) > cost(b); });
  std::int64_t total = 0;
  for (const std::int64_t matrix : order) {
    total += cost(matrix);
  }
  const std::int64_t share = total / static_cast<std::int64_t>(num_ranks);
  const std::int64_t limit = share + share / 10;
  std::vector<std::int64_t> loads(num_ranks, 0);
  owners_.assign(matrices_.size(), 0);
  for (const std::int64_t matrix : order) {
    std::size_t best = 0;
    std::int64_t most = 0;
    for (const auto& [rank, numel] : stored[matrix]) {
      if (loads[rank] + cost(matrix) <= limit &&
          (most == 0 ||
           std::pair(numel, -loads[rank]) > std::pair(most, -loads[best]))) {
        best = rank;
        most = numel;
      }
    }
    if (most == 0) {
      best = std::min_element(loads.begin(), loads.end()) - loads.begin();
    }
    owners_[matrix] = static_cast<int>(best);
    loads[best] += cost(matrix);
  }
}

std::int64_t MatrixPlan::sent_numel(int rank) const {
  std::int64_t sum = 0;
  for (const MatrixBox& box : boxes_.at(rank)) {
    sum += owners_[box.matrix] == rank ? 0 : box.numel();
  }
  return sum;
}

bool MatrixPlan::is_local() const {
  for (std::size_t rank = 0; rank < boxes_.size(); ++rank) {
    for (const MatrixBox& box : boxes_[rank]) {
      if (owners_[box.matrix] != static_cast<int>(rank) ||
          box.numel() != matrices_[box.matrix].numel()) {
        return false;
      }
    }
  }
  return true;
}

std::uint64_t MatrixPlan::hash() const {
  std::vector<std::int64_t> values;
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    values.insert(
        values.end(),
        {matrices_[i].rows, matrices_[i].columns, owners_[i]});
  }
  for (const std::vector<MatrixBox>& boxes : boxes_) {
    values.push_back(std::ssize(boxes));
    for (const MatrixBox& b : boxes) {
      values.insert(
          values.end(),
          {b.matrix, b.row, b.column, b.rows, b.columns});
    }
  }
  return stable_hash(std::string_view(
      reinterpret_cast<const char*>(values.data()),
      values.size() * sizeof(std::int64_t)));
}

MatrixPlan::Arrivals MatrixPlan::arrivals(
    int owner,
    const std::vector<bool>& active) const {
  Arrivals arrivals;
  std::vector<std::int64_t> begin_of(matrices_.size(), -1);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    if (owners_[i] == owner && active.at(i)) {
      begin_of[i] = arrivals.numel;
      arrivals.owned.push_back({static_cast<std::int64_t>(i), arrivals.numel});
      arrivals.numel += matrices_[i].numel();
    }
  }
  arrivals.from.resize(boxes_.size());
  for (std::size_t sender = 0; sender < boxes_.size(); ++sender) {
    std::vector<MatrixTransfer>& from = arrivals.from[sender];
    for (const MatrixBox& box : boxes_[sender]) {
      const std::int64_t matrix_begin = begin_of[box.matrix];
      if (matrix_begin < 0) {
        continue;
      }
      const MatrixShape& matrix = matrices_[box.matrix];
      std::int64_t begin = matrix_begin + box.row * matrix.columns + box.column;
      if (!is_contiguous_in(box, matrix)) {
        begin = arrivals.numel;
        arrivals.staged.push_back({box, begin, matrix_begin});
        arrivals.numel += box.numel();
      }
      if (!from.empty() && from.back().begin + from.back().numel == begin) {
        from.back().numel += box.numel();
      } else {
        from.push_back({static_cast<int>(sender), begin, box.numel()});
      }
    }
  }
  return arrivals;
}

MatrixExchange MatrixPlan::exchange(int rank, const std::vector<bool>& active)
    const {
  const std::vector<MatrixBox>& boxes = boxes_.at(rank);
  MatrixExchange exchange;
  exchange.begin_of_box.assign(boxes.size(), -1);
  for (int owner = 0; owner < num_ranks(); ++owner) {
    Arrivals at_owner = arrivals(owner, active);
    std::int64_t begin = exchange.boxes_numel;
    for (const MatrixTransfer& transfer : at_owner.from[rank]) {
      exchange.sends.push_back({owner, begin, transfer.numel});
      begin += transfer.numel;
    }
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const std::int64_t matrix = boxes[i].matrix;
      if (owners_[matrix] == owner && active[matrix]) {
        exchange.begin_of_box[i] = exchange.boxes_numel;
        exchange.boxes_numel += boxes[i].numel();
      }
    }
    if (owner == rank) {
      for (const std::vector<MatrixTransfer>& from : at_owner.from) {
        exchange.receives.insert(
            exchange.receives.end(),
            from.begin(),
            from.end());
      }
      exchange.owned = std::move(at_owner.owned);
      exchange.staged = std::move(at_owner.staged);
      exchange.matrices_numel = at_owner.numel;
    }
  }
  return exchange;
}

}  // namespace flatshard
