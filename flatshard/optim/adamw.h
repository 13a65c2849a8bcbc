#pragma once

#include "flatshard/optim/moments.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/optim/update_algorithm.h"

#include <cstdint>
#include <map>
#include <optional>

namespace flatshard {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  /// The format of exp_avg and exp_avg_sq; see state_format_of for exceptions.
  /// The update is computed in float32, from the states before they are
  /// rounded. int8 requires ParamGroupOptions::alignment kInt8Alignment.
  StateFormat state_dtype = StateFormat::float32;
  StateOffload offload;
};

/// AdamW with decoupled weight decay and bias correction, arXiv:1711.05101.
/// State per group: exp_avg and exp_avg_sq.
class AdamWAlgorithm : public UpdateAlgorithm {
 public:
  void add_group(
      std::size_t group,
      const at::Tensor& main,
      std::span<const ParameterValues> values) override;
  /// @throws Error{config} as Moments.
  void add_parameters(
      std::size_t group,
      const ParamGroup& of,
      const std::vector<OwnParameter>& parameters,
      std::span<const ParameterValues> values) override;
  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const override;
  std::vector<std::pair<std::string, std::vector<NamedShard>>> state_shards(
      std::size_t group) const override;
  UpdateRow row(const ParameterValues& values, double lr, std::int64_t updates)
      const override;
  void visit_states(
      std::size_t group,
      const std::function<void(at::Tensor&)>& visit) override;
  void set_states(std::size_t group, FlatUpdate& update) const override;
  void update(std::size_t group, FlatUpdate& update) override;
  bool encodes_planes(std::size_t group) const override;

 private:
  struct States {
    std::int64_t numel = 0;  ///< of float32 states
    at::TensorOptions options;
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    std::optional<Moments> moments;  ///< states some of which are not float32
  };
  std::map<std::size_t, States> states_;  ///< by group
};

/// An Optimizer that updates all parameters with AdamW. For parameters with
/// other values, see ParameterRules.
class AdamW : public Optimizer {
 public:
  /// Parameters whose attribute kWeightDecayAttribute is "none" are not
  /// decayed.
  /// @throws Error{config} when an option is out of range.
  AdamW(std::vector<ParamGroup*> groups, AdamWOptions options);
};

}  // namespace flatshard
