#include "flatshard/optim/muon/muon.h"

#include "flatshard/core/error.h"
#include "flatshard/group/param_group.h"
#include "flatshard/group/shard_axes.h"
#include "flatshard/optim/muon/muon_update.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace flatshard {
namespace {

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

Communicator* ranks_of_group(
    const ParamGroup& group,
    const GroupParameter& /*parameter*/) {
  Mesh& mesh = *group.model_mesh();
  std::vector<int> axes = shard_axes(group);
  std::erase_if(axes, [&](int axis) { return mesh.axis(axis).size == 1; });
  return axes.empty() ? nullptr : &mesh.communicator(axes, Purpose::reduce);
}

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
  switch (adjust) {
    case AdjustLr::original:
      return std::sqrt(std::max(1.0, rows / columns));
    case AdjustLr::match_rms_adamw:
      return 0.2 * std::sqrt(std::max(rows, columns));
    case AdjustLr::spectral_unclamped:
      break;
  }
  return std::sqrt(rows / columns);
}

MuonAlgorithm::MuonAlgorithm(MuonOptions options)
    : options_(std::move(options)) {
}

void MuonAlgorithm::add_group(
    std::size_t group,
    const at::Tensor& like,
    std::span<const ParameterValues> /*values*/) {
  groups_[group].momentum =
      at::zeros({like.numel()}, like.options().dtype(at::kFloat));
}

std::size_t MuonAlgorithm::window_for(Communicator* ranks, std::int64_t numel) {
  const std::size_t index =
      rule_.window_for(ranks, ranks == nullptr ? 1 : ranks->size(), numel);
  if (index == windows_.size()) {
    windows_.push_back({.ranks = ranks});
  }
  return index;
}

void MuonAlgorithm::add_parameters(
    std::size_t group,
    const ParamGroup& of,
    const std::vector<OwnParameter>& parameters,
    std::span<const ParameterValues> /*values*/) {
  FLATSHARD_CHECK(
      !of.options().offload,
      config,
      "{}: Muon does not support offloaded optimizer states; set "
      "ParamGroupOptions::offload = false or use AdamW",
      of.name());
  struct Member {
    OwnParameter parameter;
    std::vector<MatrixShape> matrices;
  };
  struct Members {
    Communicator* ranks = nullptr;
    std::vector<Member> members;
    std::int64_t numel = 0;
  };
  std::vector<Members> by_ranks;  // in an order that is the same on all ranks
  for (const OwnParameter& own : parameters) {
    const GroupParameter& parameter = of.parameters().at(own.index);
    std::vector<MatrixShape> matrices = options_.matrices_of(parameter);
    check_matrices(parameter, matrices);
    Communicator* ranks = options_.ranks_of(of, parameter);
    auto found = std::ranges::find(by_ranks, ranks, &Members::ranks);
    if (found == by_ranks.end()) {
      found = by_ranks.insert(found, {.ranks = ranks});
    }
    for (const MatrixShape& matrix : matrices) {
      found->numel += matrix.numel();
    }
    found->members.push_back({own, std::move(matrices)});
  }
  for (const Members& same : by_ranks) {
    const std::size_t index = window_for(same.ranks, same.numel);
    groups_.at(group).windows.push_back(index);
    Window& window = windows_[index];
    for (const Member& member : same.members) {
      const GroupParameter& parameter = of.parameters()[member.parameter.index];
      const std::int64_t base = std::ssize(window.matrices);
      const bool is_stack = parameter.whole_shape().size() == 3;
      for (const MatrixShape& matrix : member.matrices) {
        window.matrices.push_back(
            {.shape = matrix,
             .group = group,
             .index = member.parameter.index,
             .parameter = base,
             .batched = is_stack});
      }
      for (const NamedShard& shard : of.main_shards()) {
        if (shard.names == parameter.names) {
          append_boxes(
              shard.whole_shape(),
              shard.boxes(),
              shard.local_offset,
              member.matrices,
              base,
              window.boxes);
        }
      }
    }
  }
}

void MuonAlgorithm::finish_groups() {
  for (Window& window : windows_) {
    window.work = std::make_unique<MatrixWindow>(
        window.ranks,
        std::move(window.matrices),
        std::move(window.boxes));
  }
}

std::vector<std::pair<std::string, at::Tensor>> MuonAlgorithm::state(
    std::size_t group) const {
  return {{"momentum_buffer", groups_.at(group).momentum}};
}

std::vector<Communicator*> MuonAlgorithm::communicators(
    std::size_t group) const {
  std::vector<Communicator*> all;
  for (const std::size_t window : groups_.at(group).windows) {
    if (windows_[window].ranks != nullptr) {
      all.push_back(windows_[window].ranks);
    }
  }
  return all;
}

void MuonAlgorithm::begin_step() {
  for (auto& [index, group] : groups_) {
    group.row_of.clear();
  }
  for (Window& window : windows_) {
    window.num_waiting = 0;
    window.is_orthogonal = false;
  }
}

void MuonAlgorithm::begin_update(
    std::size_t group,
    const FlatUpdate& update,
    std::span<const std::int32_t> row_of,
    std::span<const ParameterValues> values,
    double lr) {
  Group& g = groups_.at(group);
  g.update = &update;
  g.row_of.assign(row_of.begin(), row_of.end());
  g.rows.assign(values.begin(), values.end());
  g.lr = lr;
  for (const std::size_t window : g.windows) {
    ++windows_[window].num_waiting;
  }
}

bool MuonAlgorithm::is_active(const WindowMatrix& matrix) const {
  const std::vector<std::int32_t>& row_of = groups_.at(matrix.group).row_of;
  return !row_of.empty() && row_of.at(matrix.index) != UpdateRange::kSkipped;
}

const ParameterValues& MuonAlgorithm::values_of(
    std::size_t group,
    std::size_t index) const {
  const Group& g = groups_.at(group);
  return g.rows.at(g.row_of.at(index));
}

void MuonAlgorithm::orthogonalize(Window& window) {
  MatrixWindow& work = *window.work;
  const std::vector<DirectionRun>& runs = work.begin(
      [this](const WindowMatrix& matrix) { return is_active(matrix); });
  const at::Tensor& buffer =
      work.buffer(groups_.begin()->second.momentum.device());
  for (const DirectionRun& run : runs) {
    const Group& group = groups_.at(run.group);
    const FlatUpdate& update = *group.update;
    const ParameterValues& values = values_of(run.group, run.index);
    muon_direction(
        update.grad.narrow(0, run.local_offset, run.numel),
        update.grad_scale,
        group.momentum
            .narrow(0, update.states_offset(run.local_offset), run.numel),
        buffer.narrow(0, run.begin, run.numel),
        values.momentum,
        values.muon.nesterov);
  }
  work.orthogonalize(
      [this](const WindowMatrix& matrix) -> const NewtonSchulzOptions& {
        return values_of(matrix.group, matrix.index).muon.newton_schulz;
      });
  window.is_orthogonal = true;
}

void MuonAlgorithm::update(std::size_t group, FlatUpdate& update) {
  try {
    for (const std::size_t index : groups_.at(group).windows) {
      Window& window = windows_[index];
      if (!window.is_orthogonal) {
        orthogonalize(window);
      }
      apply(group, update, window);
      if (--window.num_waiting == 0) {
        window.work->end();
      }
    }
  } catch (...) {
    for (Window& window : windows_) {  // the step does not continue
      window.work->end();
    }
    throw;
  }
}

void MuonAlgorithm::apply(
    std::size_t group,
    const FlatUpdate& update,
    Window& window) {
  const Group& g = groups_.at(group);
  const at::Tensor& buffer = window.work->buffer(update.main.device());
  for (const DirectionRun& run : window.work->runs()) {
    if (run.group != group) {
      continue;
    }
    const auto part = [&](const at::Tensor& flat) {
      return flat.defined() ? flat.narrow(0, run.local_offset, run.numel)
                            : flat;
    };
    const ParameterValues& values = values_of(group, run.index);
    const double lr = g.lr * values.lr_mult;
    muon_apply(
        part(update.main),
        part(update.compute),
        buffer.narrow(0, run.begin, run.numel),
        lr * values.weight_decay,
        lr * lr_factor(values.muon.adjust_lr, run.shape));
  }
}

}  // namespace flatshard
