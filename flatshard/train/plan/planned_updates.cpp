#include "flatshard/train/plan/planned_updates.h"

#include "flatshard/optim/moments.h"
#include "flatshard/optim/update_parts.h"
#include "flatshard/train/plan/planned_matrices.h"
#include "flatshard/train/setup/run_optimizer.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

using plan::Kernel;

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
        offloads_(keys.offload_states),
        matrices_(groups_) {
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
    for (const auto& coordinate : shard_coordinates(group.plan->shape)) {
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
      passes.push_back(
          Kernel::memory("optimizer", static_cast<double>(moved[i])));
      if (parts[i].algorithm == Algorithm::muon) {
        matrices_.add(group.unit, *group.description, *group.plan, parts[i]);
      }
    }
  }

  PlannedUpdates finish() {
    planned_.matrices = matrices_.finish();
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

  ParameterGroups groups_;
  bool rounds_ = false;
  bool offloads_ = false;
  PlannedMatrices matrices_;
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
