#pragma once

#include "flatshard/mesh/mesh.h"
#include "flatshard/optim/optimizer.h"
#include "python/csrc/py_unit.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::python {

/// Options of Muon that follow from the parameters.
struct MatrixOptions {
  /// For each parameter group the rows of the matrices that each of its
  /// parameters consists of, or that each entry of a stack consists of. Empty:
  /// a parameter is one matrix.
  std::vector<std::vector<std::int64_t>> split_sizes;
  /// All ranks that have parts of the parameters; null: their units have them
  /// all.
  std::shared_ptr<Mesh> mesh;
  /// With `mesh`, for each parameter of each unit the axes outside the unit's
  /// mesh along which ranks have other parts of it.
  std::vector<std::vector<std::vector<std::string>>> cut_axes;
};

/// One of the core's optimizers over the groups of some units. It keeps the
/// units alive.
class PyOptimizer {
 public:
  /// @param group_of_parameters  the parameter group of each parameter of each
  ///   unit, in the unit's order; -1 for parameters that are not updated.
  /// @param values  of each parameter group, all of one algorithm.
  PyOptimizer(
      std::vector<std::shared_ptr<PyUnit>> units,
      const std::vector<std::vector<std::int64_t>>& group_of_parameters,
      const std::vector<ParameterValues>& values,
      const MatrixOptions& matrices);

  /// Makes one update.
  ///
  /// @param values  of each parameter group.
  /// @param without_gradient  for each unit the parameters that are skipped,
  ///   see Optimizer::step. It may name parameters of other optimizers.
  void step(
      const std::vector<ParameterValues>& values,
      const std::vector<std::vector<std::size_t>>& without_gradient);

  /// Rounds new values of bfloat16 parameters stochastically. The names of
  /// parameters determine the random numbers.
  void set_stochastic_rounding(std::uint64_t seed) {
    optimizer_->set_stochastic_rounding(seed);
  }

  /// Returns the states of parameter i of a unit, like its shard. int8 states
  /// are their codes.
  std::map<std::string, at::Tensor> state(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i) const;
  /// Returns the values of int8 states, like the parameter's shard; otherwise
  /// nothing.
  std::map<std::string, at::Tensor> decoded(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i) const;
  /// Writes values to int8 states.
  /// @param values  of the rows of this rank, as the core stores them.
  void encode(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i,
      const std::string& name,
      const at::Tensor& values);
  std::int64_t num_updates(const std::shared_ptr<PyUnit>& unit, std::size_t i)
      const {
    return optimizer_->num_updates(group_of(*unit, i), unit->index_in_group(i));
  }
  void set_num_updates(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i,
      std::int64_t updates);

  Optimizer& optimizer() { return *optimizer_; }

 private:
  using States = std::map<std::string, at::Tensor>;

  std::size_t group_of(const PyUnit& unit, std::size_t i) const;
  /// Returns this rank's states of parameter i of a unit, and their scales. A
  /// rank without rows of it has empty ones of the same dtypes.
  const States& shards_of(const PyUnit& unit, std::size_t i) const;

  std::vector<std::shared_ptr<PyUnit>> units_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::vector<States>> states_;  ///< of each parameter of a group
};

/// Several optimizers of one model as a checkpoint sees them. It updates
/// nothing.
class SeveralOptimizers : public Optimizer {
 public:
  explicit SeveralOptimizers(std::vector<std::shared_ptr<PyOptimizer>> of);

  /// Before a save: the numbers of updates are the optimizers'.
  void take_updates();
  /// After a load: the optimizers have these numbers.
  void give_updates();

  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t /*group*/) const override {
    return {};
  }
  std::vector<std::pair<std::string, std::vector<NamedShard>>> state_shards(
      std::size_t group) const override;
  bool converts_states() const override { return true; }

 private:
  /// visit(optimizer, its index of the group) for each that updates the group.
  template <class F>
  void for_each_of(std::size_t group, F&& visit) const;
  /// visit(group, parameter, optimizer, its index of the group) for the
  /// parameters that an optimizer updates.
  template <class F>
  void for_each_parameter(F&& visit) const;

  std::vector<std::shared_ptr<PyOptimizer>> of_;
};

}  // namespace flatshard::python
