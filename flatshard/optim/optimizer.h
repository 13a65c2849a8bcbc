#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/device/stream.h"
#include "flatshard/group/param_group.h"
#include "flatshard/optim/flat_update.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// A group whose attribute `weight_decay` is "none" on a parameter leaves that
/// parameter undecayed.
inline constexpr const char* kWeightDecayAttribute = "weight_decay";

/// Updates the main weights of groups from their reduced gradients. Sees flat
/// shards only: one kernel per group, whatever the number of parameters.
///
/// Groups without a gradient since the last zero_grad (their unit did not run)
/// are skipped, like parameters whose `.grad` is None in PyTorch.
class Optimizer {
 public:
  /// Frozen groups are skipped. The groups must outlive the optimizer.
  Optimizer(std::vector<ParamGroup*> groups, double weight_decay);
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

  /// Runs one update with learning rate `lr`, after all work queued on the
  /// current stream.
  ///
  /// @param grad_scale  [] float32 on the device, multiplied into every
  ///   gradient (the clip factor); undefined for 1.
  /// @throws Error{usage} when gradients wait for the last microbatch.
  void step(double lr, const at::Tensor& grad_scale = {});

  /// Forgets the gradients; the next reduction overwrites them.
  void zero_grad();

  /// Sets the weight decay of each parameter of a group from the next step on,
  /// in the order of ParamGroup::parameters().
  /// @throws Error{config} when one is negative.
  void set_weight_decay(
      std::size_t group,
      const std::vector<double>& of_parameters);

  /// Updates done so far; a checkpoint restores it.
  std::int64_t num_steps() const { return num_steps_; }
  void set_num_steps(std::int64_t steps) { num_steps_ = steps; }

  /// Returns how often the group was updated; a checkpoint restores it.
  std::int64_t num_updates(std::size_t group) const {
    return group_steps_.at(group);
  }
  void set_num_updates(std::size_t group, std::int64_t updates) {
    group_steps_.at(group) = updates;
  }

  /// Returns the names and flat tensors of a group's state, e.g. exp_avg. Each
  /// has the size of the group's main shard.
  virtual std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const = 0;
  /// Returns the same by parameter, for checkpoints to save and load.
  virtual std::vector<std::pair<std::string, std::vector<NamedShard>>>
  state_shards(std::size_t group) const;
  const std::vector<ParamGroup*>& groups() const { return groups_; }
  std::int64_t state_nbytes() const;

 protected:
  virtual void update(std::size_t group, FlatUpdate& update, double lr) = 0;
  /// `update` writes FlatUpdate::float8.
  virtual bool writes_float8() const { return false; }
  /// Returns how often the group was updated, counting this update.
  std::int64_t group_steps(std::size_t group) const {
    return group_steps_[group];
  }
  at::Tensor new_state(std::size_t group) const;

 private:
  std::vector<ParamGroup*> groups_;
  std::vector<FlatUpdate> updates_;  ///< their decay ranges stay
  std::vector<std::int64_t> group_steps_;
  std::int64_t num_steps_ = 0;
  std::shared_ptr<Stream> stream_;
  Event updated_;
};

}  // namespace flatshard
