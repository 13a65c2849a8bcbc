#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/comm/communicator.h"
#include "flatshard/group/named_shard.h"
#include "flatshard/group/param_group.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/muon/muon_options.h"
#include "flatshard/optim/parameter_values.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// The states and the arithmetic of an optimizer, for the parameters that use
/// it. It updates each element separately.
class UpdateAlgorithm {
 public:
  UpdateAlgorithm() = default;
  virtual ~UpdateAlgorithm() = default;
  UpdateAlgorithm(const UpdateAlgorithm&) = delete;
  UpdateAlgorithm& operator=(const UpdateAlgorithm&) = delete;

  /// Selects the device of the states of groups that are added next.
  void set_state_device(at::Device device) { state_device_ = device; }
  /// Allocates the states of a group some of whose parameters use the
  /// algorithm, with `values`. Each has the size of `main`: the group's main
  /// shard, or as many elements as its parameters of this algorithm have.
  virtual void add_group(
      std::size_t group,
      const at::Tensor& main,
      std::span<const ParameterValues> values) = 0;
  /// A parameter of a group that uses the algorithm.
  struct OwnParameter {
    std::size_t index = 0;  ///< in ParamGroup::parameters
    std::int32_t row = 0;   ///< index into FlatUpdate::rows
  };
  /// Names the parameters of a group that use the algorithm, after add_group,
  /// and the values of each row.
  virtual void add_parameters(
      std::size_t /*group*/,
      const ParamGroup& /*of*/,
      const std::vector<OwnParameter>& /*parameters*/,
      std::span<const ParameterValues> /*values*/) {}
  /// Returns the names and flat tensors of a group's states, e.g. exp_avg.
  virtual std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const = 0;
  /// Returns the states by parameter if they are not flat tensors of the
  /// shard's size, and otherwise nothing.
  virtual std::vector<std::pair<std::string, std::vector<NamedShard>>>
  state_shards(std::size_t /*group*/) const {
    return {};
  }
  /// Returns the scalars of the update number `updates`, counted from 1.
  virtual UpdateRow
  row(const ParameterValues& values, double lr, std::int64_t updates) const = 0;
  /// Calls `visit` with each tensor of a group's states. `visit` may replace
  /// it.
  virtual void visit_states(
      std::size_t /*group*/,
      const std::function<void(at::Tensor&)>& /*visit*/) {}
  /// Sets the states in `update`.
  virtual void set_states(std::size_t /*group*/, FlatUpdate& /*update*/) const {
  }
  /// Updates the ranges that are not skipped, and the states in `update`.
  virtual void update(std::size_t group, FlatUpdate& update) = 0;

  // For algorithms that see more than single elements.

  /// All groups were added. Collective over the model's mesh.
  virtual void finish_groups() {}
  /// Returns the communicators whose collectives an update of the group uses.
  virtual std::vector<Communicator*> communicators(
      std::size_t /*group*/) const {
    return {};
  }
  /// Starts a step: begin_update follows for each group of it, and then
  /// `update` for each in the same order. The work of the last step is done.
  virtual void begin_step() {}
  /// Starts the update of a group. `update` stays valid during the step, and
  /// `lr` is the rate of the step without ParameterValues::lr_mult. `row_of`
  /// has the row of each parameter of the group, or kSkipped. `values` belong
  /// to the rows.
  virtual void begin_update(
      std::size_t /*group*/,
      const FlatUpdate& /*update*/,
      std::span<const std::int32_t> /*row_of*/,
      std::span<const ParameterValues> /*values*/,
      double /*lr*/) {}

  /// Returns whether `update` fills FlatUpdate::planes.
  virtual bool encodes_planes(std::size_t /*group*/) const { return false; }

 protected:
  /// Returns the device of states of groups that are added now.
  at::Device state_device() const { return state_device_; }

 private:
  at::Device state_device_ = at::kCPU;
};

std::unique_ptr<UpdateAlgorithm> make_algorithm(
    Algorithm algorithm,
    const MuonOptions& muon);

}  // namespace flatshard
