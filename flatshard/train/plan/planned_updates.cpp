#include "flatshard/train/plan/planned_updates.h"

#include "flatshard/group/shard_axes.h"
#include "flatshard/optim/matrix_window.h"
#include "flatshard/optim/moments.h"
#include "flatshard/optim/newton_schulz.h"
#include "flatshard/optim/update_parts.h"
#include "flatshard/train/setup/run_optimizer.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <compare>
#include <utility>

namespace flatshard {
namespace {

using plan::Kernel;

double as_double(std::int64_t n) {
  return static_cast<double>(n);
}

/// A group that is trained.
struct Group {
  UnitId unit = kNoUnit;
  const GroupDescription* description = nullptr;
  const GroupPlan* plan = nullptr;

  const std::vector<GroupParameter>& parameters() const {
    return description->spec.parameters;
  }
  TrainedGroup trained() const {
    return {
        .name = description->spec.name,
        .parameters = parameters(),
        .plan = plan};
  }
};

/// An axis of the model's mesh along which ranks store other parts of a group.
struct MatrixAxis {
  std::int64_t size = 1;
  std::int64_t stride = 1;  ///< of the model's ranks
  bool is_own = true;       ///< of the group's mesh; else it splits tensors

  /// Groups of the same ranks share windows.
  auto operator<=>(const MatrixAxis& other) const {
    return std::pair(size, stride) <=> std::pair(other.size, other.stride);
  }
};

/// The ranks that store a group together: see shard_axes.
struct MatrixRanks {
  std::vector<MatrixAxis> axes;

  std::int64_t size() const {
    std::int64_t ranks = 1;
    for (const MatrixAxis& axis : axes) {
      ranks *= axis.size;
    }
    return ranks;
  }
  std::int64_t stride() const { return axes.empty() ? 1 : axes.back().stride; }

  /// A rank's part of the tensors, and its shard of that part.
  struct Place {
    std::int64_t part = 0;
    std::int64_t shard = 0;
  };
  Place place_of(std::int64_t rank) const {
    Place place;
    std::int64_t ranks = size();
    for (const MatrixAxis& axis : axes) {
      ranks /= axis.size;
      std::int64_t& index = axis.is_own ? place.shard : place.part;
      index = index * axis.size + rank / ranks % axis.size;
    }
    return place;
  }

  bool operator<(const MatrixRanks& other) const { return axes < other.axes; }
};

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

/// Returns the coordinates of one rank of each shard of a group, in its mesh.
std::vector<std::vector<std::int64_t>> coordinates_of(const GroupShape& shape) {
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

/// Matrices of some groups that are orthogonalized together.
struct Window {
  MatrixRanks ranks;
  UnitId first = kNoUnit;
  UnitId last = kNoUnit;
  std::vector<WindowMatrix> matrices;
  std::vector<std::int64_t> ns_steps;  ///< of each matrix
  std::vector<std::vector<MatrixBox>> boxes_of_ranks;
};

/// Adds a parameter to a window: its matrices, and each rank's part of them. A
/// slice of tensor or expert parallelism counts as one of equal parts of the
/// flattened parameter.
/// @param index   of the parameter in its group.
/// @param pieces  of all shards of the group.
void add_parameter(
    const GroupParameter& parameter,
    std::size_t index,
    const std::vector<ShardPieces>& pieces,
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
    for (const Piece& piece : pieces[shard].of_parameters[index]) {
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

plan::MatrixWork work_of(Window window) {
  std::vector<MatrixShape> shapes;
  for (const WindowMatrix& matrix : window.matrices) {
    shapes.push_back(matrix.shape);
  }
  const MatrixPlan plan =
      MatrixPlan::build(std::move(shapes), std::move(window.boxes_of_ranks));
  plan::MatrixWork work{
      .first = window.first,
      .last = window.last,
      .ranks = window.ranks.size(),
      .stride = window.ranks.stride()};
  int busiest = 0;
  std::int64_t sent = 0;
  const std::vector<std::int64_t> loads = plan.loads();
  for (int rank = 0; rank < plan.num_ranks(); ++rank) {
    busiest = loads[rank] > loads[busiest] ? rank : busiest;
    sent = std::max(sent, plan.sent_numel(rank));
  }
  // A rank keeps one part of an all-to-all's buffer and sends the others.
  const double kept = 1 / as_double(work.ranks);
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

/// The optimizer's states of a group, on each of its shards.
struct GroupStates {
  const GroupPlan* group = nullptr;
  std::vector<std::int64_t> nbytes;  ///< of one shard: all have as much

  /// @param rank  of the model's mesh.
  std::int64_t nbytes_of(std::int64_t rank) const {
    const MeshShape& mesh = group->shape.mesh;
    std::size_t shard = 0;
    for (std::size_t axis = 0; axis < mesh.sizes.size(); ++axis) {
      if (nbytes.size() > 1 &&
          group->shape.strategy.optimizer[axis].is_shard()) {
        const std::int64_t index = rank / mesh.strides[axis] % mesh.sizes[axis];
        shard = shard * mesh.sizes[axis] + index;
      }
    }
    return nbytes.at(shard);
  }
};

class UpdatePlanner {
 public:
  UpdatePlanner(
      ParameterGroups groups,
      std::size_t num_units,
      const config::Optimizer& keys)
      : groups_(std::move(groups)),
        rounds_(keys.stochastic_rounding),
        offloads_(keys.offload_states) {
    planned_.units.resize(num_units);
    planned_.copied_states.resize(offloads_ ? num_units : 0);
  }

  /// Groups are added in the order of the run.
  void add(const Group& group, std::size_t index) {
    const TrainedGroup trained = group.trained();
    const std::vector<UpdatePart> parts =
        update_parts(trained, groups_.of_parameters.at(index), groups_);
    check_rounding_of(trained, parts);
    GroupStates states{.group = group.plan};
    std::vector<std::int64_t> moved(parts.size());  // at most, by a rank
    std::vector<std::vector<StateFormat>> formats;
    for (const UpdatePart& part : parts) {
      formats.push_back(state_formats(part, groups_, trained));
    }
    for (const auto& coordinate : coordinates_of(group.plan->shape)) {
      const ShardPieces pieces = shard_pieces(*group.plan, coordinate);
      std::int64_t& nbytes = states.nbytes.emplace_back();
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const PartSize size = size_of(parts[i], groups_, formats[i], pieces);
        nbytes += size.state_nbytes;
        moved[i] =
            std::max(moved[i], moved_nbytes(parts[i], size, *group.plan));
      }
      if (parts.size() == 1 && formats.front().empty()) {
        break;  // all shards have the same
      }
    }
    if (offloads_) {
      planned_.copied_states[group.unit] += std::ranges::max(states.nbytes);
    }
    states_.push_back(std::move(states));
    plan::Kernels& passes = planned_.units[group.unit];
    for (std::size_t i = 0; i < parts.size(); ++i) {
      passes.push_back(Kernel::memory("optimizer", as_double(moved[i])));
      if (parts[i].algorithm == Algorithm::muon) {
        add_matrices(group, parts[i]);
      }
    }
  }

  PlannedUpdates finish() {
    for (Window& window : windows_) {
      planned_.matrices.push_back(work_of(std::move(window)));
    }
    const std::int64_t ranks =
        states_.empty() ? 0 : states_.front().group->shape.mesh.model_ranks;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      constexpr std::int64_t kSlots = 2;
      std::int64_t nbytes = 0;
      std::int64_t slots = 0;
      for (const GroupStates& states : states_) {
        const std::int64_t of_group = states.nbytes_of(rank);
        nbytes += of_group;
        slots = std::max(slots, kSlots * of_group);
      }
      planned_.state_nbytes =
          std::max(planned_.state_nbytes, offloads_ ? slots : nbytes);
      planned_.host_state_nbytes =
          std::max(planned_.host_state_nbytes, offloads_ ? nbytes : 0);
    }
    return std::move(planned_);
  }

 private:
  void check_rounding_of(
      const TrainedGroup& group,
      const std::vector<UpdatePart>& parts) const {
    constexpr std::int64_t kBfloat16 = 2;
    if (!rounds_ || group.plan->shape.sizes.main != kBfloat16) {
      return;
    }
    for (const UpdatePart& part : parts) {
      check_stochastic_rounding(group.name, part.algorithm, part.is_partial);
    }
    check_rounding(group);
  }

  /// Returns the bytes that kernels read and write.
  static std::int64_t moved_nbytes(
      const UpdatePart& part,
      const PartSize& size,
      const GroupPlan& group) {
    const ElementSizes& sizes = group.shape.sizes;
    const bool writes_compute = group.bytes().compute > 0;
    // Muon writes the directions and reads the results.
    const std::int64_t directions =
        part.algorithm == Algorithm::muon ? 2 * kDirectionNbytes : 0;
    return size.numel * (2 * sizes.main + sizes.gradient + directions +
                         (writes_compute ? sizes.compute : 0)) +
           2 * size.state_nbytes;
  }

  void add_matrices(const Group& group, const UpdatePart& part) {
    const std::vector<GroupParameter>& parameters = group.parameters();
    std::vector<std::vector<MatrixShape>> matrices(parameters.size());
    std::int64_t numel = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (part.row_of[i] != UpdateRange::kSkipped) {
        matrices[i] = groups_.muon.matrices_of(parameters[i]);
        for (const MatrixShape& matrix : matrices[i]) {
          numel += matrix.numel();
        }
      }
    }
    const MatrixRanks ranks = ranks_of(*group.description);
    const std::size_t index = rule_.window_for(ranks, ranks.size(), numel);
    if (index == windows_.size()) {
      windows_.push_back({.ranks = ranks, .first = group.unit});
      windows_.back().boxes_of_ranks.resize(ranks.size());
    }
    Window& window = windows_[index];
    window.last = group.unit;
    std::vector<ShardPieces> pieces;
    for (const auto& coordinate : coordinates_of(group.plan->shape)) {
      pieces.push_back(shard_pieces(*group.plan, coordinate));
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!matrices[i].empty()) {
        const std::size_t row = part.rows[part.row_of[i]];
        add_parameter(parameters[i], i, pieces, ranks, matrices[i], window);
        window.ns_steps.resize(
            window.matrices.size(),
            groups_.groups[row].values.muon.newton_schulz.steps);
      }
    }
  }

  ParameterGroups groups_;
  bool rounds_ = false;
  bool offloads_ = false;
  WindowRule<MatrixRanks> rule_;
  std::vector<Window> windows_;
  std::vector<GroupStates> states_;
  PlannedUpdates planned_;
};

}  // namespace

PlannedUpdates planned_updates(
    const config::Optimizer& keys,
    const StoredEntriesOf& entries_of,
    const std::vector<UnitDescription>& units,
    const std::vector<UnitPlan>& plans) {
  std::vector<Group> groups;
  std::vector<TrainedGroup> trained;
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t g = 0; g < units[u].groups.size(); ++g) {
      const GroupDescription& group = units[u].groups[g];
      if (group.spec.trainable) {
        groups.push_back({static_cast<UnitId>(u), &group, &plans[u].groups[g]});
        trained.push_back(groups.back().trained());
      }
    }
  }
  UpdatePlanner planner(
      parameter_groups(trained, parameter_rules(keys, entries_of)),
      units.size(),
      keys);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    planner.add(groups[i], i);
  }
  return planner.finish();
}

}  // namespace flatshard
