#include "flatshard/optim/muon.h"

#include "flatshard/core/error.h"
#include "flatshard/group/param_group.h"
#include "flatshard/optim/muon_update.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace flatshard {
namespace {

// Bytes of a window's matrices on one rank. Larger windows balance the owners'
// work better, smaller ones need less memory.
constexpr std::int64_t kWindowNbytes = std::int64_t{512} << 20;

/// Returns the ranks that store the group's parameters together, each another
/// part; null when this rank stores all of them. See ParamGroup::replicas.
Communicator* ranks_of(const ParamGroup& group) {
  const bool is_sliced = group.parameters().front().placement.slice.has_value();
  const std::vector<std::string> own = group.mesh()->axis_names();
  Mesh& mesh = *group.model_mesh();
  std::vector<int> axes;
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    const auto found = std::find(own.begin(), own.end(), mesh.axis(axis).name);
    const bool has_other_parts = found == own.end()
                                     ? is_sliced
                                     : group.weights()
                                           .main()
                                           .placements()[found - own.begin()]
                                           .is_shard();
    if (has_other_parts && mesh.axis(axis).size > 1) {
      axes.push_back(axis);
    }
  }
  return axes.empty() ? nullptr : &mesh.communicator(axes, Purpose::reduce);
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

/// Adds this rank's parts of the matrices of one parameter.
void append_boxes(
    const NamedShard& shard,
    const std::vector<MatrixShape>& matrices,
    std::int64_t base,
    std::vector<ShardBox>& boxes) {
  std::vector<std::int64_t> ends;
  for (const MatrixShape& matrix : matrices) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + matrix.rows);
  }
  const std::vector<std::int64_t> shape = shard.whole_shape();
  const bool is_stack = shape.size() == 3;
  std::int64_t offset = shard.local_offset;
  for (const Rectangle& box : shard.boxes()) {
    const std::size_t row_dim = shape.size() - 2;
    const std::int64_t first = is_stack ? box.start[0] : 0;
    const std::int64_t count = is_stack ? box.length[0] : 1;
    for (std::int64_t i = first; i < first + count; ++i) {
      offset = append_rows(
          ends,
          base,
          {.row = i * shape[row_dim] + box.start[row_dim],
           .column = box.start[row_dim + 1],
           .rows = box.length[row_dim],
           .columns = box.length[row_dim + 1]},
          offset,
          boxes);
    }
  }
}

void check_matrices(
    const GroupParameter& parameter,
    const std::vector<MatrixShape>& matrices) {
  const std::vector<std::int64_t> shape = parameter.whole_shape();
  std::int64_t rows = 0;
  bool fits = shape.size() == 2 || shape.size() == 3;
  for (const MatrixShape& matrix : matrices) {
    rows += matrix.rows;
    fits = fits && matrix.columns == shape.back() && matrix.rows > 0;
  }
  fits =
      fits && rows == (shape.size() == 3 ? shape[0] * shape[1] : shape.front());
  FLATSHARD_CHECK(
      fits,
      config,
      "Muon: expected the matrices of parameter {} to be all of its rows, got "
      "{} rows in {} matrices for the shape [{}]",
      parameter.names.front(),
      rows,
      matrices.size(),
      fmt::join(shape, ", "));
}

}  // namespace

std::vector<MatrixShape> one_matrix(const GroupParameter& parameter) {
  const std::vector<std::int64_t> shape = parameter.whole_shape();
  if (shape.size() != 2) {
    return {};
  }
  return {{shape[0], shape[1]}};
}

double lr_factor(AdjustLr adjust, const MatrixShape& matrix) {
  const auto rows = static_cast<double>(matrix.rows);
  const auto columns = static_cast<double>(matrix.columns);
  return adjust == AdjustLr::original
             ? std::sqrt(std::max(1.0, rows / columns))
             : 0.2 * std::sqrt(std::max(rows, columns));
}

MuonAlgorithm::MuonAlgorithm(MuonOptions options)
    : options_(std::move(options)) {
  options_.newton_schulz.validate();
}

void MuonAlgorithm::add_group(
    std::size_t group,
    const at::Tensor& like,
    std::span<const ParameterValues> /*values*/) {
  groups_[group].momentum =
      at::zeros({like.numel()}, like.options().dtype(at::kFloat));
}

MuonAlgorithm::Window& MuonAlgorithm::window_for(
    std::size_t group,
    Communicator* ranks,
    std::int64_t numel) {
  constexpr std::int64_t kElementSize = 2;  // bfloat16
  const std::int64_t num_ranks = ranks == nullptr ? 1 : ranks->size();
  const auto [open, is_new] = open_windows_.try_emplace(ranks, windows_.size());
  if (!is_new) {
    for (const WindowMatrix& matrix : windows_[open->second].matrices) {
      numel += matrix.shape.numel();
    }
    if (numel * kElementSize / num_ranks > kWindowNbytes) {
      open->second = windows_.size();
    }
  }
  if (open->second == windows_.size()) {
    windows_.push_back({.ranks = ranks});
  }
  groups_.at(group).window = open->second;
  return windows_[open->second];
}

void MuonAlgorithm::add_parameters(
    std::size_t group,
    const ParamGroup& of,
    const std::vector<std::size_t>& parameters,
    std::span<const ParameterValues> /*values*/) {
  FLATSHARD_CHECK(
      !of.options().offload,
      config,
      "{}: Muon does not support offloaded optimizer states; set "
      "ParamGroupOptions::offload = false or use AdamW",
      of.name());
  std::vector<std::vector<MatrixShape>> matrices;
  std::int64_t numel = 0;
  for (const std::size_t i : parameters) {
    const GroupParameter& parameter = of.parameters().at(i);
    matrices.push_back(options_.matrices_of(parameter));
    check_matrices(parameter, matrices.back());
    for (const MatrixShape& matrix : matrices.back()) {
      numel += matrix.numel();
    }
  }
  Window& window = window_for(group, ranks_of(of), numel);
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    const GroupParameter& parameter = of.parameters()[parameters[k]];
    const std::int64_t base = std::ssize(window.matrices);
    const bool is_stack = parameter.whole_shape().size() == 3;
    for (const MatrixShape& matrix : matrices[k]) {
      window.matrices.push_back(
          {.shape = matrix,
           .group = group,
           .parameter = base,
           .batched = is_stack});
    }
    for (const NamedShard& shard : of.main_shards()) {
      if (shard.names == parameter.names) {
        append_boxes(shard, matrices[k], base, window.boxes);
      }
    }
  }
}

void MuonAlgorithm::finish_groups() {
  for (Window& window : windows_) {
    window.work = std::make_unique<MatrixWindow>(
        window.ranks,
        std::move(window.matrices),
        std::move(window.boxes),
        options_.newton_schulz);
  }
}

std::vector<std::pair<std::string, at::Tensor>> MuonAlgorithm::state(
    std::size_t group) const {
  return {{"momentum_buffer", groups_.at(group).momentum}};
}

std::vector<Communicator*> MuonAlgorithm::communicators(
    std::size_t group) const {
  Communicator* ranks = windows_[groups_.at(group).window].ranks;
  return ranks == nullptr ? std::vector<Communicator*>{}
                          : std::vector<Communicator*>{ranks};
}

void MuonAlgorithm::begin_step() {
  for (auto& [index, group] : groups_) {
    group.is_active = false;
  }
  for (Window& window : windows_) {
    window.num_waiting = 0;
    window.is_orthogonal = false;
  }
}

void MuonAlgorithm::begin_update(
    std::size_t group,
    const FlatUpdate& update,
    std::span<const ParameterValues> values,
    double lr) {
  Group& g = groups_.at(group);
  g.is_active = true;
  g.update = &update;
  g.rows.clear();
  for (const ParameterValues& v : values) {
    g.rows.push_back({lr * v.lr_mult, v.weight_decay, v.momentum});
  }
  ++windows_[g.window].num_waiting;
}

const MuonAlgorithm::Group::Row& MuonAlgorithm::Group::row_at(
    std::int64_t local_offset) const {
  const std::vector<UpdateRange>& ranges = update->ranges;
  const auto range =
      std::find_if(ranges.begin(), ranges.end(), [&](const UpdateRange& r) {
        return r.end > local_offset;
      });
  return rows.at(range == ranges.end() ? 0 : range->group);
}

void MuonAlgorithm::orthogonalize(Window& window) {
  MatrixWindow& work = *window.work;
  std::vector<bool> active(
      groups_.empty() ? 0 : groups_.rbegin()->first + 1,
      false);
  for (const auto& [index, group] : groups_) {
    active[index] = group.is_active;
  }
  const std::vector<DirectionRun>& runs = work.begin(active);
  const at::Tensor& buffer =
      work.buffer(groups_.begin()->second.momentum.device());
  for (const DirectionRun& run : runs) {
    const Group& group = groups_.at(run.group);
    const FlatUpdate& update = *group.update;
    muon_direction(
        update.grad.narrow(0, run.local_offset, run.numel),
        update.grad_scale,
        group.momentum
            .narrow(0, update.states_offset(run.local_offset), run.numel),
        buffer.narrow(0, run.begin, run.numel),
        group.row_at(run.local_offset).momentum,
        options_.nesterov);
  }
  work.orthogonalize();
  window.is_orthogonal = true;
}

void MuonAlgorithm::update(std::size_t group, FlatUpdate& update) {
  const Group& g = groups_.at(group);
  Window& window = windows_[g.window];
  if (!window.is_orthogonal) {
    orthogonalize(window);
  }
  const at::Tensor& buffer = window.work->buffer(update.main.device());
  for (const DirectionRun& run : window.work->runs()) {
    if (run.group != group) {
      continue;
    }
    const auto part = [&](const at::Tensor& flat) {
      return flat.defined() ? flat.narrow(0, run.local_offset, run.numel)
                            : flat;
    };
    const Group::Row& row = g.row_at(run.local_offset);
    muon_apply(
        part(update.main),
        part(update.compute),
        buffer.narrow(0, run.begin, run.numel),
        row.lr * row.weight_decay,
        row.lr * lr_factor(options_.adjust_lr, run.shape));
  }
  if (--window.num_waiting == 0) {
    window.work->end();
  }
}

}  // namespace flatshard
