#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/device/stream.h"
#include "flatshard/group/param_group.h"
#include "flatshard/optim/offloaded_states.h"
#include "flatshard/optim/parameter_rules.h"
#include "flatshard/optim/part_update.h"
#include "flatshard/optim/update_algorithm.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// Updates the main weights of groups from their reduced gradients. Sees flat
/// shards only: one kernel per group, whatever the number of parameters. A
/// group some of whose parameters use another algorithm has one for each.
///
/// Groups without a gradient since the last zero_grad (their unit did not run)
/// are skipped, like parameters whose `.grad` is None in PyTorch.
class Optimizer {
 public:
  /// Has a value for each parameter of each group. A group may have none:
  /// false for all.
  using OfParameters = std::vector<std::vector<bool>>;

  /// Frozen groups are skipped. The groups must outlive the optimizer.
  /// @throws Error{config}: see parameter_groups, and for offloaded states of
  ///   Muon.
  Optimizer(
      std::vector<ParamGroup*> groups,
      const ParameterRules& rules,
      const StateOffload& offload = {});
  /// @param groups  all of them trained.
  Optimizer(
      std::vector<ParamGroup*> groups,
      ParameterGroups parameters,
      const StateOffload& offload = {});
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Runs updates on `stream` from the next step on, in parallel with work
  /// queued after it: the next forward starts while later units are still
  /// updated. All-gathers wait only for the weights of their own unit. Other
  /// users of weights, states or the arguments of `step` must call wait()
  /// first. Null: on the current stream.
  void set_stream(std::shared_ptr<Stream> stream) {
    stream_ = std::move(stream);
  }
  /// Later work of the current stream comes after the updates of the last step.
  void wait() const;
  /// Blocks the host until states in host memory have their values of the last
  /// step. Readers and writers of offloaded states must call it first.
  void wait_for_states() const;

  /// Starts to copy offloaded states to the device for the next step, if its
  /// gradients are queued. Hides the first copies if the host blocks before
  /// `step`.
  void prefetch_states();
  /// Runs one update, after all work queued on the current stream. Each
  /// parameter group has the learning rate lr * ParameterValues::lr_mult.
  ///
  /// @param grad_scale  [] float32 on the device, multiplied into every
  ///   gradient (the clip factor); undefined for 1.
  /// @param without_gradient  parameters that are skipped, although their group
  ///   has a gradient. Muon requires equal ones on all ranks, because the ranks
  ///   exchange matrices.
  /// @throws Error{usage} when gradients wait for the last microbatch.
  void step(
      double lr,
      const at::Tensor& grad_scale = {},
      const OfParameters& without_gradient = {});

  /// Forgets the gradients; the next reduction overwrites them.
  void zero_grad();

  const ParameterGroups& parameter_groups() const { return parameters_; }
  /// Sets the values of a parameter group from the next step on.
  /// @throws Error{config} when one is out of range; Error{usage} when the
  ///   states would have to change: another algorithm or state_dtype, or a
  ///   momentum that was 0.
  void set_values(std::size_t parameter_group, const ParameterValues& values);

  /// Updates done so far; a checkpoint restores it.
  std::int64_t num_steps() const { return num_steps_; }
  void set_num_steps(std::int64_t steps) { num_steps_ = steps; }

  /// Returns how often a parameter was updated; a checkpoint restores it.
  std::int64_t num_updates(std::size_t group, std::size_t parameter) const {
    return updates_.at(group).at(parameter);
  }
  void set_num_updates(
      std::size_t group,
      std::size_t parameter,
      std::int64_t updates) {
    updates_.at(group).at(parameter) = updates;
  }
  /// Returns whether it updates a parameter.
  bool updates(std::size_t group, std::size_t parameter) const {
    return parameters_.of_parameters.at(group).at(parameter) !=
           ParameterGroups::kNotUpdated;
  }

  /// Rounds the new values of bfloat16 main weights stochastically from the
  /// next step on; see stochastic_rounding.h.
  /// @throws Error{config} as rounding_ranges, and for units with Muon or with
  ///   several algorithms.
  void set_stochastic_rounding(std::uint64_t seed);

  /// Returns the names and tensors of a group's state, e.g. exp_avg. If
  /// state_shards is not overridden, each has the size of the main shard. In a
  /// group some of whose parameters use another algorithm, or are not updated,
  /// it has only the runs of those that have the state.
  virtual std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const;
  /// Returns the states of each parameter, for checkpoints to save and load.
  virtual std::vector<std::pair<std::string, std::vector<NamedShard>>>
  state_shards(std::size_t group) const;
  /// Returns whether a checkpoint may have its states in another StateFormat.
  virtual bool converts_states() const { return !algorithms_.empty(); }
  const std::vector<ParamGroup*>& groups() const { return groups_; }
  /// Returns the bytes of the states on the device, or with offloaded states
  /// of the buffers that they are copied to.
  std::int64_t state_nbytes() const;
  /// Returns the bytes of offloaded states in host memory.
  std::int64_t host_state_nbytes() const;

 protected:
  /// Without algorithms, for states that are updated elsewhere.
  explicit Optimizer(std::vector<ParamGroup*> groups);

 private:
  void add_parts(std::size_t group);
  /// Starts the next update of a group: counts it, and sets the rows.
  /// @param skipped  see OfParameters.
  /// @return  whether it updates any parameter.
  bool begin_update(std::size_t group, const std::vector<bool>& skipped);
  /// Returns the number that selects the random bits of the group's update: how
  /// often its parameters were updated. It is different for any two updates of
  /// a parameter.
  std::uint64_t rounding_step(std::size_t group) const;
  /// Returns whether the states of a group are copied to the device for each
  /// update. A group with main weights in host memory is updated there.
  bool offloads_states(const ParamGroup& group) const {
    return offloaded_ != nullptr && !group.options().offload;
  }
  void allocate_offloaded();
  /// Starts the step of each algorithm, for the groups that it updates.
  void begin_step(const std::vector<std::size_t>& groups, double lr);
  std::vector<Communicator*> communicators(std::size_t group) const;
  /// Sets the scalars of the next update of all `groups`, and returns those
  /// that kernels read from the device, one after another.
  std::vector<UpdateRow> set_rows(
      const std::vector<std::size_t>& groups,
      double lr);
  /// Gives the parts their rows of `device_rows`.
  void set_device_rows(
      const std::vector<std::size_t>& groups,
      const at::Tensor& device_rows);
  bool encodes_planes(std::size_t group) const;

  std::vector<ParamGroup*> groups_;
  ParameterGroups parameters_;
  std::map<Algorithm, std::unique_ptr<UpdateAlgorithm>> algorithms_;
  std::vector<std::vector<PartUpdate>> parts_;      ///< of each group
  std::vector<std::vector<std::int64_t>> updates_;  ///< of each parameter
  std::int64_t num_steps_ = 0;
  std::shared_ptr<Stream> stream_;
  Event updated_;
  std::unique_ptr<OffloadedStates> offloaded_;  ///< null: on the device
};

}  // namespace flatshard
