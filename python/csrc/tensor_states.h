#pragma once

#include "flatshard/optim/optimizer.h"
#include "python/csrc/py_unit.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::python {

/// An optimizer of Python's as checkpoints see it: the state tensors of each
/// parameter, laid out like the parameter's shard. It updates nothing.
class TensorStates : public Optimizer {
 public:
  using States = std::map<std::string, at::Tensor>;

  /// @param states  of each unit and each of its parameters, in the unit's
  ///   order; not looked at for frozen ones. A tensor has as many elements as
  ///   the parameter's shard, and all parameters of a group have states of the
  ///   same names.
  TensorStates(
      std::vector<std::shared_ptr<PyUnit>> units,
      const std::vector<std::vector<States>>& states);

  /// @param updates  how often each parameter was updated, in the same order.
  void set_updates(const std::vector<std::vector<std::int64_t>>& updates);

  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t /*group*/) const override {
    return {};
  }
  std::vector<std::pair<std::string, std::vector<NamedShard>>> state_shards(
      std::size_t group) const override;

  bool converts_states() const override { return true; }

 private:
  /// visit(unit, parameter, group, place in the group) for all trained ones.
  template <class F>
  void for_trained(F&& visit) const;

  std::vector<std::shared_ptr<PyUnit>> units_;  // own the groups
  std::vector<std::vector<States>> states_;  ///< of each parameter of a group
};

}  // namespace flatshard::python
